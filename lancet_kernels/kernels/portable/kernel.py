"""The persistent kernel in which puts, expert GEMMs, weight gradients and independent GEMMs share one launch.

Every program claims the next task number from one counter until there is none (`tasks.py` and `schedule.py`
have the order and the reason why it cannot deadlock). The rows of an expert lie together, in every buffer of
received rows. Of its two GEMMs TILE_IN is the first in the direction of the launch, TILE_OUT the second:

               TILE_IN                          TILE_OUT              WGRAD
    forward    hidden = act(x @ w1 + b1)        y = hidden @ w2 + b2
    backward   dh = w (dy @ w2^T) * act'(pre)   dx = dh @ w1^T        dw2 = (w hidden)^T dy, dw1 = x^T dh

w is the weight of a row in its token's sum. Its gradient is dy . y = (dy @ w2^T) . hidden + dy . b2, which
TILE_IN has in registers: so nobody keeps the results y of the forward.

The tiles themselves are those of `gemm.py`; what is put and waited for is in `protocol/steps.py`. What a
launch lacks is None, and its code is not there.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels.portable import gemm
from lancet_kernels.kernels.protocol import NOT_SPECIALIZED, Constants, Pointers, Sizes, device, steps, tasks
from lancet_kernels.kernels.protocol.schedule import NUM_TILES, group


@triton.jit
def tile_in(task, epoch, ptrs, sizes, const):
    """TILE_IN: wait for the rows of a tile, whoever sends them, multiply them, count the column as ready.

    If rows did not come in time, nothing happens.
    Example: that of `schedule`, PE 0, BM = BN = 4: tile 3 is rows 9 and 10, of local expert 1; n = 3 makes
    hidden[9:11, 12:16], then adds 1 to the ready word of tile 3.
    """
    D, F, H, R = sizes.D, sizes.F, sizes.H, sizes.R
    local, expert, m, rows, first_row = steps.expert_of_tile(task.index, ptrs, sizes)
    here = steps.wait_rows(task.index, m, expert, epoch, ptrs, sizes, const)
    if here:
        row = first_row.to(tl.int64)
        m0, n0 = m * const.BM, task.n * const.BN_IN
        x_ptr = ptrs.arrivals.rows + (steps.base_of(ptrs, const.BACKWARD) + row) * D
        pre_ptr = ptrs.gemms.pre + (steps.base_of(ptrs, False) + row) * H
        weight_ptr = ptrs.gemms.weight_in
        if const.BACKWARD:
            dots = gemm.backward_tile(
                x_ptr, weight_ptr + local.to(tl.int64) * D * F, pre_ptr, ptrs.arrivals.weights + row,
                ptrs.gemms.hidden + row * H, ptrs.gemms.activated + row * F, rows, m0, n0, D, F,
                const.ACT, const.TMA, const.BM, const.BN_IN, const.BK,
            )  # fmt: skip
            if ptrs.gemms.bias_in is not None:
                if task.n == 0:
                    b_ptr = ptrs.gemms.bias_in + local * D
                    dots = gemm.add_row_dots(dots, x_ptr, b_ptr, rows, m0, D, const.BM)
            i_m = m0 + tl.arange(0, const.BM)
            tl.store(ptrs.gemms.row_dots + tl.cast(task.n, tl.int64) * R + row + i_m, dots, mask=i_m < rows)
        else:
            HAS_BIAS: tl.constexpr = ptrs.gemms.bias_in is not None
            bias_ptr = ptrs.gemms.bias_in + local * H if HAS_BIAS else None
            gemm.forward_tile(
                x_ptr, weight_ptr + local.to(tl.int64) * D * H, bias_ptr, pre_ptr,
                ptrs.gemms.hidden + row * F, rows, m0, n0, D, F,
                const.ACT, const.TMA, const.BM, const.BN_IN, const.BK,
            )  # fmt: skip
        steps.finish_ready(task.index, ptrs)


@triton.jit
def tile_out(task, epoch, ptrs, sizes, const):
    """TILE_OUT: multiply a tile of the first GEMM's result, store each row at its source; the last n signals.

    A backward's n = 0 also returns the gradients of the rows' weights. If rows are missing, nothing is stored
    and no signal sent.
    Example: that of `schedule`, PE 0, BM = BN = 4: tile 3, n = 0 goes to results[6, 0:4] of PE 0 (its fifth
    row for expert 1) and to results[3, 0:4] of PE 1.
    """
    D, F, H = sizes.D, sizes.F, sizes.H
    local, expert, m, rows, first_row = steps.expert_of_tile(task.index, ptrs, sizes)
    columns_in = tl.cdiv(F, const.BN_IN)
    if steps.wait_ready(task.index, columns_in, ptrs, sizes, const):
        row = first_row.to(tl.int64)
        m0, n0 = m * const.BM, task.n * const.BN
        # Of the contraction: hidden, or its gradient.
        K = H if const.BACKWARD else F
        acc, _ = gemm.product(
            ptrs.gemms.hidden + row * K, ptrs.gemms.weight_out + local.to(tl.int64) * D * K, rows, m0, n0, K,
            D, False, const.BACKWARD, const.TMA, const.BM, const.BN, const.BK,
        )  # fmt: skip
        HAS_BIAS: tl.constexpr = not const.BACKWARD and ptrs.gemms.bias_out is not None
        bias_ptr = ptrs.gemms.bias_out + local * D if HAS_BIAS else None
        i = m0 + tl.arange(0, const.BM)
        p_row, m_row = steps.result_rows(expert, i, rows, first_row, ptrs, sizes, const)
        gemm.store_to_rows(p_row, m_row, acc, bias_ptr, n0, D, const.BM, const.BN)
        if const.BACKWARD:
            if task.n == 0:
                steps.return_dots(expert, m, rows, first_row, ptrs, sizes, const)
        steps.return_tile(task.index, m, task.n, expert, first_row, epoch, ptrs, sizes, const)


@triton.jit
def tile_wgrad(task, sound, ptrs, sizes, const):
    """WGRAD: one tile of dw2 [F, D] (which = 0) or dw1 [D, H] (1) of an expert, over all its rows.

    The rows of arrivals are dy, hidden is dh, activated the weighted hidden; saved_rows is x. What rests on
    rows that did not come, or of a pass that is not `sound`, is NaN. The tiles with m = 0 write the bias
    gradients, in a second look at rows that their dot has just brought into L2.
    Example: which = 1, index = 2, m = 0, n = 1, BM = BN = 4: dw1[2, 0:4, 4:8] and db1[2, 4:8].
    """
    BM: tl.constexpr = const.BM
    BN: tl.constexpr = const.BN
    expert = sizes.rank * sizes.L + task.index
    rows, first_row, first_tile = group(ptrs.of_pass.table, sizes.W, sizes.W * sizes.L, expert)
    here = steps.wait_expert(rows, first_tile, sound, ptrs, sizes, const)
    x_ptr, dy_ptr, A, B = steps.wgrad_operands(task, first_row, ptrs, sizes)
    dw_ptr = steps.wgrad_result(task, A, B, ptrs)
    m0, n0 = task.m * BM, task.n * BN
    if here:
        gemm.weight_gradient_tile(x_ptr, dy_ptr, dw_ptr, rows, m0, n0, A, B, const.TMA, BM, BN, const.BK)
        if ptrs.gradients.bias_in is not None:
            if task.m == 0:
                # Of dy, each row by its weight; dh has it already.
                weighted = tl.where(task.which == 0, rows, 0)
                db_ptr, weight_ptr = steps.bias_result(task, B, ptrs), ptrs.arrivals.weights + first_row
                gemm.bias_gradient_tile(dy_ptr, db_ptr, weight_ptr, weighted, rows, n0, B, BN, const.BK)
    else:
        steps.poison_wgrad(task, dw_ptr, A, B, ptrs, const)


@triton.jit
def dense_tile(task, ptrs, const):
    """DENSE: one tile of an independent GEMM c [M, N] = a [K, M]^T @ b [K, N] of the table; contiguous."""
    a_ptr, b_ptr, c_ptr, M, N, K = tasks.dense_problem(task.index, ptrs, const)
    m0, n0 = task.m * const.BM, task.n * const.BN
    gemm.weight_gradient_tile(a_ptr, b_ptr, c_ptr, K, m0, n0, M, N, const.TMA, const.BM, const.BN, const.BK)


@triton.jit
def _perform(ptrs, sizes, const):
    """Claim tasks until there is none, and do them."""
    epoch, sound = tl.load(ptrs.of_pass.words), steps.is_sound(ptrs)
    num_tiles = tl.load(ptrs.of_pass.table + NUM_TILES)
    num_puts = steps.num_put_tasks(ptrs)
    num_gemms = tasks.num_gemm_tasks(num_tiles, sizes, const)
    num_tasks = tl.minimum(num_puts + num_gemms, sizes.limit)
    # What a tile of the second GEMM needs is then behind what other programs are still at.
    lag = tasks.lag_of(tl.num_programs(0), tl.cdiv(sizes.F, const.BN_IN))
    i = steps.claim(ptrs, steps.CLAIMS)
    while i < num_tasks:
        if i < num_puts:
            steps.put_part(i, epoch, ptrs, sizes, const)
        else:
            task = tasks.gemm_task(i - num_puts, num_tiles, lag, ptrs, sizes, const)
            if task.kind == tasks.TILE_IN:
                tile_in(task, epoch, ptrs, sizes, const)
            if task.kind == tasks.TILE_OUT:
                tile_out(task, epoch, ptrs, sizes, const)
            if const.BACKWARD:
                if task.kind == tasks.WGRAD:
                    tile_wgrad(task, sound, ptrs, sizes, const)
            if ptrs.problems is not None:
                if task.kind == tasks.DENSE:
                    dense_tile(task, ptrs, const)
        i = steps.claim(ptrs, steps.CLAIMS)
    # The network may still read the stage, which is the next launch's, too.
    device.quiet(const.NVSHMEM)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def overlap_kernel(
    of_pass, arrivals, returns, stages, sending, gemms, gradients, problems_ptr,
    rank, W, L, D, F, R, tiles, chunks, timeout_us, num_problems, dense_tiles, limit,
    BACKWARD: tl.constexpr, ACT: tl.constexpr, NVSHMEM: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BN_IN: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
    PUT_ROWS: tl.constexpr, PUT_BLOCK: tl.constexpr,
):  # fmt: skip
    """One launch: a forward, or with `gradients` a backward. `protocol` says what the tuples hold.

    Grid: (programs,), at most what is resident; one is enough. limit: no more than so many tasks.
    Floor: FLOPs of the GEMMs (2 * rows * D * H and 2 * rows * F * D forward) over the peak, or the bytes put
    (rows * D * element size, each direction) over the link, whichever is longer.
    Example, backward, 2 PEs: PUT sends dy of 6 rows to expert 1; the peer's TILE_IN makes dh of them with
    W2^T, TILE_OUT dx with W1^T, stored here; WGRAD tiles of dW2, dW1 fill the way back.
    """
    H = 2 * F if ACT == "swiglu" else F
    # Not assigned to a name, which would make tensors of constants.
    _perform(
        Pointers(of_pass, arrivals, returns, stages, sending, gemms, gradients, problems_ptr),
        Sizes(rank, W, L, D, F, H, R, tiles, chunks, timeout_us, num_problems, dense_tiles, limit),
        Constants(BACKWARD, ACT, NVSHMEM, TMA, BM, BN, BN_IN, BK, BW, PUT_ROWS, PUT_BLOCK),
    )  # fmt: skip
