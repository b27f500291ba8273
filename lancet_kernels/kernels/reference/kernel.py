"""The persistent kernel in which puts, expert GEMMs, weight gradients and independent GEMMs share one launch.

    W  PEs, L experts on each    D  model width    F  hidden width    H  F, or 2F for swiglu    B  banks
    T  tokens here               K  choices per token    R  most rows received

Every program claims the next task number from one counter until there is none (`tasks.py` and `schedule.py`
have the order and the reason why it cannot deadlock); the bodies are in `reference/tiles.py`, those of the
GEMMs, and in `protocol/steps.py`. Which of them a launch needs is constexpr, so a launch that only puts
carries no GEMM.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels.protocol import device
from lancet_kernels.kernels.protocol.schedule import NUM_PUTS, NUM_TILES, VOID, tile_ptr
from lancet_kernels.kernels.protocol.steps import put_chunk, reduce_block
from lancet_kernels.kernels.protocol.tasks import (
    DENSE,
    PUT,
    REDUCE,
    TILE_IN,
    TILE_OUT,
    WGRAD,
    dense_task,
    find_other,
    num_wgrads,
    puts_before,
    tile_task,
    wgrad_task,
)
from lancet_kernels.kernels.reference.tiles import dense_tile, tile_in, tile_out, tile_wgrad


@triton.jit
def find_task(
    i, num_puts, num_tiles, num_wgrad, dense_tiles, num_problems, tiles_in, tiles_out, lag,
    programs, comm_programs, problems_ptr, tile_puts_ptr, put_expert_ptr, chunks, L, D, F, H,
    HAS_PUT: tl.constexpr, HAS_TILES: tl.constexpr, HAS_WGRAD: tl.constexpr, HAS_DENSE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """-> kind, and up to four numbers, of task i; `tasks.py` says what they mean.

    Example: that of `schedule`, PE 1, one program: task 3 is PUT 3 1, its fourth put: expert 3, tile 1.
    """
    independent = dense_tiles
    j = i
    kind = DENSE + i * 0
    a, b, c, d = i * 0, i * 0, i * 0, i * 0
    if HAS_PUT:
        j = i - num_puts
        # Behind all puts no search is needed.
        behind = j >= 0
        if behind:
            behind = num_puts == puts_before(
                j, num_puts, independent, num_tiles, tiles_in, tiles_out, lag, programs, comm_programs,
                tile_puts_ptr,
            )  # fmt: skip
        if behind == 0:
            j = find_other(
                i, num_puts, independent, num_tiles, tiles_in, tiles_out, lag, programs, comm_programs,
                tile_puts_ptr, i,
            )  # fmt: skip
            number = i * 0 - 1
            if j >= 0:
                number = j + puts_before(
                    j, num_puts, independent, num_tiles, tiles_in, tiles_out, lag, programs, comm_programs,
                    tile_puts_ptr,
                )  # fmt: skip
            if number != i:
                kind = PUT + i * 0
                a = tl.load(put_expert_ptr + i - j - 1)
                b = tl.load(put_expert_ptr + chunks + i - j - 1)
    if kind != PUT:
        a = j
        y = j - independent
        if y >= 0:
            gemms = num_tiles * (tiles_in + tiles_out)
            kind = REDUCE + i * 0
            a = y - gemms - num_wgrad
            if HAS_TILES:
                if y < gemms:
                    kind, a, b = tile_task(y, num_tiles, tiles_in, tiles_out, lag)
            if HAS_WGRAD:
                if (y >= gemms) & (y < gemms + num_wgrad):
                    kind = WGRAD + i * 0
                    a, b, c, d = wgrad_task(y - gemms, L, D, F, H, BM, BN)
        elif HAS_DENSE:
            a, b, c = dense_task(j, problems_ptr, num_problems, BN)
    return kind, a, b, c, d


# Not a variant for each size, and none in which a 1 is a constant.
@triton.jit(
    do_not_specialize=[
        "limit", "counter", "rank", "max_polls", "W", "L", "R", "tiles", "chunks", "T", "K",
        "tiles_in", "tiles_out", "lag", "dense_tiles", "num_problems", "reduce_blocks",
        "programs", "comm_programs",
    ]
)  # fmt: skip
def overlap_kernel(
    # The use it belongs to, and what to do.
    use_ptr, counter, earlier_use_ptr, table_ptr, report_ptr, rank, max_polls, limit,
    W, L, D, F, H, R, tiles, chunks, T, K,
    tiles_in, tiles_out, lag, dense_tiles, num_problems, reduce_blocks,
    programs, comm_programs,
    # Dispatch: rows of source by send row, in a backward their weights.
    source_ptr, token_ptr, send_weights_ptr, put_stage_ptr,
    # Symmetric regions and their peers.
    rows_ptr, rows_peers_ptr, row_weights_ptr, row_weights_peers_ptr,
    arrived_ptr, arrived_peers_ptr, released_ptr,
    results_ptr, results_peers_ptr, dots_ptr, dots_peers_ptr, returned_ptr, returned_peers_ptr, spoiled_ptr,
    # The two GEMMs of an expert, in the order of this direction.
    weight_in_ptr, bias_in_ptr, pre_ptr, hidden_ptr, weight_out_ptr, bias_out_ptr, stage_ptr,
    row_dots_ptr, dots_stage_ptr, ready_ptr, done_ptr,
    # Weight gradients.
    saved_rows_ptr, activated_ptr, dweight_in_ptr, dbias_in_ptr, dweight_out_ptr, dbias_out_ptr,
    # Combine and the gradient of its weights, and independent GEMMs.
    out_ptr, expert_ptr, row_ptr, weight_ptr, dweight_ptr, problems_ptr,
    HAS_PUT: tl.constexpr, HAS_IN: tl.constexpr, HAS_OUT: tl.constexpr, HAS_WGRAD: tl.constexpr,
    HAS_REDUCE: tl.constexpr, DENSE_KINDS: tl.constexpr, BACKWARD: tl.constexpr,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE_PRE: tl.constexpr,
    BANKS: tl.constexpr, EARLIER_BANKS: tl.constexpr, NVSHMEM: tl.constexpr, UPCAST: tl.constexpr,
    TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BN_IN: tl.constexpr, BK: tl.constexpr,
    BW: tl.constexpr, PUT_ROWS: tl.constexpr, PUT_BLOCK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One launch. Its tasks follow from the table (`schedule.py`) and the numbers of `tasks.LaunchShape`.

    Tiles are [BM, BN], those of the first GEMM [BM, BN_IN]: swiglu's has two accumulators.

    Grid: (programs,), at most what is resident; one is enough. limit: no more than so many tasks.
    Floor: FLOPs of the GEMMs (2 * rows * D * H and 2 * rows * F * D forward) over the peak, or the bytes put
    (rows * D * element size, each direction) over the link, whichever is longer.
    Example, backward, 2 PEs: PUT sends dy of 6 rows to expert 1; the peer's TILE_IN makes dh of them with
    W2^T, TILE_OUT dx with W1^T, stored here; WGRAD tiles of dW2, dW1 fill the way back; REDUCE adds dx up.
    """
    epoch = tl.load(use_ptr)
    # What an earlier launch of this use should have made is missing if one of its waits failed.
    sound = ((device.failed(report_ptr) == 0) & (tl.load(table_ptr + VOID) == 0)).to(tl.int32)
    tile_puts_ptr = tile_ptr(table_ptr, W, W * L) + tiles
    num_tiles = tl.load(table_ptr + NUM_TILES)
    num_puts = 0
    if HAS_PUT:
        num_puts = tl.load(table_ptr + NUM_PUTS)
    num_wgrad = 0
    if HAS_WGRAD:
        num_wgrad = num_wgrads(L, D, F, H, BM, BN)
    num_gemms = dense_tiles + num_tiles * (tiles_in + tiles_out) + num_wgrad
    num_tasks = tl.minimum(num_puts + num_gemms + reduce_blocks, limit)
    i = tl.atomic_add(use_ptr + counter, 1, sem="relaxed", scope="gpu").to(tl.int32)
    while i < num_tasks:
        kind, a, b, c, d = find_task(
            i, num_puts, num_tiles, num_wgrad, dense_tiles, num_problems, tiles_in, tiles_out,
            lag, programs, comm_programs, problems_ptr, tile_puts_ptr, tile_puts_ptr + tiles, chunks,
            L, D, F, H, HAS_PUT, HAS_IN or HAS_OUT, HAS_WGRAD, DENSE_KINDS != 0, BM, BN,
        )  # fmt: skip
        if HAS_PUT:
            if kind == PUT:
                put_chunk(
                    a, b, epoch, rank, W, L, D, R, tiles, table_ptr, source_ptr, token_ptr, send_weights_ptr,
                    put_stage_ptr, rows_ptr, rows_peers_ptr, row_weights_ptr, row_weights_peers_ptr,
                    arrived_ptr, arrived_peers_ptr, released_ptr, max_polls, report_ptr,
                    BANKS, BACKWARD, NVSHMEM, BM, PUT_ROWS, PUT_BLOCK,
                )  # fmt: skip
        if HAS_IN:
            if kind == TILE_IN:
                tile_in(
                    a, b, epoch, rank, W, L, D, F, H, R, tiles, table_ptr, rows_ptr, arrived_ptr,
                    weight_in_ptr, bias_in_ptr, pre_ptr, hidden_ptr, activated_ptr, row_weights_ptr,
                    row_dots_ptr, ready_ptr, max_polls, report_ptr,
                    BACKWARD, ACT, HAS_BIAS, SAVE_PRE, BANKS, NVSHMEM, UPCAST, TMA, BM, BN_IN, BK, BW,
                )  # fmt: skip
        if HAS_OUT:
            if kind == TILE_OUT:
                tile_out(
                    a, b, epoch, rank, sound, W, L, D, F, H, R, tiles, chunks, table_ptr, ready_ptr,
                    weight_out_ptr, bias_out_ptr, hidden_ptr, stage_ptr, results_ptr, results_peers_ptr,
                    row_dots_ptr, dots_stage_ptr, dots_ptr, dots_peers_ptr, returned_ptr,
                    returned_peers_ptr, done_ptr, max_polls, report_ptr,
                    HAS_IN, BACKWARD, HAS_BIAS, BANKS, NVSHMEM, UPCAST, TMA, BM, BN, BN_IN, BK,
                )  # fmt: skip
        if HAS_WGRAD:
            if kind == WGRAD:
                tile_wgrad(
                    a, b, c, d, epoch, earlier_use_ptr, rank, sound, W, L, D, F, H, R, tiles, table_ptr,
                    rows_ptr, row_weights_ptr, hidden_ptr, ready_ptr, saved_rows_ptr, activated_ptr,
                    dweight_in_ptr, dbias_in_ptr, dweight_out_ptr, dbias_out_ptr, max_polls, report_ptr,
                    HAS_IN, HAS_BIAS, BANKS, EARLIER_BANKS, UPCAST, TMA, BM, BN, BN_IN, BK,
                )  # fmt: skip
        if DENSE_KINDS != 0:
            if kind == DENSE:
                dense_tile(problems_ptr, a, b, c, rows_ptr, DENSE_KINDS, UPCAST, TMA, BM, BN, BK)
        if HAS_REDUCE:
            if kind == REDUCE:
                reduce_block(
                    a, epoch, rank, sound, W, L, D, T, K, chunks, table_ptr, results_ptr, dots_ptr,
                    spoiled_ptr, returned_ptr, expert_ptr, row_ptr, weight_ptr, out_ptr, dweight_ptr,
                    max_polls, report_ptr, BACKWARD, NVSHMEM, BANKS, BM, BT, BD,
                )  # fmt: skip
        i = tl.atomic_add(use_ptr + counter, 1, sem="relaxed", scope="gpu").to(tl.int32)
    if HAS_PUT:
        # The network may still read the stage, which is the next launch's, too.
        device.quiet(NVSHMEM)
