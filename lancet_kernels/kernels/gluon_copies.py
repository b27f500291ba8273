"""The copy warps of the Hopper kernel: puts, gradients of combine weights, and reductions.

Loads and stores are 16 bytes a thread. Every program has copy warps, so all put at first; how much of a put
each has in flight is PUT_ROWS * PUT_BLOCK.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lancet_kernels.kernels.device import opaque
from lancet_kernels.kernels.overlap_tasks import dweight_block, put_chunk, reduce_block
from lancet_kernels.kernels.schedule import tile_ptr


@gluon.jit
def copy(
    use_ptr, counter, earlier_use_ptr, table_ptr, report_ptr, rank, max_polls, num_tasks, num_puts,
    dweight_blocks, epoch, sound, W, L, D, R, S, tiles, chunks, T, K,
    source_ptr, token_ptr, scale_ptr, rows_ptr, rows_peers_ptr, arrived_ptr, arrived_peers_ptr, released_ptr,
    results_ptr, returned_ptr, out_ptr, expert_ptr, row_ptr, weight_ptr, saved_results_ptr, dweight_ptr,
    HAS_PUT: gl.constexpr, HAS_REDUCE: gl.constexpr, HAS_DWEIGHT: gl.constexpr, SCALED: gl.constexpr,
    WEIGHTED: gl.constexpr, BANKS: gl.constexpr, EARLIER_BANKS: gl.constexpr, BM: gl.constexpr,
    PUT_ROWS: gl.constexpr, PUT_BLOCK: gl.constexpr, BT: gl.constexpr, BD: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The partition of the copy warps: all puts, then gradients of combine weights, then reductions.

    num_tasks: of these kinds, numbered in that order.
    """
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, WARPS], [1, 0])
    i = gl.atomic_add(use_ptr + counter, 1, sem="relaxed", scope="gpu").to(gl.int32)
    # A loop for each kind, with opaque sizes: what one computes takes no registers of the others.
    if HAS_PUT:
        while i < gl.minimum(num_puts, num_tasks):
            w, of_each, in_all = opaque(W), opaque(L), opaque(tiles)
            put_expert_ptr = tile_ptr(table_ptr, w, w * of_each) + 2 * in_all + i
            put_chunk(
                gl.load(put_expert_ptr), gl.load(put_expert_ptr + opaque(chunks)), epoch, rank, w, of_each,
                gl.multiple_of(opaque(D), 16), opaque(R), in_all, table_ptr, source_ptr, token_ptr, scale_ptr,
                rows_ptr, rows_ptr, rows_peers_ptr, arrived_ptr, arrived_peers_ptr, released_ptr, max_polls,
                report_ptr, BANKS, SCALED, False, BM, PUT_ROWS, PUT_BLOCK,
                gl.arange(0, PUT_ROWS, gl.SliceLayout(1, wide)),
                gl.arange(0, PUT_BLOCK, gl.SliceLayout(0, wide)),
            )  # fmt: skip
            i = gl.atomic_add(use_ptr + counter, 1, sem="relaxed", scope="gpu").to(gl.int32)
    if HAS_DWEIGHT:
        while i < gl.minimum(num_puts + dweight_blocks, num_tasks):
            s, d = opaque(S), gl.multiple_of(opaque(D), 16)
            earlier = gl.load(earlier_use_ptr) % EARLIER_BANKS
            dweight_block(
                i - num_puts, d, opaque(T), opaque(K), source_ptr, saved_results_ptr + earlier * s * d,
                row_ptr, dweight_ptr, BT, BD,
                gl.arange(0, BT, gl.SliceLayout(1, wide)), gl.arange(0, BD, gl.SliceLayout(0, wide)),
            )  # fmt: skip
            i = gl.atomic_add(use_ptr + counter, 1, sem="relaxed", scope="gpu").to(gl.int32)
    if HAS_REDUCE:
        while i < num_tasks:
            reduce_block(
                i - num_puts - dweight_blocks, epoch, rank, sound, opaque(W), opaque(L),
                gl.multiple_of(opaque(D), 16), opaque(S), opaque(T), opaque(K), opaque(chunks), table_ptr,
                results_ptr, returned_ptr, expert_ptr, row_ptr, weight_ptr, out_ptr, max_polls, report_ptr,
                WEIGHTED, False, BANKS, BM, BT, BD,
                gl.arange(0, BT, gl.SliceLayout(1, wide)), gl.arange(0, BD, gl.SliceLayout(0, wide)),
            )  # fmt: skip
            i = gl.atomic_add(use_ptr + counter, 1, sem="relaxed", scope="gpu").to(gl.int32)
