"""The GEMM tasks of the overlap kernel: what each waits for, which matrices it multiplies, whom it tells.

    W  PEs, L experts on each    C  capacity, in chunks of BM rows    D  model width    F  hidden width
    H  F, or 2F for swiglu       B  banks                             BM, BN  the tile of the output

Rows that source s sent to expert l are segment s * L + l of every buffer [W, L, C, ..]. Of the two GEMMs of
an expert TILE_IN is the first in the direction of the launch, TILE_OUT the second:

               TILE_IN                          TILE_OUT              WGRAD
    forward    hidden = act(x @ w1 + b1)        y = hidden @ w2 + b2
    backward   dh = (dy @ w2^T) * act'(pre)     dx = dh @ w1^T        dw2 = hidden^T dy, dw1 = x^T dh

The tiles themselves are those of `gemm_tile.py`; what is put and waited for is in `overlap_tasks.py`.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels import device
from lancet_kernels.kernels.gemm_tile import dgrad_tile, forward_tile, wgrad_tile
from lancet_kernels.kernels.overlap_tasks import (
    finish_ready,
    poison_wgrad,
    return_tile,
    wait_expert,
    wait_ready,
    wait_rows,
)

# A row of the table of independent GEMMs: kind, a, b, c, M, N, K. Kinds, by what is transposed:
DENSE_WORDS = tl.constexpr(8)
NN = tl.constexpr(0)  # c [M, N] = a [M, K] @ b [K, N]
NT = tl.constexpr(1)  # c [M, N] = a [M, K] @ b [N, K]^T
TN = tl.constexpr(2)  # c [M, N] = a [K, M]^T @ b [K, N]


@triton.jit
def tile_in(
    source, local, m, n, epoch, rank, W, L, C, D, F, H, chunks,
    rows_ptr, arrived_ptr, weight_ptr, bias_ptr, pre_ptr, hidden_ptr, ready_ptr, max_polls, report_ptr,
    BACKWARD: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE_PRE: tl.constexpr,
    BANKS: tl.constexpr, NVSHMEM: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, wire_ptr=None,
):  # fmt: skip
    """TILE_IN: wait for a chunk of the source's rows, multiply it, count the tile as ready.

    rows [B, W, L, C, D]; pre [W, L, C, H]. Forward: weight [L, D, H], bias [L, H], hidden [W, L, C, F];
    backward: weight [L, F, D], hidden [W, L, C, H], which is dh. Without rows in the chunk, or if they did
    not come in time, nothing happens.
    Example: W = L = 2, C = 8, BM = BN = 4 (2 chunks), source 1 sent 6 rows to local expert 0. Of them m = 1
    is rows 4 and 5 of segment 2; n = 3 makes hidden[1, 0, 4:6, 12:16], then adds 1 to the ready words of
    chunk 2 * 2 + 1 = 5 and of expert 0.
    """
    count = wait_rows(
        source, local, m, epoch, rank, W, L, chunks, arrived_ptr, max_polls, report_ptr, NVSHMEM, TMA,
        BANKS, BM, wire_ptr,
    )  # fmt: skip
    if m * BM < count:
        segment = (source * L + local).to(tl.int64) * C
        x_ptr = rows_ptr + ((epoch % BANKS) * W * L * C + segment) * D
        pre_ptr += segment * H
        if BACKWARD:
            dgrad_tile(x_ptr, weight_ptr + local.to(tl.int64) * D * F, pre_ptr, hidden_ptr + segment * H,
                       count, m * BM, n * BN, D, F, D, H, ACT, UPCAST, TMA, BM, BN, BK)  # fmt: skip
        else:
            forward_tile(x_ptr, weight_ptr + local.to(tl.int64) * D * H, bias_ptr + local * H, pre_ptr,
                         hidden_ptr + segment * F, count, m * BM, n * BN, D, F, D, F,
                         ACT, HAS_BIAS, SAVE_PRE, UPCAST, TMA, BM, BN, BK)  # fmt: skip
        finish_ready(ready_ptr, source * L + local, m, local, W * L, chunks)


@triton.jit
def tile_out(
    source, local, m, n, epoch, rank, sound, W, L, C, D, F, H, chunks,
    arrived_ptr, ready_ptr, weight_ptr, bias_ptr, hidden_ptr, stage_ptr, results_ptr, results_peers_ptr,
    returned_ptr, returned_peers_ptr, done_ptr, max_polls, report_ptr,
    HAS_IN: tl.constexpr, BACKWARD: tl.constexpr, HAS_BIAS: tl.constexpr,
    BANKS: tl.constexpr, NVSHMEM: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, wire_ptr=None,
):  # fmt: skip
    """TILE_OUT: multiply a chunk of the first GEMM's result, store it at the source, the last tile signals.

    Forward: hidden [W, L, C, F], weight [L, F, D], bias [L, D]; backward: hidden (dh) [W, L, C, H], weight
    [L, D, H]. results [B, W * L, C, D] of the source are by expert; stage [W, L, C, D] is ours, for a source
    that no pointer reaches. HAS_IN: this launch makes hidden, so wait for it; else an earlier launch of this
    use has, if it was `sound`. What is missing is not made up: nothing is stored and nobody told.
    Example: rank 1 of W = 2, L = 2, C = 8, BM = BN = 4, source 0 sent 6 rows to local expert 1, epoch 5 of
    2 banks: m = 1, n = 0 goes to bank 1, expert 3 of PE 0: results[1, 3, 4:6, 0:4].
    """
    count = wait_rows(
        source, local, 0, epoch, rank, W, L, chunks, arrived_ptr, max_polls, report_ptr, False, False,
        BANKS, BM,
    )  # fmt: skip
    hidden_is_here = sound & (m * BM < count)
    if HAS_IN:
        if m * BM < count:
            hidden_is_here = wait_ready(
                source * L + local, m, tl.cdiv(F, BN), rank, chunks, ready_ptr, max_polls, report_ptr, TMA
            )
    if hidden_is_here:
        segment = (source * L + local).to(tl.int64) * C
        y_ptr = device.remote_pointer(results_ptr, results_peers_ptr, source)
        y_ptr += ((epoch % BANKS) * W * L + rank * L + local) * C * D
        if NVSHMEM:
            if tl.load(results_peers_ptr + source) == 0:
                y_ptr = stage_ptr + segment * D
        if BACKWARD:
            dgrad_tile(hidden_ptr + segment * H, weight_ptr + local.to(tl.int64) * D * H, y_ptr, y_ptr,
                       count, m * BM, n * BN, H, D, H, D,
                       "none", UPCAST, TMA, BM, BN, BK)  # fmt: skip
        else:
            forward_tile(hidden_ptr + segment * F, weight_ptr + local.to(tl.int64) * F * D,
                         bias_ptr + local * D, y_ptr, y_ptr, count, m * BM, n * BN, F, D, F, D,
                         "none", HAS_BIAS, False, UPCAST, TMA, BM, BN, BK)  # fmt: skip
        return_tile(
            source, local, m, n, count, epoch, rank, W, L, C, D, chunks, tl.cdiv(D, BN),
            stage_ptr, results_ptr, results_peers_ptr, returned_ptr, returned_peers_ptr, done_ptr,
            BANKS, NVSHMEM, BM, BN, wire_ptr,
        )  # fmt: skip


@triton.jit
def tile_wgrad(
    which, local, m, n, epoch, earlier_use_ptr, rank, sound, W, L, C, D, F, H, chunks,
    rows_ptr, arrived_ptr, hidden_ptr, ready_ptr, saved_rows_ptr, saved_hidden_ptr,
    dweight_in_ptr, dbias_in_ptr, dweight_out_ptr, dbias_out_ptr, max_polls, report_ptr,
    HAS_IN: tl.constexpr, HAS_BIAS: tl.constexpr, BANKS: tl.constexpr, EARLIER_BANKS: tl.constexpr,
    UPCAST: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """WGRAD: one tile of dw2 [F, D] (which = 0) or dw1 [D, H] (1) of an expert, over the rows of all sources.

    rows [B, W, L, C, D] is dy, hidden [W, L, C, H] dh; saved_rows, x, and saved_hidden are the forward's, and
    x lies in the bank of that use (the epoch at earlier_use). HAS_IN, sound: as of `tile_out`; what rests on
    rows that did not come is NaN. The tiles with m = 0 write the bias gradients.
    Example: which = 1, local = 2, m = 0, n = 1, BM = BN = 4: dweight_out[2, 0:4, 4:8] and dbias_out[2, 4:8].
    """
    hidden_is_here = sound
    if HAS_IN:
        hidden_is_here = wait_expert(
            local, epoch, rank, W, L, chunks, tl.cdiv(F, BN), arrived_ptr, ready_ptr, max_polls, report_ptr,
            TMA, BANKS, BM,
        )  # fmt: skip
    bank = epoch % BANKS
    earlier_bank = tl.load(earlier_use_ptr) % EARLIER_BANKS
    x_ptr, dy_ptr, A, B = saved_hidden_ptr, rows_ptr + bank * W * L * C * D, F, D
    dw_ptr, db_ptr = dweight_in_ptr, dbias_in_ptr
    if which == 1:
        x_ptr, dy_ptr, A, B = saved_rows_ptr + earlier_bank * W * L * C * D, hidden_ptr, D, H
        dw_ptr, db_ptr = dweight_out_ptr, dbias_out_ptr
    dw_ptr += local.to(tl.int64) * A * B
    db_ptr += local * B
    if hidden_is_here:
        wgrad_tile(
            x_ptr, dy_ptr, dw_ptr, db_ptr, local, W, L, C, arrived_ptr + bank * W * L * chunks, chunks,
            m * BM, n * BN, A, B, A, B, HAS_BIAS, UPCAST, TMA, BM, BN, BK,
        )  # fmt: skip
    else:
        poison_wgrad(dw_ptr, db_ptr, m * BM, n * BN, A, B, HAS_BIAS, BM, BN)


@triton.jit
def dense_tile(
    problems_ptr, problem, m, n, like_ptr, KINDS: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """DENSE: one tile of an independent GEMM of the table; operands typed like `like_ptr`, contiguous.

    KINDS is a bit mask of the kinds in the table. Example: KINDS = 4: only weight gradients (TN).
    """
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
    if KINDS & 1:
        if kind == NN:
            forward_tile(a_ptr, b_ptr, b_ptr, c_ptr, c_ptr, M, m * BM, n * BN, K, N, K, N,
                         "none", False, False, UPCAST, TMA, BM, BN, BK)  # fmt: skip
    if KINDS & 2:
        if kind == NT:
            dgrad_tile(a_ptr, b_ptr, c_ptr, c_ptr, M, m * BM, n * BN, K, N, K, N,
                       "none", UPCAST, TMA, BM, BN, BK)  # fmt: skip
    if KINDS & 4:
        if kind == TN:
            wgrad_tile(a_ptr, b_ptr, c_ptr, c_ptr, 0, 1, 1, K, p + 6, 1, m * BM, n * BN, M, N, M, N,
                       False, UPCAST, TMA, BM, BN, BK)  # fmt: skip


@triton.jit(do_not_specialize=["kind", "a", "b", "c", "M", "N", "K"])
def write_dense_row_kernel(row_ptr, kind, a, b, c, M, N, K):
    """Write one row of the table of independent GEMMs, from launch arguments.

    Grid: (1,). Work: seven words.
    Example: kind 2, a = 0x1000, .., M 8, N 4, K 16: c [8, 4] = a [16, 8]^T @ b [16, 4].
    """
    tl.store(row_ptr, tl.cast(kind, tl.int64))
    tl.store(row_ptr + 1, tl.cast(a, tl.int64))
    tl.store(row_ptr + 2, tl.cast(b, tl.int64))
    tl.store(row_ptr + 3, tl.cast(c, tl.int64))
    tl.store(row_ptr + 4, tl.cast(M, tl.int64))
    tl.store(row_ptr + 5, tl.cast(N, tl.int64))
    tl.store(row_ptr + 6, tl.cast(K, tl.int64))
