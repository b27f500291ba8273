"""The persistent kernel in which puts, expert GEMMs, weight gradients and independent GEMMs share one launch.

    W  PEs, L experts on each    C  capacity    D  model width    F  hidden width    H  F, or 2F for swiglu
    T  tokens here               K  choices per token             B  banks

Every program claims the next task from one counter until the list is empty (`tasks.py` has the order and the
reason why it cannot deadlock); the bodies are in `overlap_tasks.py` and `gemm_tile.py`. Which of them a
launch needs is constexpr, so a launch that only puts carries no GEMM.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels import device
from lancet_kernels.kernels import overlap_tasks as bodies
from lancet_kernels.kernels.gemm_tile import dgrad_tile, forward_tile, wgrad_tile

PUT = tl.constexpr(0)
TILE_IN = tl.constexpr(1)
TILE_OUT = tl.constexpr(2)
WGRAD = tl.constexpr(3)
DENSE = tl.constexpr(4)
REDUCE = tl.constexpr(5)
DWEIGHT = tl.constexpr(6)
TASK_WORDS = tl.constexpr(6)

# A row of the table of independent GEMMs: kind, a, b, c, M, N, K. Kinds, by what is transposed:
DENSE_WORDS = tl.constexpr(8)
NN = tl.constexpr(0)  # c [M, N] = a [M, K] @ b [K, N]
NT = tl.constexpr(1)  # c [M, N] = a [M, K] @ b [N, K]^T
TN = tl.constexpr(2)  # c [M, N] = a [K, M]^T @ b [K, N]


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


# Not a variant for each size, and none in which a 1 is a constant.
@triton.jit(
    do_not_specialize=["num_tasks", "counter", "rank", "max_polls", "W", "L", "C", "chunks", "T", "K"]
)
def overlap_kernel(
    # What to do, and the use it belongs to.
    tasks_ptr, num_tasks, use_ptr, counter, earlier_use_ptr, report_ptr, rank, max_polls,
    W, L, C, D, F, H, chunks, T, K,
    # Dispatch: rows of source by slot, and how many go to each expert.
    source_ptr, token_ptr, scale_ptr, count_ptr,
    # Symmetric regions and their peers.
    rows_ptr, rows_peers_ptr, arrived_ptr, arrived_peers_ptr, released_ptr,
    results_ptr, results_peers_ptr, returned_ptr, returned_peers_ptr,
    # The two GEMMs of an expert, in the order of this direction.
    weight_in_ptr, bias_in_ptr, pre_ptr, hidden_ptr, weight_out_ptr, bias_out_ptr, stage_ptr,
    ready_ptr, done_ptr,
    # Weight gradients.
    saved_rows_ptr, saved_hidden_ptr, dweight_in_ptr, dbias_in_ptr, dweight_out_ptr, dbias_out_ptr,
    # Combine and the gradient of its weights, and independent GEMMs.
    out_ptr, expert_ptr, slot_ptr, weight_ptr, dy_ptr, saved_results_ptr, dweight_ptr, problems_ptr,
    HAS_PUT: tl.constexpr, HAS_IN: tl.constexpr, HAS_OUT: tl.constexpr, HAS_WGRAD: tl.constexpr,
    HAS_REDUCE: tl.constexpr, HAS_DWEIGHT: tl.constexpr, DENSE_KINDS: tl.constexpr,
    BACKWARD: tl.constexpr,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE_PRE: tl.constexpr, SCALED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BANKS: tl.constexpr, EARLIER_BANKS: tl.constexpr, NVSHMEM: tl.constexpr, UPCAST: tl.constexpr,
    TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PUT_ROWS: tl.constexpr, PUT_BLOCK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One launch of the tasks in `tasks_ptr` (int32 [num_tasks, 6]).

    Grid: (programs,), at most what is resident; one is enough.
    Floor: FLOPs of the GEMMs in the list (2 * rows * D * H and 2 * rows * F * D forward) over the peak, or
    the bytes put (rows * D * element size, each direction) over the link, whichever is longer.
    Example, backward, 2 PEs: PUT sends dy of 6 rows to expert 1; the peer's TILE_IN makes dh of them with
    W2^T, TILE_OUT dx with W1^T, stored here; WGRAD tiles of dW2, dW1 fill the way back; REDUCE adds dx up.
    """
    epoch = tl.load(use_ptr)
    bank = epoch % BANKS
    tiles_in = tl.cdiv(F, BN)
    # What an earlier launch of this use should have made is missing if one of its waits failed.
    sound = device.failed(report_ptr) == 0
    i = tl.atomic_add(use_ptr + counter, 1, sem="relaxed", scope="gpu")
    while i < num_tasks:
        p = tasks_ptr + i * TASK_WORDS
        kind = tl.load(p)
        a = tl.load(p + 1)
        local = tl.load(p + 2)
        m = tl.load(p + 3)
        n = tl.load(p + 4)
        if HAS_PUT:
            if kind == PUT:
                bodies.put_chunk(
                    a, local, epoch, rank, W, L, C, D, chunks, source_ptr, token_ptr, scale_ptr, count_ptr,
                    rows_ptr, rows_peers_ptr, arrived_ptr, arrived_peers_ptr, released_ptr, max_polls,
                    report_ptr, BANKS, SCALED, NVSHMEM, BM, PUT_ROWS, PUT_BLOCK,
                )  # fmt: skip
        if HAS_IN:
            if kind == TILE_IN:
                count = bodies.wait_rows(
                    a, local, m, epoch, rank, W, L, chunks, arrived_ptr, max_polls, report_ptr, TMA, BANKS, BM
                )  # fmt: skip
                if m * BM < count:
                    segment = (a * L + local).to(tl.int64) * C
                    x_ptr = rows_ptr + (bank * W * L * C + segment) * D
                    w_ptr = weight_in_ptr + local.to(tl.int64) * D * H
                    if BACKWARD:
                        w_ptr = weight_in_ptr + local.to(tl.int64) * D * F
                        dgrad_tile(x_ptr, w_ptr, pre_ptr + segment * H, hidden_ptr + segment * H, count,
                                   m * BM, n * BN, D, F, D, H, ACT, UPCAST, TMA, BM, BN, BK)  # fmt: skip
                    else:
                        forward_tile(x_ptr, w_ptr, bias_in_ptr + local * H, pre_ptr + segment * H,
                                     hidden_ptr + segment * F, count, m * BM, n * BN, D, F, D, F,
                                     ACT, HAS_BIAS, SAVE_PRE, UPCAST, TMA, BM, BN, BK)  # fmt: skip
                    bodies.finish_ready(ready_ptr, a * L + local, m, local, W * L, chunks)
        if HAS_OUT:
            if kind == TILE_OUT:
                count = bodies.wait_rows(
                    a, local, 0, epoch, rank, W, L, chunks, arrived_ptr, max_polls, report_ptr, False,
                    BANKS, BM,
                )  # fmt: skip
                hidden_is_here = sound & (m * BM < count)
                if HAS_IN:
                    if m * BM < count:
                        hidden_is_here = bodies.wait_ready(
                            a * L + local, m, tiles_in, rank, chunks, ready_ptr, max_polls, report_ptr, TMA
                        )
                if hidden_is_here:
                    segment = (a * L + local).to(tl.int64) * C
                    y_ptr = device.remote_pointer(results_ptr, results_peers_ptr, a)
                    y_ptr += (bank * W * L + rank * L + local) * C * D
                    if NVSHMEM:
                        if tl.load(results_peers_ptr + a) == 0:
                            y_ptr = stage_ptr + segment * D
                    if BACKWARD:
                        dgrad_tile(hidden_ptr + segment * H, weight_out_ptr + local.to(tl.int64) * D * H,
                                   pre_ptr, y_ptr, count, m * BM, n * BN, H, D, H, D,
                                   "none", UPCAST, TMA, BM, BN, BK)  # fmt: skip
                    else:
                        forward_tile(hidden_ptr + segment * F, weight_out_ptr + local.to(tl.int64) * F * D,
                                     bias_out_ptr + local * D, pre_ptr, y_ptr, count, m * BM, n * BN,
                                     F, D, F, D, "none", HAS_BIAS, False, UPCAST, TMA,
                                     BM, BN, BK)  # fmt: skip
                    bodies.return_tile(
                        a, local, m, n, count, epoch, rank, W, L, C, D, chunks, tl.cdiv(D, BN),
                        stage_ptr, results_ptr, results_peers_ptr, returned_ptr, returned_peers_ptr, done_ptr,
                        BANKS, NVSHMEM, BM, BN,
                    )  # fmt: skip
        if HAS_WGRAD:
            if kind == WGRAD:
                hidden_is_here = sound
                if HAS_IN:
                    hidden_is_here = bodies.wait_expert(
                        local, epoch, rank, W, L, chunks, tiles_in, arrived_ptr, ready_ptr, max_polls,
                        report_ptr, TMA, BANKS, BM,
                    )  # fmt: skip
                # 0 is dW2 = hidden^T dy; 1 is dW1 = x^T dh, whose x lies in the bank of the forward pass.
                earlier_bank = tl.load(earlier_use_ptr) % EARLIER_BANKS
                x_ptr, dy_ptr, A, B = saved_hidden_ptr, rows_ptr + bank * W * L * C * D, F, D
                dw_ptr, db_ptr = dweight_in_ptr, dbias_in_ptr
                if a == 1:
                    x_ptr, dy_ptr, A, B = saved_rows_ptr + earlier_bank * W * L * C * D, hidden_ptr, D, H
                    dw_ptr, db_ptr = dweight_out_ptr, dbias_out_ptr
                dw_ptr += local.to(tl.int64) * A * B
                db_ptr += local * B
                if hidden_is_here:
                    wgrad_tile(
                        x_ptr, dy_ptr, dw_ptr, db_ptr, local, W, L, C,
                        arrived_ptr + bank * W * L * chunks, chunks, m * BM, n * BN, A, B, A, B,
                        HAS_BIAS, UPCAST, TMA, BM, BN, BK,
                    )  # fmt: skip
                else:
                    bodies.poison_wgrad(dw_ptr, db_ptr, m * BM, n * BN, A, B, HAS_BIAS, BM, BN)
        if DENSE_KINDS != 0:
            if kind == DENSE:
                dense_tile(problems_ptr, a, local, m, rows_ptr, DENSE_KINDS, UPCAST, TMA, BM, BN, BK)
        if HAS_DWEIGHT:
            if kind == DWEIGHT:
                earlier = tl.load(earlier_use_ptr) % EARLIER_BANKS
                bodies.dweight_block(
                    a, W, L, C, D, T, K, dy_ptr, saved_results_ptr + earlier * W * L * C * D, expert_ptr,
                    slot_ptr, dweight_ptr, BT, BD,
                )  # fmt: skip
        if HAS_REDUCE:
            if kind == REDUCE:
                bodies.reduce_block(
                    a, epoch, rank, W, L, C, D, chunks, T, K, results_ptr, returned_ptr, expert_ptr, slot_ptr,
                    weight_ptr, out_ptr, max_polls, report_ptr, WEIGHTED, BANKS, BM, BT, BD,
                )  # fmt: skip
        i = tl.atomic_add(use_ptr + counter, 1, sem="relaxed", scope="gpu")
