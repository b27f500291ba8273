"""The persistent kernel in which puts, expert GEMMs, weight gradients and independent GEMMs share one launch.

    W  PEs, L experts on each    C  capacity    D  model width    F  hidden width    H  F, or 2F for swiglu
    T  tokens here               K  choices per token             B  banks

Every program claims the next task from one counter until the list is empty (`tasks.py` has the order and the
reason why it cannot deadlock); the bodies are in `overlap_tiles.py`, those of the GEMMs, and in
`overlap_tasks.py`. Which of them a launch needs is constexpr, so a launch that only puts carries no GEMM.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels import device
from lancet_kernels.kernels.overlap_tasks import dweight_block, put_chunk, reduce_block
from lancet_kernels.kernels.overlap_tiles import dense_tile, tile_in, tile_out, tile_wgrad

PUT = tl.constexpr(0)
TILE_IN = tl.constexpr(1)
TILE_OUT = tl.constexpr(2)
WGRAD = tl.constexpr(3)
DENSE = tl.constexpr(4)
REDUCE = tl.constexpr(5)
DWEIGHT = tl.constexpr(6)
TASK_WORDS = tl.constexpr(6)


# Not a variant for each size, and none in which a 1 is a constant.
@triton.jit(
    do_not_specialize=["num_tasks", "counter", "rank", "max_polls", "W", "L", "C", "chunks", "T", "K"]
)
def overlap_kernel(
    # What to do, and the use it belongs to.
    tasks_ptr, num_tasks, use_ptr, counter, earlier_use_ptr, report_ptr, rank, max_polls,
    W, L, C, D, F, H, chunks, T, K,
    # Dispatch: rows of source by slot, and how many go to each expert.
    source_ptr, token_ptr, scale_ptr, count_ptr, put_stage_ptr,
    # Symmetric regions and their peers.
    rows_ptr, rows_peers_ptr, arrived_ptr, arrived_peers_ptr, released_ptr,
    results_ptr, results_peers_ptr, returned_ptr, returned_peers_ptr,
    # The two GEMMs of an expert, in the order of this direction.
    weight_in_ptr, bias_in_ptr, pre_ptr, hidden_ptr, weight_out_ptr, bias_out_ptr, stage_ptr,
    ready_ptr, done_ptr,
    # Weight gradients.
    saved_rows_ptr, saved_hidden_ptr, dweight_in_ptr, dbias_in_ptr, dweight_out_ptr, dbias_out_ptr,
    # Combine and the gradient of its weights, and independent GEMMs.
    out_ptr, expert_ptr, slot_ptr, weight_ptr, saved_results_ptr, dweight_ptr, problems_ptr,
    # An emulated wire that paces what is put, or None.
    wire_ptr,
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
                put_chunk(
                    a, local, epoch, rank, W, L, C, D, chunks, source_ptr, token_ptr, scale_ptr, count_ptr,
                    put_stage_ptr, rows_ptr, rows_peers_ptr, arrived_ptr, arrived_peers_ptr, released_ptr,
                    max_polls, report_ptr, BANKS, SCALED, NVSHMEM, BM, PUT_ROWS, PUT_BLOCK, wire_ptr,
                )  # fmt: skip
        if HAS_IN:
            if kind == TILE_IN:
                tile_in(
                    a, local, m, n, epoch, rank, W, L, C, D, F, H, chunks, rows_ptr, arrived_ptr,
                    weight_in_ptr, bias_in_ptr, pre_ptr, hidden_ptr, ready_ptr, max_polls, report_ptr,
                    BACKWARD, ACT, HAS_BIAS, SAVE_PRE, BANKS, NVSHMEM, UPCAST, TMA, BM, BN, BK, wire_ptr,
                )  # fmt: skip
        if HAS_OUT:
            if kind == TILE_OUT:
                tile_out(
                    a, local, m, n, epoch, rank, sound, W, L, C, D, F, H, chunks, arrived_ptr, ready_ptr,
                    weight_out_ptr, bias_out_ptr, hidden_ptr, stage_ptr, results_ptr, results_peers_ptr,
                    returned_ptr, returned_peers_ptr, done_ptr, max_polls, report_ptr,
                    HAS_IN, BACKWARD, HAS_BIAS, BANKS, NVSHMEM, UPCAST, TMA, BM, BN, BK, wire_ptr,
                )  # fmt: skip
        if HAS_WGRAD:
            if kind == WGRAD:
                tile_wgrad(
                    a, local, m, n, epoch, earlier_use_ptr, rank, sound, W, L, C, D, F, H, chunks,
                    rows_ptr, arrived_ptr, hidden_ptr, ready_ptr, saved_rows_ptr, saved_hidden_ptr,
                    dweight_in_ptr, dbias_in_ptr, dweight_out_ptr, dbias_out_ptr, max_polls, report_ptr,
                    HAS_IN, HAS_BIAS, BANKS, EARLIER_BANKS, UPCAST, TMA, BM, BN, BK,
                )  # fmt: skip
        if DENSE_KINDS != 0:
            if kind == DENSE:
                dense_tile(problems_ptr, a, local, m, rows_ptr, DENSE_KINDS, UPCAST, TMA, BM, BN, BK)
        if HAS_DWEIGHT:
            if kind == DWEIGHT:
                earlier = tl.load(earlier_use_ptr) % EARLIER_BANKS
                dweight_block(
                    a, C, D, T, K, source_ptr, saved_results_ptr + earlier * W * L * C * D, expert_ptr,
                    slot_ptr, dweight_ptr, BT, BD,
                )  # fmt: skip
        if HAS_REDUCE:
            if kind == REDUCE:
                reduce_block(
                    a, epoch, rank, W, L, C, D, chunks, T, K, results_ptr, returned_ptr, expert_ptr, slot_ptr,
                    weight_ptr, out_ptr, max_polls, report_ptr, WEIGHTED, NVSHMEM, BANKS, BM, BT, BD,
                    wire_ptr,
                )  # fmt: skip
        i = tl.atomic_add(use_ptr + counter, 1, sem="relaxed", scope="gpu")
    if HAS_PUT:
        # The network may still read the stage, which is the next launch's, too.
        device.quiet(NVSHMEM)
