"""The copy warps of the Hopper kernel: puts, copies of rows that were sent once, and reductions.

Loads and stores are 16 bytes a thread. Every program has copy warps, so all put at first; how much of a put
each has in flight is PUT_ROWS * PUT_BLOCK.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lancet_kernels.kernels.overlap_tasks import fan_tile, put_chunk, reduce_block
from lancet_kernels.kernels.schedule import tile_ptr


@gluon.jit
def copy(
    use_ptr, counter, table_ptr, report_ptr, rank, max_polls, num_tasks, num_puts,
    epoch, sound, W, L, D, R, tiles, chunks, T, K,
    source_ptr, token_ptr, send_weights_ptr, rows_ptr, rows_peers_ptr, row_weights_ptr,
    row_weights_peers_ptr, arrived_ptr, arrived_peers_ptr, released_ptr, results_ptr, dots_ptr,
    spoiled_ptr, returned_ptr, out_ptr, expert_ptr, row_ptr, weight_ptr, dweight_ptr,
    origin_ptr, origin_peers_ptr, fanned_ptr,
    HAS_PUT: gl.constexpr, HAS_REDUCE: gl.constexpr, BACKWARD: gl.constexpr, BANKS: gl.constexpr,
    BM: gl.constexpr, BW: gl.constexpr, PUT_ROWS: gl.constexpr, PUT_BLOCK: gl.constexpr, BT: gl.constexpr,
    BD: gl.constexpr, DEDUP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The partition of the copy warps: all puts, with FANs among them, then reductions.

    num_tasks: of these kinds, numbered in that order.
    """
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    i = gl.atomic_add(use_ptr + counter, 1, sem="relaxed", scope="gpu").to(gl.int32)
    # A loop for each kind: what one computes ahead of its loop takes no registers of the others.
    if HAS_PUT:
        while i < gl.minimum(num_puts, num_tasks):
            none = i >> 31
            put_expert_ptr = tile_ptr(table_ptr, W, W * L) + 2 * tiles + i
            expert = gl.load(put_expert_ptr)
            tile = gl.load(put_expert_ptr + (chunks + tiles if DEDUP > 0 else chunks))
            if DEDUP == 0 or expert >= 0:
                i_choice = None
                if DEDUP > 0:
                    i_choice = gl.arange(0, DEDUP, gl.SliceLayout(0, wide))
                put_chunk(
                    expert, tile, epoch, rank + none, W + none,
                    L + none, gl.multiple_of(D + none, 16), R + none, tiles + none, table_ptr, source_ptr,
                    token_ptr, send_weights_ptr, rows_ptr, rows_ptr, rows_peers_ptr, row_weights_ptr,
                    row_weights_peers_ptr, arrived_ptr, arrived_peers_ptr, released_ptr, max_polls,
                    report_ptr, K + none, expert_ptr, row_ptr, origin_ptr, origin_peers_ptr, origin_ptr,
                    BANKS, BACKWARD, False, BM, PUT_ROWS, PUT_BLOCK, DEDUP,
                    gl.arange(0, PUT_ROWS, gl.SliceLayout(1, wide)),
                    gl.arange(0, PUT_BLOCK, gl.SliceLayout(0, wide)),
                    gl.arange(0, BM, gl.BlockedLayout([1], [32], [WARPS], [0])), i_choice,
                )  # fmt: skip
            if DEDUP > 0:
                if expert < 0:
                    fan_tile(
                        tile, epoch + none, rank + none, W + none, L + none, gl.multiple_of(D + none, 16),
                        R + none, tiles + none, table_ptr, rows_ptr, arrived_ptr, origin_ptr, fanned_ptr,
                        max_polls, report_ptr, False, BANKS, BM, BW, PUT_ROWS, PUT_BLOCK,
                        gl.arange(0, PUT_ROWS, gl.SliceLayout(1, wide)),
                        gl.arange(0, PUT_BLOCK, gl.SliceLayout(0, wide)),
                        gl.arange(0, BW, gl.BlockedLayout([1], [32], [WARPS], [0])),
                    )  # fmt: skip
            i = gl.atomic_add(use_ptr + counter, 1, sem="relaxed", scope="gpu").to(gl.int32)
    if HAS_REDUCE:
        while i < num_tasks:
            none = i >> 31
            reduce_block(
                i - num_puts, epoch + none, rank + none, sound, W + none, L + none,
                gl.multiple_of(D + none, 16), T + none, K + none, chunks + none, table_ptr, results_ptr,
                dots_ptr, spoiled_ptr, returned_ptr, expert_ptr, row_ptr, weight_ptr, out_ptr, dweight_ptr,
                max_polls, report_ptr, BACKWARD, False, BANKS, BM, BT, BD,
                gl.arange(0, BT, gl.SliceLayout(1, wide)), gl.arange(0, BD, gl.SliceLayout(0, wide)),
            )  # fmt: skip
            i = gl.atomic_add(use_ptr + counter, 1, sem="relaxed", scope="gpu").to(gl.int32)
