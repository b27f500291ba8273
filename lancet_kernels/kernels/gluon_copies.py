"""The copy warps of the Hopper kernel: puts, copies of rows that were sent once, sums of results.

Loads and stores are 16 bytes a thread. Every program has copy warps, so all put at first. The rows of a put
go through a ring in shared memory: asynchronous copies fill PUT_SLOTS steps of PUT_ROWS * PUT_BLOCK elements,
and hold no registers while they are on their way; what has come is stored at the peer, and nobody waits for
that but the release at the end. A thread reads from the ring what it has copied there itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from lancet_kernels.kernels import device
from lancet_kernels.kernels.device import opaque, opaque_width
from lancet_kernels.kernels.gluon_shim import copy_async
from lancet_kernels.kernels.overlap_tasks import (
    again,
    chunk_rows,
    find_origins,
    finish_fan,
    merge_tile,
    place_of_tile,
    reduce_block,
    wait_free,
    wait_leaders,
)
from lancet_kernels.kernels.schedule import tile_ptr

PUT_ALL = gl.constexpr(0)  # every row
PUT_LEADERS = gl.constexpr(1)  # rows that are their own origin
COPY_OTHERS = gl.constexpr(2)  # all others, from the row that their origin names


@gluon.jit
def _source_row(token_ptr, origin_ptr, first, i, num_rows, WHICH: gl.constexpr):
    """-> which row of the source row i of the target is, and whether it is copied."""
    wanted = i < num_rows
    if WHICH == COPY_OTHERS:
        token = device.low_word(gl.load(origin_ptr + i, mask=wanted, other=0))
        wanted = wanted & (token != first + i)
    else:
        token = gl.load(token_ptr + i, mask=wanted, other=0)
        if WHICH == PUT_LEADERS:
            wanted = wanted & (device.low_word(gl.load(origin_ptr + i, mask=wanted, other=0)) == first + i)
    return token, wanted


@gluon.jit
def _put_rows(
    target_ptr, source_ptr, token_ptr, num_rows, D, ring, origin_ptr, first,
    SLOTS: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, WIDE: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Copy source[token[i]] for i < num_rows, D wide, to row i of target, in steps of [ROWS, BLOCK].

    WHICH of these rows: see above. origin: words (tile, row) for each; row 0 of target is row `first` there.

    The stores of a step come SLOTS - 1 steps behind its loads.
    Example: D = 1024, BLOCK = 512, ROWS = 2, 3 rows: 4 steps; with 4 slots all are on their way at once.
    """
    i_row = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    i_column = gl.arange(0, BLOCK, gl.SliceLayout(0, WIDE))
    columns = gl.cdiv(D, BLOCK)
    steps = gl.cdiv(num_rows, ROWS) * columns
    # A step ahead, so that its addresses do not wait for it.
    token, wanted = _source_row(token_ptr, origin_ptr, first, i_row, num_rows, WHICH)
    for step in range(steps + SLOTS - 1):
        # Not masked behind the last step: that would fill places with zeros, which nobody waits for.
        if step < steps:
            d = gl.multiple_of(step % columns * BLOCK, BLOCK) + i_column
            p = source_ptr + token.to(gl.int64)[:, None] * D + d[None, :]
            copy_async(ring.index(step % SLOTS), p, mask=wanted[:, None] & (d < D)[None, :])
        async_copy.commit_group()
        i = (step + 1) // columns * ROWS + i_row
        token, wanted = _source_row(token_ptr, origin_ptr, first, i, num_rows, WHICH)
        async_copy.wait_group(SLOTS - 1)
        past = step - (SLOTS - 1)
        if past >= 0:
            i = past // columns * ROWS + i_row
            d = gl.multiple_of(past % columns * BLOCK, BLOCK) + i_column
            value = ring.index(past % SLOTS).load(WIDE)
            p = target_ptr + i.to(gl.int64)[:, None] * D + d[None, :]
            _, stored = _source_row(token_ptr, origin_ptr, first, i, num_rows, WHICH)
            gl.store(p, value, mask=stored[:, None] & (d < D)[None, :])


@gluon.jit
def _put_chunk(
    expert, m, epoch, rank, W, L, D, R, tiles, table_ptr, source_ptr, token_ptr, send_weights_ptr,
    rows_ptr, rows_peers_ptr, row_weights_ptr, row_weights_peers_ptr, arrived_ptr, arrived_peers_ptr,
    released_ptr, max_polls, report_ptr, K, expert_ptr, row_ptr, origin_ptr, origin_peers_ptr,
    origin_stage_ptr, x_ptr, ring, BANKS: gl.constexpr, BACKWARD: gl.constexpr, BM: gl.constexpr,
    SLOTS: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, DEDUP: gl.constexpr,
    SEND_X: gl.constexpr, WIDE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """PUT, as `put_chunk` does it, through the ring.

    With DEDUP origins are found ahead of it, and stand in stage [S], where this PE reads them again.
    """
    peer = expert // L
    if wait_free(peer, epoch, rank, W, released_ptr, max_polls, report_ptr, BANKS):
        # Read again, not kept while waiting.
        epoch, expert, W, L, R = again(epoch, expert, W, L, R)
        peer = expert // L
        begin, end, row, first_send, signal = chunk_rows(
            expert, m, epoch, rank, W, L, R, tiles, table_ptr, BANKS, BM
        )
        send = first_send + begin
        WHICH: gl.constexpr = PUT_LEADERS if DEDUP > 0 else PUT_ALL
        if DEDUP > 0:
            # One choice for each thread.
            ACROSS: gl.constexpr = DEDUP if DEDUP < 32 else 32
            GROUP: gl.constexpr = 32 // ACROSS * WARPS
            lanes: gl.constexpr = gl.BlockedLayout([1, 1], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
            i_choice = gl.arange(0, DEDUP, gl.SliceLayout(0, lanes))
            for i in range(0, end - begin, GROUP):
                i_send = i + opaque(gl.arange(0, GROUP, gl.SliceLayout(1, lanes)))
                mask = i_send < end - begin
                _, origin = find_origins(
                    send + i_send, mask, peer, rank, W, L, K, table_ptr, token_ptr, expert_ptr, row_ptr,
                    i_choice,
                )  # fmt: skip
                gl.store(origin_stage_ptr + send + i_send, origin, mask=mask)
            # Other threads read them.
            device.fence(False)
            device.put_words(
                origin_ptr, origin_peers_ptr, peer, row + begin, origin_stage_ptr + send, end - begin, False,
                BM, gl.arange(0, BM, gl.BlockedLayout([1], [32], [WARPS], [0])),
            )  # fmt: skip
        for x in gl.static_range(1 + SEND_X):
            _put_rows(
                device.remote_pointer(rows_ptr, rows_peers_ptr, peer) + (row + begin + x * BANKS * R) * D,
                x_ptr if x else source_ptr, token_ptr + send, end - begin, D, ring, origin_stage_ptr + send,
                (row + begin - epoch % BANKS * R).to(gl.int32), SLOTS, ROWS, BLOCK, WIDE, WHICH,
            )  # fmt: skip
        if BACKWARD or DEDUP > 0:
            device.put_words(
                row_weights_ptr, row_weights_peers_ptr, peer, row + begin,
                send_weights_ptr + first_send + begin, end - begin, False, BM,
                gl.arange(0, BM, gl.BlockedLayout([1], [32], [WARPS], [0])),
            )  # fmt: skip
        device.put_signal(arrived_ptr, arrived_peers_ptr, peer, signal, device.word(epoch, 0), False)


@gluon.jit
def _fan_tile(
    tile, epoch, rank, W, L, D, R, tiles, table_ptr, rows_ptr, arrived_ptr, origin_ptr, fanned_ptr,
    max_polls, report_ptr, ring, BANKS: gl.constexpr, BM: gl.constexpr, BW: gl.constexpr,
    SLOTS: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, SEND_X: gl.constexpr, WIDE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """FAN, as `fan_tile` does it, through the ring."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    expert, m, _, _ = place_of_tile(tile, rank, W, L, table_ptr)
    if wait_leaders(
        tile, m, expert, epoch, rank, W, L, R, tiles, table_ptr, arrived_ptr, origin_ptr, max_polls,
        report_ptr, False, BANKS, BM, BW, opaque(gl.arange(0, BW, line)), opaque(gl.arange(0, BM, line)),
    ):  # fmt: skip
        # Read again, not kept while waiting.
        epoch, tile, W, L, R = again(epoch, tile, W, L, R)
        _, m, rows, first_row = place_of_tile(tile, rank, W, L, table_ptr)
        first = first_row + m * BM
        bank = epoch % BANKS * R
        for x in gl.static_range(1 + SEND_X):
            of = bank + x * BANKS * R
            _put_rows(
                rows_ptr + (of + first) * D, rows_ptr + of * D, table_ptr, gl.minimum(rows - m * BM, BM), D,
                ring, origin_ptr + bank + first, first, SLOTS, ROWS, BLOCK, WIDE, COPY_OTHERS,
            )  # fmt: skip
        finish_fan(fanned_ptr, tile)


@gluon.jit
def copy(
    use_ptr, counter, table_ptr, report_ptr, rank, max_polls, num_tasks, num_puts, num_merges,
    sound, W, L, D, R, tiles, chunks, T, K,
    source_ptr, token_ptr, send_weights_ptr, rows_ptr, rows_peers_ptr, row_weights_ptr,
    row_weights_peers_ptr, arrived_ptr, arrived_peers_ptr, released_ptr, results_ptr,
    results_peers_ptr, dots_ptr, spoiled_ptr, returned_ptr, returned_peers_ptr, out_ptr, expert_ptr, row_ptr,
    weight_ptr, dweight_ptr,
    origin_ptr, origin_peers_ptr, origin_stage_ptr, fanned_ptr, stage_ptr, done_ptr, x_ptr, ring,
    HAS_PUT: gl.constexpr, HAS_OUT: gl.constexpr, HAS_REDUCE: gl.constexpr, BACKWARD: gl.constexpr,
    BANKS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BW: gl.constexpr,
    PUT_SLOTS: gl.constexpr, PUT_ROWS: gl.constexpr,
    PUT_BLOCK: gl.constexpr, BT: gl.constexpr, BD: gl.constexpr, DEDUP: gl.constexpr,
    SEND_X: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The partition of the copy warps: all puts, with FANs among them, then MERGEs, then reductions.

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
            expert = gl.load(put_expert_ptr)
            puts = opaque(chunks)
            if DEDUP > 0:
                puts += in_all
            tile = gl.load(put_expert_ptr + puts)
            if DEDUP == 0 or expert >= 0:
                _put_chunk(
                    expert, tile, gl.load(use_ptr), rank, w, of_each,
                    opaque_width(D), opaque(R), in_all, table_ptr, source_ptr, token_ptr,
                    send_weights_ptr, rows_ptr, rows_peers_ptr, row_weights_ptr, row_weights_peers_ptr,
                    arrived_ptr, arrived_peers_ptr, released_ptr, max_polls, report_ptr,
                    opaque(K), expert_ptr, row_ptr, origin_ptr, origin_peers_ptr, origin_stage_ptr, x_ptr,
                    ring, BANKS, BACKWARD, BM, PUT_SLOTS, PUT_ROWS, PUT_BLOCK, DEDUP, SEND_X, wide, WARPS,
                )  # fmt: skip
            if DEDUP > 0:
                if expert < 0:
                    _fan_tile(
                        tile, gl.load(use_ptr), rank, w, of_each, opaque_width(D), opaque(R), in_all,
                        table_ptr, rows_ptr, arrived_ptr, origin_ptr, fanned_ptr, max_polls, report_ptr, ring,
                        BANKS, BM, BW, PUT_SLOTS, PUT_ROWS, PUT_BLOCK, SEND_X, wide, WARPS,
                    )  # fmt: skip
            i = gl.atomic_add(use_ptr + opaque(counter), 1, sem="relaxed", scope="gpu").to(gl.int32)
    if HAS_OUT and DEDUP > 0:
        while i < gl.minimum(num_puts + num_merges, num_tasks):
            merge_tile(
                i - num_puts, gl.load(use_ptr), rank, opaque(W), opaque(L), opaque_width(D), opaque(R),
                opaque(chunks), table_ptr, origin_ptr, stage_ptr, results_ptr, results_peers_ptr,
                returned_ptr, returned_peers_ptr, done_ptr, max_polls, report_ptr, BANKS, False, BM, BN, BT,
                BD,
                opaque(gl.arange(0, BM, gl.BlockedLayout([1], [32], [WARPS], [0]))),
                gl.arange(0, BT, gl.SliceLayout(1, wide)), gl.arange(0, BD, gl.SliceLayout(0, wide)),
            )  # fmt: skip
            i = gl.atomic_add(use_ptr + opaque(counter), 1, sem="relaxed", scope="gpu").to(gl.int32)
    if HAS_REDUCE:
        while i < num_tasks:
            reduce_block(
                i - num_puts - num_merges, gl.load(use_ptr), rank, sound, opaque(W), opaque(L),
                opaque_width(D), opaque(T), opaque(K), opaque(chunks), table_ptr, results_ptr, dots_ptr,
                spoiled_ptr, returned_ptr, expert_ptr, row_ptr, weight_ptr, out_ptr, dweight_ptr,
                origin_stage_ptr, max_polls, report_ptr, BACKWARD, False, BANKS, BM, BT, BD, DEDUP > 0,
                gl.arange(0, BT, gl.SliceLayout(1, wide)), gl.arange(0, BD, gl.SliceLayout(0, wide)),
            )  # fmt: skip
            i = gl.atomic_add(use_ptr + opaque(counter), 1, sem="relaxed", scope="gpu").to(gl.int32)
