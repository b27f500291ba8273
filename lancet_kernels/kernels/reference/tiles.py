"""The GEMM tasks of the overlap kernel: what each waits for, which matrices it multiplies, whom it tells.

    W  PEs, L experts on each    D  model width    F  hidden width    H  F, or 2F for swiglu    B  banks
    R  most rows received        S  most rows sent                    BM, BN  the tile of the output

The rows of an expert lie together, in every buffer of received rows (`schedule.py`). Of its two GEMMs TILE_IN
is the first in the direction of the launch, TILE_OUT the second:

               TILE_IN                          TILE_OUT              WGRAD
    forward    hidden = act(x @ w1 + b1)        y = hidden @ w2 + b2
    backward   dh = w (dy @ w2^T) * act'(pre)   dx = dh @ w1^T        dw2 = (w hidden)^T dy, dw1 = x^T dh

w is the weight of a row in its token's sum. Its gradient is dy . y = (dy @ w2^T) . hidden + dy . b2, which
TILE_IN has in registers: so nobody keeps the results y of the forward.

The tiles themselves are those of `reference/gemm.py`; what is put and waited for is in `protocol/steps.py`.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels.protocol.schedule import group, tile_ptr
from lancet_kernels.kernels.protocol.steps import (
    finish_ready,
    poison_wgrad,
    result_rows,
    return_dots,
    return_tile,
    wait_ready,
    wait_rows,
)
from lancet_kernels.kernels.protocol.tasks import DENSE_WORDS
from lancet_kernels.kernels.reference.gemm import (
    NN,
    NT,
    TN,
    add_column_sums,
    add_outer_products,
    add_row_dots,
    backward_tile,
    dgrad_tile,
    forward_tile,
    rows_times_transposed,
    rows_times_weight,
    store_bias_gradient,
    store_to_rows,
    store_weight_gradient,
)


@triton.jit
def tile_in(
    tile, n, epoch, rank, W, L, D, F, H, R, tiles, table_ptr,
    rows_ptr, arrived_ptr, weight_ptr, bias_ptr, pre_ptr, hidden_ptr, activated_ptr,
    row_weights_ptr, row_dots_ptr, ready_ptr, max_polls, report_ptr,
    BACKWARD: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE_PRE: tl.constexpr,
    BANKS: tl.constexpr, NVSHMEM: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """TILE_IN: wait for the rows of a tile, whoever sends them, multiply them, count the column as ready.

    rows [B, R, D]; pre [R, H]. Forward: weight [L, D, H], bias [L, H], hidden [R, F]. Backward: weight
    [L, F, D], bias [L, D], row_weights [B, R], float32; hidden [R, H], which is dh; activated [R, F], the
    forward's hidden again, weighted; row_dots [columns, R], float32, each row's share of the gradient of its
    weight. If rows did not come in time, nothing happens.
    Example: that of `schedule`, PE 0, BM = BN = 4: tile 3 is rows 9 and 10, of local expert 1; n = 3 makes
    hidden[9:11, 12:16], then adds 1 to the ready words of tile 3 and of expert 1.
    """
    local = tl.load(tile_ptr(table_ptr, W, W * L) + tile)
    rows, first_row, first_tile = group(table_ptr, W, W * L, rank * L + local)
    m = tile - first_tile
    here = wait_rows(
        tile, m, rank * L + local, epoch, rank, W, L, tiles, table_ptr, arrived_ptr, max_polls,
        report_ptr, NVSHMEM, TMA, BANKS, BM, BW,
    )  # fmt: skip
    if here:
        row = first_row.to(tl.int64)
        x_ptr = rows_ptr + ((epoch % BANKS) * R + row) * D
        pre_ptr += row * H
        if BACKWARD:
            dots = backward_tile(
                x_ptr, weight_ptr + local.to(tl.int64) * D * F, pre_ptr,
                row_weights_ptr + (epoch % BANKS) * R + row, hidden_ptr + row * H, activated_ptr + row * F,
                rows, m * BM, n * BN, D, F, ACT, UPCAST, TMA, BM, BN, BK,
            )  # fmt: skip
            if HAS_BIAS:
                if n == 0:
                    dots = add_row_dots(dots, x_ptr, bias_ptr + local * D, rows, m * BM, D, BM)
            i_m = m * BM + tl.arange(0, BM)
            tl.store(row_dots_ptr + tl.cast(n, tl.int64) * R + row + i_m, dots, mask=i_m < rows)
        else:
            forward_tile(x_ptr, weight_ptr + local.to(tl.int64) * D * H, bias_ptr + local * H, pre_ptr,
                         hidden_ptr + row * F, rows, m * BM, n * BN, D, F,
                         ACT, HAS_BIAS, SAVE_PRE, UPCAST, TMA, BM, BN, BK)  # fmt: skip
        finish_ready(ready_ptr, tile, local, tiles)


@triton.jit
def tile_out(
    tile, n, epoch, rank, sound, W, L, D, F, H, R, tiles, chunks, table_ptr,
    ready_ptr, weight_ptr, bias_ptr, hidden_ptr, stage_ptr, results_ptr, results_peers_ptr,
    row_dots_ptr, dots_stage_ptr, dots_ptr, dots_peers_ptr, returned_ptr, returned_peers_ptr, done_ptr,
    max_polls, report_ptr,
    HAS_IN: tl.constexpr, BACKWARD: tl.constexpr, HAS_BIAS: tl.constexpr,
    BANKS: tl.constexpr, NVSHMEM: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BN_IN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """TILE_OUT: multiply a tile of the first GEMM's result, store each row at its source; the last n signals.

    Forward: hidden [R, F], weight [L, F, D], bias [L, D]; backward: hidden (dh) [R, H], weight [L, D, H].
    results [S, D] of a source are in its order of sending; stage [R, D] is ours, for a source that no
    pointer reaches. A backward's n = 0 also returns the gradients of the rows' weights. HAS_IN: this
    launch makes hidden, in columns of BN_IN, so wait for it; else an earlier launch of this use has, if
    it was `sound`. What is missing is not made up: nothing is stored, nobody told.
    Example: that of `schedule`, PE 0, BM = BN = 4: tile 3, n = 0 goes to results[6, 0:4] of PE 0 (its fifth
    row for expert 1) and to results[3, 0:4] of PE 1.
    """
    local = tl.load(tile_ptr(table_ptr, W, W * L) + tile)
    expert = rank * L + local
    rows, first_row, first_tile = group(table_ptr, W, W * L, expert)
    m = tile - first_tile
    hidden_is_here = sound != 0
    if HAS_IN:
        hidden_is_here = wait_ready(tile, tl.cdiv(F, BN_IN), rank, ready_ptr, max_polls, report_ptr, TMA)
    if hidden_is_here:
        row = first_row.to(tl.int64)
        if BACKWARD:
            acc = rows_times_transposed(
                hidden_ptr + row * H, weight_ptr + local.to(tl.int64) * D * H, rows, m * BM, n * BN, H, D,
                UPCAST, TMA, BM, BN, BK,
            )  # fmt: skip
        else:
            acc, _ = rows_times_weight(
                hidden_ptr + row * F, weight_ptr + local.to(tl.int64) * F * D, rows, m * BM, n * BN, F, D,
                False, UPCAST, TMA, BM, BN, BK,
            )  # fmt: skip
        i = m * BM + tl.arange(0, BM)
        p_row, m_row = result_rows(
            expert, i, rows, first_row, W, L, D, table_ptr, stage_ptr, results_ptr, results_peers_ptr,
            NVSHMEM,
        )  # fmt: skip
        bias_ptr += local * D
        store_to_rows(p_row, m_row, acc, bias_ptr, n * BN, D, HAS_BIAS and not BACKWARD, BM, BN)
        if BACKWARD:
            if n == 0:
                return_dots(
                    expert, m, rows, first_row, tl.cdiv(F, BN_IN), W, L, R, table_ptr, row_dots_ptr,
                    dots_stage_ptr, dots_ptr, dots_peers_ptr, NVSHMEM, BM,
                )  # fmt: skip
        return_tile(
            tile, m, n, expert, first_row, epoch, rank, W, L, D, tiles, chunks, table_ptr,
            stage_ptr, results_ptr, results_peers_ptr, dots_stage_ptr, dots_ptr,
            returned_ptr, returned_peers_ptr, done_ptr, BACKWARD, BANKS, NVSHMEM, BM, BN,
        )  # fmt: skip


@triton.jit
def wgrad_operands(
    which, first_row, epoch, earlier_use_ptr, D, F, H, R, rows_ptr, hidden_ptr, saved_rows_ptr,
    activated_ptr, BANKS: tl.constexpr, EARLIER_BANKS: tl.constexpr,
):  # fmt: skip
    """-> x [rows, A], dy [rows, B], A and B of a weight gradient x^T dy: dw2's (which = 0) or dw1's (1)."""
    row = first_row.to(tl.int64)
    bank = epoch % BANKS
    earlier_bank = tl.load(earlier_use_ptr) % EARLIER_BANKS
    x_ptr, dy_ptr, A, B = activated_ptr + row * F, rows_ptr + (bank * R + row) * D, F, D
    if which == 1:
        x_ptr, dy_ptr, A, B = saved_rows_ptr + (earlier_bank * R + row) * D, hidden_ptr + row * H, D, H
    return x_ptr, dy_ptr, A, B


@triton.jit
def wgrad_results(which, local, A, B, dweight_in_ptr, dbias_in_ptr, dweight_out_ptr, dbias_out_ptr):
    """-> dw [A, B] and dbias [B] of a local expert; which: as of `wgrad_operands`."""
    dw_ptr, db_ptr = dweight_in_ptr, dbias_in_ptr
    if which == 1:
        dw_ptr, db_ptr = dweight_out_ptr, dbias_out_ptr
    return dw_ptr + local.to(tl.int64) * A * B, db_ptr + local * B


@triton.jit
def tile_wgrad(
    which, local, m, n, epoch, earlier_use_ptr, rank, sound, W, L, D, F, H, R, tiles, table_ptr,
    rows_ptr, row_weights_ptr, hidden_ptr, ready_ptr, saved_rows_ptr, activated_ptr,
    dweight_in_ptr, dbias_in_ptr, dweight_out_ptr, dbias_out_ptr, max_polls, report_ptr,
    HAS_IN: tl.constexpr, HAS_BIAS: tl.constexpr, BANKS: tl.constexpr, EARLIER_BANKS: tl.constexpr,
    UPCAST: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BN_IN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """WGRAD: one tile of dw2 [F, D] (which = 0) or dw1 [D, H] (1) of an expert, over all its rows.

    rows [B, R, D] is dy, hidden [R, H] dh; activated [R, F] the weighted hidden, both made by TILE_IN;
    saved_rows is x, in the bank of the forward's use (the epoch at earlier_use). HAS_IN, sound: as of
    `tile_out`; what rests on rows that did not come is NaN. The tiles with m = 0 write the bias gradients, in
    a second look at rows that their dot has just brought into L2.
    Example: which = 1, local = 2, m = 0, n = 1, BM = BN = 4: dweight_out[2, 0:4, 4:8] and dbias_out[2, 4:8].
    """
    rows, first_row, _ = group(table_ptr, W, W * L, rank * L + local)
    hidden_is_here = sound != 0
    if HAS_IN:
        hidden_is_here = hidden_is_here & wait_ready(
            tiles + local, tl.cdiv(rows, BM) * tl.cdiv(F, BN_IN), rank, ready_ptr, max_polls, report_ptr, TMA
        )
    x_ptr, dy_ptr, A, B = wgrad_operands(
        which, first_row, epoch, earlier_use_ptr, D, F, H, R, rows_ptr, hidden_ptr, saved_rows_ptr,
        activated_ptr, BANKS, EARLIER_BANKS,
    )  # fmt: skip
    dw_ptr, db_ptr = wgrad_results(
        which, local, A, B, dweight_in_ptr, dbias_in_ptr, dweight_out_ptr, dbias_out_ptr
    )  # fmt: skip
    if hidden_is_here:
        acc = tl.zeros((BM, BN), tl.float32)
        acc = add_outer_products(
            acc, x_ptr, dy_ptr, rows, m * BM, n * BN, A, B, UPCAST, TMA, BM, BN, BK
        )  # fmt: skip
        store_weight_gradient(dw_ptr, acc, m * BM, n * BN, A, B, BM, BN)
        if HAS_BIAS:
            if m == 0:
                # Of dy, each row by its weight; dh has it already.
                p_weight = row_weights_ptr + (epoch % BANKS) * R + first_row
                weighted = tl.where(which == 0, rows, 0)
                sums = add_column_sums(
                    tl.zeros((BN,), tl.float32), dy_ptr, rows, n * BN, B, BN, BK, p_weight, weighted
                )  # fmt: skip
                store_bias_gradient(db_ptr, sums, n * BN, B, BN)
    else:
        poison_wgrad(dw_ptr, db_ptr, m * BM, n * BN, A, B, HAS_BIAS, BM, BN)


@triton.jit
def dense_problem(problems_ptr, problem, like_ptr, TMA: tl.constexpr):
    """-> kind, a, b, c, M, N and K of a row of the table of independent GEMMs; pointers as `like_ptr`."""
    p = problems_ptr + problem * DENSE_WORDS
    kind = tl.load(p)
    a_ptr = tl.load(p + 1).to(like_ptr.dtype)
    b_ptr = tl.load(p + 2).to(like_ptr.dtype)
    c_ptr = tl.load(p + 3).to(like_ptr.dtype)
    M = tl.load(p + 4).to(tl.int32)
    N = tl.load(p + 5).to(tl.int32)
    K = tl.load(p + 6).to(tl.int32)
    if TMA:
        # The launcher has seen to it (_fit_tma); not knowing it, a program stores c element by element.
        N = tl.multiple_of(N, 128 // like_ptr.dtype.element_ty.primitive_bitwidth)
        a_ptr = tl.multiple_of(a_ptr, 16)
        b_ptr = tl.multiple_of(b_ptr, 16)
        c_ptr = tl.multiple_of(c_ptr, 16)
    return kind, a_ptr, b_ptr, c_ptr, M, N, K


@triton.jit
def dense_tile(
    problems_ptr, problem, m, n, like_ptr, KINDS: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """DENSE: one tile of an independent GEMM of the table; operands typed like `like_ptr`, contiguous.

    KINDS is a bit mask of the kinds in the table. Example: KINDS = 4: only weight gradients (TN).
    """
    kind, a_ptr, b_ptr, c_ptr, M, N, K = dense_problem(problems_ptr, problem, like_ptr, TMA)
    if KINDS & 1:
        if kind == NN:
            forward_tile(a_ptr, b_ptr, b_ptr, c_ptr, c_ptr, M, m * BM, n * BN, K, N,
                         "none", False, False, UPCAST, TMA, BM, BN, BK)  # fmt: skip
    if KINDS & 2:
        if kind == NT:
            dgrad_tile(a_ptr, b_ptr, c_ptr, M, m * BM, n * BN, K, N, UPCAST, TMA, BM, BN, BK)
    if KINDS & 4:
        if kind == TN:
            acc = add_outer_products(
                tl.zeros((BM, BN), tl.float32), a_ptr, b_ptr, K, m * BM, n * BN, M, N,
                UPCAST, TMA, BM, BN, BK,
            )  # fmt: skip
            store_weight_gradient(c_ptr, acc, m * BM, n * BN, M, N, BM, BN)


@triton.jit(do_not_specialize=["kind", "a", "b", "c", "M", "N", "K", "first"])
def write_dense_row_kernel(row_ptr, kind, a, b, c, M, N, K, first):
    """Write one row of the table of independent GEMMs, from launch arguments.

    Grid: (1,). Work: eight words.
    Example: kind 2, a = 0x1000, .., M 8, N 4, K 16, first 3: c [8, 4] = a [16, 8]^T @ b [16, 4], whose tiles
    are numbered from 3 on.
    """
    tl.store(row_ptr, tl.cast(kind, tl.int64))
    tl.store(row_ptr + 1, tl.cast(a, tl.int64))
    tl.store(row_ptr + 2, tl.cast(b, tl.int64))
    tl.store(row_ptr + 3, tl.cast(c, tl.int64))
    tl.store(row_ptr + 4, tl.cast(M, tl.int64))
    tl.store(row_ptr + 5, tl.cast(N, tl.int64))
    tl.store(row_ptr + 6, tl.cast(K, tl.int64))
    tl.store(row_ptr + 7, tl.cast(first, tl.int64))
