"""The copy warps of the Hopper kernel: puts, and sums of results.

Loads and stores are 16 bytes a thread. Every program has copy warps, so all put at first. The rows of a put
go through a ring in shared memory: asynchronous copies fill PUT_SLOTS steps of PUT_ROWS * PUT_BLOCK elements,
and hold no registers while they are on their way; what has come is stored at the peer, and nobody waits for
that but the release at the end. A thread reads from the ring what it has copied there itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from lancet_kernels.kernels.hopper.shim import copy_async
from lancet_kernels.kernels.protocol import device
from lancet_kernels.kernels.protocol.device import opaque, opaque_width
from lancet_kernels.kernels.protocol.schedule import tile_ptr
from lancet_kernels.kernels.protocol.steps import chunk_rows, reduce_block, wait_free


@gluon.jit
def _put_rows(
    target_ptr, source_ptr, token_ptr, num_rows, D, ring,
    SLOTS: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Copy source[token[i]] for i < num_rows, D wide, to row i of target, in steps of [ROWS, BLOCK].

    The stores of a step come SLOTS - 1 steps behind its loads.
    Example: D = 1024, BLOCK = 512, ROWS = 2, 3 rows: 4 steps; with 4 slots all are on their way at once.
    """
    i_row = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    i_column = gl.arange(0, BLOCK, gl.SliceLayout(0, WIDE))
    columns = gl.cdiv(D, BLOCK)
    steps = gl.cdiv(num_rows, ROWS) * columns
    # A step ahead, so that its addresses do not wait for it.
    i = i_row
    token = gl.load(token_ptr + i, mask=i < num_rows, other=0)
    for step in range(steps + SLOTS - 1):
        # Not masked behind the last step: that would fill places with zeros, which nobody waits for.
        if step < steps:
            d = gl.multiple_of(step % columns * BLOCK, BLOCK) + i_column
            p = source_ptr + token.to(gl.int64)[:, None] * D + d[None, :]
            copy_async(ring.index(step % SLOTS), p, mask=(i < num_rows)[:, None] & (d < D)[None, :])
        async_copy.commit_group()
        i = (step + 1) // columns * ROWS + i_row
        token = gl.load(token_ptr + i, mask=i < num_rows, other=0)
        async_copy.wait_group(SLOTS - 1)
        past = step - (SLOTS - 1)
        if past >= 0:
            i_past = past // columns * ROWS + i_row
            d = gl.multiple_of(past % columns * BLOCK, BLOCK) + i_column
            value = ring.index(past % SLOTS).load(WIDE)
            p = target_ptr + i_past.to(gl.int64)[:, None] * D + d[None, :]
            gl.store(p, value, mask=(i_past < num_rows)[:, None] & (d < D)[None, :])


@gluon.jit
def _put_chunk(
    expert, m, epoch, rank, W, L, D, R, tiles, table_ptr, source_ptr, token_ptr, send_weights_ptr,
    rows_ptr, rows_peers_ptr, row_weights_ptr, row_weights_peers_ptr, arrived_ptr, arrived_peers_ptr,
    released_ptr, max_polls, report_ptr, ring, BANKS: gl.constexpr, BACKWARD: gl.constexpr, BM: gl.constexpr,
    SLOTS: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, WIDE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """PUT, as `put_chunk` does it, through the ring."""
    peer = expert // L
    if wait_free(peer, epoch, rank, W, released_ptr, max_polls, report_ptr, BANKS):
        # Read again, not kept while waiting.
        epoch, expert, W, L, R = opaque(epoch), opaque(expert), opaque(W), opaque(L), opaque(R)
        peer = expert // L
        begin, end, row, first_send, signal = chunk_rows(
            expert, m, epoch, rank, W, L, R, tiles, table_ptr, BANKS, BM
        )
        send = first_send + begin
        _put_rows(
            device.remote_pointer(rows_ptr, rows_peers_ptr, peer) + (row + begin) * D, source_ptr,
            token_ptr + send, end - begin, D, ring, SLOTS, ROWS, BLOCK, WIDE,
        )  # fmt: skip
        if BACKWARD:
            device.put_words(
                row_weights_ptr, row_weights_peers_ptr, peer, row + begin,
                send_weights_ptr + first_send + begin, end - begin, False, BM,
                gl.arange(0, BM, gl.BlockedLayout([1], [32], [WARPS], [0])),
            )  # fmt: skip
        device.put_signal(arrived_ptr, arrived_peers_ptr, peer, signal, device.word(epoch, 0), False)


@gluon.jit
def copy(
    use_ptr, counter, table_ptr, report_ptr, rank, max_polls, num_tasks, num_puts,
    sound, W, L, D, R, tiles, chunks, T, K,
    source_ptr, token_ptr, send_weights_ptr, rows_ptr, rows_peers_ptr, row_weights_ptr,
    row_weights_peers_ptr, arrived_ptr, arrived_peers_ptr, released_ptr, results_ptr, dots_ptr, spoiled_ptr,
    returned_ptr, out_ptr, expert_ptr, row_ptr, weight_ptr, dweight_ptr, ring,
    HAS_PUT: gl.constexpr, HAS_REDUCE: gl.constexpr, BACKWARD: gl.constexpr, BANKS: gl.constexpr,
    BM: gl.constexpr, PUT_SLOTS: gl.constexpr, PUT_ROWS: gl.constexpr, PUT_BLOCK: gl.constexpr,
    BT: gl.constexpr, BD: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The partition of the copy warps: all puts, then reductions.

    num_tasks: of these kinds, numbered in that order.
    """
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, WARPS], [1, 0])
    i = gl.atomic_add(use_ptr + opaque(counter), 1, sem="relaxed", scope="gpu").to(gl.int32)
    # A loop for each kind, with opaque sizes: what one computes takes no registers of the others. Each
    # task reads the epoch, which takes none between them.
    if HAS_PUT:
        while i < gl.minimum(num_puts, num_tasks):
            w, of_each, in_all = opaque(W), opaque(L), opaque(tiles)
            put_expert_ptr = tile_ptr(table_ptr, w, w * of_each) + 2 * in_all + i
            _put_chunk(
                gl.load(put_expert_ptr), gl.load(put_expert_ptr + opaque(chunks)), gl.load(use_ptr), rank, w,
                of_each, opaque_width(D), opaque(R), in_all, table_ptr, source_ptr, token_ptr,
                send_weights_ptr, rows_ptr, rows_peers_ptr, row_weights_ptr, row_weights_peers_ptr,
                arrived_ptr, arrived_peers_ptr, released_ptr, max_polls, report_ptr, ring,
                BANKS, BACKWARD, BM, PUT_SLOTS, PUT_ROWS, PUT_BLOCK, wide, WARPS,
            )  # fmt: skip
            i = gl.atomic_add(use_ptr + opaque(counter), 1, sem="relaxed", scope="gpu").to(gl.int32)
    if HAS_REDUCE:
        while i < num_tasks:
            reduce_block(
                i - num_puts, gl.load(use_ptr), rank, sound, opaque(W), opaque(L),
                opaque_width(D), opaque(T), opaque(K), opaque(chunks), table_ptr, results_ptr, dots_ptr,
                spoiled_ptr, returned_ptr, expert_ptr, row_ptr, weight_ptr, out_ptr, dweight_ptr,
                max_polls, report_ptr, BACKWARD, False, BANKS, BM, BT, BD,
                gl.arange(0, BT, gl.SliceLayout(1, wide)), gl.arange(0, BD, gl.SliceLayout(0, wide)),
            )  # fmt: skip
            i = gl.atomic_add(use_ptr + opaque(counter), 1, sem="relaxed", scope="gpu").to(gl.int32)
