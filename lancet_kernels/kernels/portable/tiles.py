"""The GEMM tasks of the overlap kernel: what each waits for, which matrices it multiplies, whom it tells.

    W  PEs, L experts on each    D  model width    F  hidden width    H  F, or 2F for swiglu
    R  most rows received        S  most rows sent                    BM, BN  the tile of the output

The rows of an expert lie together, in every buffer of received rows (`schedule.py`). Of its two GEMMs TILE_IN
is the first in the direction of the launch, TILE_OUT the second:

               TILE_IN                          TILE_OUT              WGRAD
    forward    hidden = act(x @ w1 + b1)        y = hidden @ w2 + b2
    backward   dh = w (dy @ w2^T) * act'(pre)   dx = dh @ w1^T        dw2 = (w hidden)^T dy, dw1 = x^T dh

w is the weight of a row in its token's sum. Its gradient is dy . y = (dy @ w2^T) . hidden + dy . b2, which
TILE_IN has in registers: so nobody keeps the results y of the forward.

The tiles themselves are those of `gemm.py`; what is put and waited for is in `protocol/steps.py`.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels.portable import gemm
from lancet_kernels.kernels.protocol import steps
from lancet_kernels.kernels.protocol.schedule import group
from lancet_kernels.kernels.protocol.tasks import DENSE_WORDS


@triton.jit
def tile_in(
    task, epoch, of_pass, sizes, arrivals, gemms, blocks,
    BACKWARD: tl.constexpr, ACT: tl.constexpr, NVSHMEM: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """TILE_IN: wait for the rows of a tile, whoever sends them, multiply them, count the column as ready.

    If rows did not come in time, nothing happens.
    Example: that of `schedule`, PE 0, BM = BN = 4: tile 3 is rows 9 and 10, of local expert 1; n = 3 makes
    hidden[9:11, 12:16], then adds 1 to the ready word of tile 3.
    """
    D, F, H, R = sizes.D, sizes.F, sizes.H, sizes.R
    local, expert, m, rows, first_row = steps.expert_of_tile(task.index, of_pass, sizes)
    here = steps.wait_rows(
        task.index, m, expert, epoch, of_pass, sizes, arrivals.arrived, NVSHMEM, TMA, blocks.BM, blocks.BW,
    )  # fmt: skip
    if here:
        row = first_row.to(tl.int64)
        m0, n0 = m * blocks.BM, task.n * blocks.BN_IN
        x_ptr = arrivals.rows + (steps.base_of(of_pass, BACKWARD) + row) * D
        pre_ptr = gemms.pre + (steps.base_of(of_pass, False) + row) * H
        weight_ptr = gemms.weight_in
        if BACKWARD:
            dots = gemm.backward_tile(
                x_ptr, weight_ptr + local.to(tl.int64) * D * F, pre_ptr, arrivals.weights + row,
                gemms.hidden + row * H, gemms.activated + row * F, rows, m0, n0, D, F,
                ACT, TMA, blocks.BM, blocks.BN_IN, blocks.BK,
            )  # fmt: skip
            if gemms.bias_in is not None:
                if task.n == 0:
                    dots = gemm.add_row_dots(dots, x_ptr, gemms.bias_in + local * D, rows, m0, D, blocks.BM)
            i_m = m0 + tl.arange(0, blocks.BM)
            tl.store(gemms.row_dots + tl.cast(task.n, tl.int64) * R + row + i_m, dots, mask=i_m < rows)
        else:
            HAS_BIAS: tl.constexpr = gemms.bias_in is not None
            bias_ptr = gemms.bias_in + local * H if HAS_BIAS else None
            gemm.forward_tile(
                x_ptr, weight_ptr + local.to(tl.int64) * D * H, bias_ptr, pre_ptr, gemms.hidden + row * F,
                rows, m0, n0, D, F, ACT, TMA, blocks.BM, blocks.BN_IN, blocks.BK,
            )  # fmt: skip
        steps.finish_ready(task.index, of_pass)


@triton.jit
def tile_out(
    task, epoch, of_pass, sizes, returns, stages, gemms, blocks,
    BACKWARD: tl.constexpr, NVSHMEM: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """TILE_OUT: multiply a tile of the first GEMM's result, store each row at its source; the last n signals.

    A backward's n = 0 also returns the gradients of the rows' weights. What is missing is not made up:
    nothing is stored, nobody told.
    Example: that of `schedule`, PE 0, BM = BN = 4: tile 3, n = 0 goes to results[6, 0:4] of PE 0 (its fifth
    row for expert 1) and to results[3, 0:4] of PE 1.
    """
    D, F, H = sizes.D, sizes.F, sizes.H
    local, expert, m, rows, first_row = steps.expert_of_tile(task.index, of_pass, sizes)
    columns_in = tl.cdiv(F, blocks.BN_IN)
    if steps.wait_ready(task.index, columns_in, of_pass, sizes, TMA):
        row = first_row.to(tl.int64)
        m0, n0 = m * blocks.BM, task.n * blocks.BN
        # Of the contraction: hidden, or its gradient.
        K = H if BACKWARD else F
        acc, _ = gemm.product(
            gemms.hidden + row * K, gemms.weight_out + local.to(tl.int64) * D * K, rows, m0, n0, K, D,
            False, BACKWARD, TMA, blocks.BM, blocks.BN, blocks.BK,
        )  # fmt: skip
        HAS_BIAS: tl.constexpr = not BACKWARD and gemms.bias_out is not None
        bias_ptr = gemms.bias_out + local * D if HAS_BIAS else None
        i = m0 + tl.arange(0, blocks.BM)
        p_row, m_row = steps.result_rows(expert, i, rows, first_row, of_pass, sizes, returns, stages, NVSHMEM)
        gemm.store_to_rows(p_row, m_row, acc, bias_ptr, n0, D, blocks.BM, blocks.BN)
        if BACKWARD:
            if task.n == 0:
                steps.return_dots(
                    expert, m, rows, first_row, columns_in, of_pass, sizes, gemms.row_dots, returns, stages,
                    NVSHMEM, blocks.BM,
                )  # fmt: skip
        steps.return_tile(
            task.index, m, task.n, expert, first_row, epoch, of_pass, sizes, returns, stages,
            BACKWARD, NVSHMEM, blocks.BM, blocks.BN,
        )  # fmt: skip


@triton.jit
def tile_wgrad(
    task, sound, of_pass, sizes, arrivals, gemms, gradients, blocks, TMA: tl.constexpr
):  # fmt: skip
    """WGRAD: one tile of dw2 [F, D] (which = 0) or dw1 [D, H] (1) of an expert, over all its rows.

    The rows of arrivals are dy, hidden is dh, activated the weighted hidden; saved_rows is x. What rests on
    rows that did not come, or of a pass that is not `sound`, is NaN. The tiles with m = 0 write the bias
    gradients, in a second look at rows that their dot has just brought into L2.
    Example: which = 1, index = 2, m = 0, n = 1, BM = BN = 4: dw1[2, 0:4, 4:8] and db1[2, 4:8].
    """
    BM: tl.constexpr = blocks.BM
    BN: tl.constexpr = blocks.BN
    expert = sizes.rank * sizes.L + task.index
    rows, first_row, first_tile = group(of_pass.table, sizes.W, sizes.W * sizes.L, expert)
    here = steps.wait_expert(rows, first_tile, sound, of_pass, sizes, blocks, TMA)
    x_ptr, dy_ptr, A, B = steps.wgrad_operands(task, first_row, of_pass, sizes, arrivals, gemms, gradients)
    dw_ptr = steps.wgrad_result(task, A, B, gradients)
    m0, n0 = task.m * BM, task.n * BN
    if here:
        gemm.weight_gradient_tile(x_ptr, dy_ptr, dw_ptr, rows, m0, n0, A, B, TMA, BM, BN, blocks.BK)
        if gradients.bias_in is not None:
            if task.m == 0:
                # Of dy, each row by its weight; dh has it already.
                weighted = tl.where(task.which == 0, rows, 0)
                db_ptr, weight_ptr = steps.bias_result(task, B, gradients), arrivals.weights + first_row
                gemm.bias_gradient_tile(dy_ptr, db_ptr, weight_ptr, weighted, rows, n0, B, BN, blocks.BK)
    else:
        steps.poison_wgrad(task, dw_ptr, A, B, gradients, BM, BN)


@triton.jit
def dense_problem(problems_ptr, problem, like_ptr, TMA: tl.constexpr):
    """-> a, b, c, M, N and K of a row of the table of independent GEMMs; pointers as `like_ptr`."""
    p = problems_ptr + problem * DENSE_WORDS
    a_ptr = tl.load(p).to(like_ptr.dtype)
    b_ptr = tl.load(p + 1).to(like_ptr.dtype)
    c_ptr = tl.load(p + 2).to(like_ptr.dtype)
    M = tl.load(p + 3).to(tl.int32)
    N = tl.load(p + 4).to(tl.int32)
    K = tl.load(p + 5).to(tl.int32)
    if TMA:
        # The launcher has seen to it; not knowing it, a program stores c element by element.
        N = tl.multiple_of(N, 128 // like_ptr.dtype.element_ty.primitive_bitwidth)
        a_ptr = tl.multiple_of(a_ptr, 16)
        b_ptr = tl.multiple_of(b_ptr, 16)
        c_ptr = tl.multiple_of(c_ptr, 16)
    return a_ptr, b_ptr, c_ptr, M, N, K


@triton.jit
def dense_tile(task, problems_ptr, like_ptr, blocks, TMA: tl.constexpr):
    """DENSE: one tile of an independent GEMM c [M, N] = a [K, M]^T @ b [K, N] of the table.

    Operands are contiguous and typed like `like_ptr`.
    """
    a_ptr, b_ptr, c_ptr, M, N, K = dense_problem(problems_ptr, task.index, like_ptr, TMA)
    m0, n0 = task.m * blocks.BM, task.n * blocks.BN
    gemm.weight_gradient_tile(a_ptr, b_ptr, c_ptr, K, m0, n0, M, N, TMA, blocks.BM, blocks.BN, blocks.BK)
