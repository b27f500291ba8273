"""The bodies of the overlap kernel's tasks.

`tasks.py` says what each waits for, `schedule.py` where rows lie.

    W  PEs, L experts on each     E  experts in all     K  choices per token
    T  tokens here                D  model width        B  banks
    S  most rows sent             R  most rows received

A Gluon kernel, which lays out its blocks itself, hands over the index ranges `i_*`; without them they are
made here.

Index arithmetic is 64 bits wide where elements are counted: R * D passes 2^31 soon.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels import device
from lancet_kernels.kernels.choices import add_row, place_row, rows_of_token
from lancet_kernels.kernels.failure_report import (
    WAIT_DONE,
    WAIT_FANNED,
    WAIT_READY,
    WAIT_RELEASE,
    WAIT_RESULTS,
    WAIT_ROWS,
)
from lancet_kernels.kernels.schedule import VOID, chunk_number, group, in_tile, segment, tile_ptr


@triton.jit
def find_origins(
    send, m_row, peer, rank, W, L, K, table_ptr, token_ptr, expert_ptr, row_ptr, i_choice
):  # fmt: skip
    """-> of rows to send to `peer`: the row to send that leads each, and its origin.

    That is word(previous, leader): where the row before it and the first one of its token lie there; its
    sign says that it is the last one. The leader is its own previous row.
    """
    token = tl.load(token_ptr + send, mask=m_row, other=0)
    lead, expert, previous, previous_expert, is_last = rows_of_token(
        send, token, m_row, peer, L, K, expert_ptr, row_ptr, i_choice
    )
    lead_there = _row_there(lead, expert, m_row, rank, W, L, table_ptr)
    previous_there = _row_there(previous, previous_expert, m_row, rank, W, L, table_ptr)
    return lead, device.word(previous_there | (is_last.to(tl.int32) << 31), lead_there)


@triton.jit
def _row_there(send, expert, m_row, rank, W, L, table_ptr):
    """-> which rows of their receiver the rows `send` become."""
    _, before, first_send = segment(table_ptr, W, W * L, rank, expert, m_row)
    _, first_row, _ = group(table_ptr, W, W * L, expert)
    return first_row + before + send - first_send


@triton.jit
def previous_row(origin):
    """-> the row here of the same token before each; see `find_origins`."""
    return ((origin >> 32) & device.LAST_INDEX).to(tl.int32)


@triton.jit
def tile_of_row(row, rank, W, L, table_ptr, BM: tl.constexpr):
    """-> the tiles in which rows received here lie."""
    tile = row * 0
    first = device.opaque(rank) * L
    for e in range(L):
        _, first_row, first_tile = group(table_ptr, W, W * L, device.opaque(first + e))
        tile = tl.where(row >= first_row, first_tile + (row - first_row) // BM, tile)
    return tile


@triton.jit
def wait_free(peer, epoch, rank, W, released_ptr, max_polls, report_ptr, BANKS: tl.constexpr):
    """Wait until the peer has released the bank of this epoch. -> has it?"""
    free = device.word(epoch - BANKS, 0)
    i_released = epoch % BANKS * W + peer
    seen = device.wait(
        released_ptr + i_released, free, max_polls, report_ptr, rank, peer, WAIT_RELEASE, i_released
    )
    return seen >= free


@triton.jit
def chunk_rows(
    expert, m, epoch, rank, W, L, R, tiles, table_ptr, BANKS: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """-> begin, end, row, first_send and signal of the rows of this PE for `expert` that lie in its tile m.

    They are begin to end of those for the expert; i of these is first_send + i in the order of sending, and
    comes to row + i of the peer's rows [B * R]. signal: their word of `arrived`.
    """
    bank = epoch % BANKS
    count, before, first_send = segment(table_ptr, W, W * L, rank, expert)
    _, first_row, first_tile = group(table_ptr, W, W * L, expert)
    begin = tl.maximum(m * BM - before, 0)
    end = tl.minimum((m + 1) * BM - before, count)
    row = bank * R + first_row + before
    return begin, end, row, first_send, (bank * tiles + first_tile + m) * W + rank


@triton.jit
def put_chunk(
    expert, m, epoch, rank, W, L, D, R, tiles, table_ptr,
    source_ptr, token_ptr, send_weights_ptr, stage_ptr, rows_ptr, rows_peers_ptr,
    row_weights_ptr, row_weights_peers_ptr,
    arrived_ptr, arrived_peers_ptr, released_ptr, max_polls, report_ptr,
    K, expert_ptr, row_ptr, origin_ptr, origin_peers_ptr, origin_stage_ptr, x_ptr, x_stage_ptr,
    BANKS: tl.constexpr, BACKWARD: tl.constexpr, NVSHMEM: tl.constexpr,
    BM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEDUP: tl.constexpr, SEND_X: tl.constexpr,
):  # fmt: skip
    """PUT: send those rows for `expert` that lie in its tile m, to their final place, then signal them.

    source [T, D]; token int32 [S], which row of source each row to send is; stage [S, D], symmetric memory
    through which rows go where no pointer reaches. In a backward the weight of each row goes with it, from
    send_weights to row_weights [B, R], float32. Into a bank that the peer has not released in time nothing is
    put. DEDUP > 0: only leaders are, and for each row of the chunk its weight and its origin, which stays
    here as well, in origin_stage [S]; expert, row [T, K] are the routing. SEND_X (0 or 1): rows of x [T, D],
    through stage x_stage [S, D], go to the same places in the banks behind those of source; one signal is
    behind both.
    Example: BM = 4, 3 rows from first_send = 4 on, behind 2 rows of other sources: with m = 0 rows 4 and 5 go
    to rows 2 and 3 of the expert, with m = 1 row 6 goes to row 4.
    """
    if DEDUP > 0:
        i_send = tl.arange(0, ROWS)
        i_choice = tl.arange(0, DEDUP)
    peer = expert // L
    if wait_free(peer, epoch, rank, W, released_ptr, max_polls, report_ptr, BANKS):
        begin, end, row, first_send, signal = chunk_rows(
            expert, m, epoch, rank, W, L, R, tiles, table_ptr, BANKS, BM
        )
        for r in range(begin, end, ROWS):
            chosen = None
            if DEDUP > 0:
                send = first_send + r + i_send
                lead, origin = find_origins(
                    send, r + i_send < end, peer, rank, W, L, K, table_ptr, token_ptr, expert_ptr, row_ptr,
                    i_choice,
                )  # fmt: skip
                device.put_values(
                    origin_ptr, origin_peers_ptr, peer, row + r, origin, i_send, end - r,
                    origin_stage_ptr + first_send + r, NVSHMEM,
                )  # fmt: skip
                chosen = lead == send
            for x in tl.static_range(1 + SEND_X):
                device.put_rows(
                    rows_ptr, rows_peers_ptr, peer, (row + r + x * BANKS * R) * D,
                    x_ptr if x else source_ptr, token_ptr + first_send + r, tl.minimum(end - r, ROWS), D,
                    NVSHMEM, ROWS, BLOCK,
                    (x_stage_ptr if x else stage_ptr) + tl.cast(first_send + r, tl.int64) * D,
                    chosen,
                )  # fmt: skip
        if BACKWARD or DEDUP > 0:
            device.put_words(
                row_weights_ptr, row_weights_peers_ptr, peer, row + begin,
                send_weights_ptr + first_send + begin, end - begin, NVSHMEM, BM,
            )  # fmt: skip
        word = device.word(epoch, 0)
        device.put_signal(arrived_ptr, arrived_peers_ptr, peer, signal, word, NVSHMEM)


@triton.jit
def wait_rows(
    tile, m, expert, epoch, rank, W, L, tiles, table_ptr, arrived_ptr, max_polls, report_ptr,
    NVSHMEM: tl.constexpr, TMA: tl.constexpr, BANKS: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr,
    i_w=None,
):  # fmt: skip
    """Wait until all rows of the tile, which is tile m of its expert, are here. -> whether they are.

    If not, the caller does nothing and signals nothing, so that a peer that waits for what it would have made
    runs out of time too, instead of taking what is not there.
    """
    if i_w is None:
        i_w = tl.arange(0, BW)
    count, before, _ = segment(table_ptr, W, W * L, i_w, expert, i_w < W)
    index = ((epoch % BANKS) * tiles + tile) * W + i_w
    word = device.word(epoch, 0)
    here = device.wait_all(
        arrived_ptr + index, in_tile(count, before, m, BM), word, max_polls, report_ptr, rank, i_w,
        WAIT_ROWS, index, BW, NVSHMEM,
    )  # fmt: skip
    device.fence_tma(TMA)
    return here


@triton.jit
def wait_leaders(
    tile, m, expert, epoch, rank, W, L, R, tiles, table_ptr, arrived_ptr, origin_ptr, max_polls, report_ptr,
    NVSHMEM: tl.constexpr, BANKS: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr, i_w=None, i_m=None,
):  # fmt: skip
    """FAN waits: until what is sent of a tile is here, and all leaders of its rows. -> are they?

    A leader was put by the same source, into this tile or into an earlier one. Leaders are never copies.
    """
    if i_m is None:
        i_m = tl.arange(0, BM)
    here = wait_rows(
        tile, m, expert, epoch, rank, W, L, tiles, table_ptr, arrived_ptr, max_polls, report_ptr,
        NVSHMEM, False, BANKS, BM, BW, i_w,
    )  # fmt: skip
    if here:
        bank = device.opaque(epoch) % BANKS
        W, L = device.opaque(W), device.opaque(L)
        rows, first_row, _ = group(table_ptr, W, W * L, expert)
        i = m * BM + i_m
        origin = tl.load(origin_ptr + bank * R + first_row + i, mask=i < rows, other=0)
        lead = device.low_word(origin)
        copied = (i < rows) & (lead != first_row + i)
        source, _row = _sources(expert, i, W, L, table_ptr)
        index = (bank * tiles + tile_of_row(lead, rank, W, L, table_ptr, BM)) * W + source
        here = device.wait_all(
            arrived_ptr + index, copied, device.word(epoch, 0), max_polls, report_ptr, rank, source,
            WAIT_ROWS, index, BM, NVSHMEM,
        )  # fmt: skip
    return here


@triton.jit
def fan_tile(
    tile, epoch, rank, W, L, D, R, tiles, table_ptr, rows_ptr, arrived_ptr, origin_ptr, fanned_ptr,
    max_polls, report_ptr,
    NVSHMEM: tl.constexpr, BANKS: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SEND_X: tl.constexpr,
):  # fmt: skip
    """FAN: copy those rows of a tile that were not sent from their leaders, then say that all are here.

    SEND_X: rows of x, too. If rows did not come in time nobody is told.
    Example: BM = 4, a token of PE 1 in rows 2 and 9: PE 1 puts row 2, and (2, 2) as the origin of both; FAN
    of the tile of row 9 waits for PE 1's words of that tile and of tile 0, and copies row 2 to row 9.
    """
    expert = rank * L + tl.load(tile_ptr(table_ptr, W, W * L) + tile)
    rows, first_row, first_tile = group(table_ptr, W, W * L, expert)
    m = tile - first_tile
    if wait_leaders(
        tile, m, expert, epoch, rank, W, L, R, tiles, table_ptr, arrived_ptr, origin_ptr, max_polls,
        report_ptr, NVSHMEM, BANKS, BM, BW,
    ):  # fmt: skip
        bank = (epoch % BANKS) * R
        end = first_row + tl.minimum(rows, (m + 1) * BM)
        for r in range(first_row + m * BM, end, ROWS):
            row = r + tl.arange(0, ROWS)
            lead = device.low_word(tl.load(origin_ptr + bank + row, mask=row < end, other=0))
            copied = (row < end) & (lead != row)
            for d in range(0, D, BLOCK):
                i_d = d + tl.arange(0, BLOCK)
                mask = copied[:, None] & (i_d < D)[None, :]
                for x in tl.static_range(1 + SEND_X):
                    of = bank + x * BANKS * R
                    # [ROWS, BLOCK]
                    b_x = tl.load(rows_ptr + (of + lead)[:, None] * D + i_d[None, :], mask=mask)
                    tl.store(rows_ptr + (of + row)[:, None] * D + i_d[None, :], b_x, mask=mask)
        finish_fan(fanned_ptr, tile)


@triton.jit
def finish_fan(fanned_ptr, tile):
    """FAN is done: all rows of the tile are here."""
    tl.debug_barrier()
    tl.atomic_xchg(fanned_ptr + tile, tl.cast(1, tl.int64), sem="release", scope="gpu")


@triton.jit
def wait_fanned(tile, rank, fanned_ptr, max_polls, report_ptr, TMA: tl.constexpr):
    """Wait until all rows of the tile are here, copied by FAN where they were not sent. -> are they?"""
    one = tl.cast(1, tl.int64)
    seen = device.wait(fanned_ptr + tile, one, max_polls, report_ptr, rank, rank, WAIT_FANNED, tile)
    device.fence_tma(TMA)
    return seen >= one


@triton.jit
def finish_ready(ready_ptr, tile, local, tiles):
    """TILE_IN is done: one more column of its tile, and of its expert."""
    tl.debug_barrier()
    tl.atomic_add(ready_ptr + tile, 1, sem="release", scope="gpu")
    tl.atomic_add(ready_ptr + tiles + local, 1, sem="release", scope="gpu")


@triton.jit
def wait_ready(index, columns, rank, ready_ptr, max_polls, report_ptr, TMA: tl.constexpr):
    """Wait until that many column tiles of the first GEMM are done, by whichever program. -> are they?

    index: the tile, or behind all tiles the local expert. Whoever finished the first GEMM has taken in what
    the network wrote, and published it.
    """
    expected = tl.cast(columns, tl.int64)
    seen = device.wait(ready_ptr + index, expected, max_polls, report_ptr, rank, rank, WAIT_READY, index)
    device.fence_tma(TMA)
    return seen >= expected


@triton.jit
def _sources(expert, i, W, L, table_ptr):
    """-> of rows i of an expert: who sent them, and as which of its rows, int64.

    Example: that of `schedule`, expert 0 of PE 0, i = 0 to 3: PEs 0, 0, 1, 1 and rows 0, 1, 0, 1.
    """
    source = i * 0
    for w in range(W):
        count, before, _ = segment(table_ptr, W, W * L, w, expert)
        source += (i >= before + count).to(tl.int32)
    source = tl.minimum(source, W - 1)
    _, before, first_send = segment(table_ptr, W, W * L, source, expert)
    return source, (first_send + i - before).to(tl.int64)


@triton.jit
def result_rows(
    expert, i, rows, first_row, W, L, D, table_ptr, stage_ptr, results_ptr, results_peers_ptr,
    NVSHMEM: tl.constexpr, origin=None,
):  # fmt: skip
    """-> where the results of rows i of an expert go, addresses at their sources, and which of them are.

    Where no pointer reaches the source: to stage [R, D], at the place of the row here. So do those of a token
    with several rows here, given the rows' origins.
    """
    source, row = _sources(expert, i, W, L, table_ptr)
    base = tl.load(results_peers_ptr + source)
    # Base and row are chosen one by one: of a choice between addresses the compiler does not see how they
    # are aligned, and stores element by element.
    if NVSHMEM or origin is not None:
        staged = base == 0
        if origin is not None:
            staged |= (origin >= 0) | (device.low_word(origin) != first_row + i)
        base = tl.where(staged, stage_ptr.to(tl.int64), base)
        row = tl.where(staged, (first_row + i).to(tl.int64), row)
    p = tl.multiple_of(base.to(results_ptr.dtype), [16]) + row * D
    return p, i < rows


@triton.jit
def return_dots(
    expert, m, rows, first_row, columns, W, L, R, table_ptr, row_dots_ptr, dots_stage_ptr, dots_ptr,
    dots_peers_ptr, NVSHMEM: tl.constexpr, BM: tl.constexpr, i_m=None,
):  # fmt: skip
    """Gradients of the rows' weights, to dots of their sources: sums of row_dots over column tiles, in order.

    row_dots [columns, R], of TILE_IN; dots [S], in the order of sending; dots_stage [R], ours, for a source
    that no pointer reaches: all float32.
    """
    if i_m is None:
        i_m = tl.arange(0, BM)
    i = m * BM + i_m
    p_dot = row_dots_ptr + first_row + i
    dot = tl.cast(i * 0, tl.float32)
    for n in range(columns):
        dot += tl.load(p_dot + tl.cast(n, tl.int64) * R, mask=i < rows, other=0.0)
    source, row = _sources(expert, i, W, L, table_ptr)
    base = tl.load(dots_peers_ptr + source)
    p = base.to(dots_ptr.dtype) + row
    if NVSHMEM:
        p = tl.where(base == 0, dots_stage_ptr + first_row + i, p)
    tl.store(p, dot, mask=i < rows)


@triton.jit
def return_tile(
    tile, m, n, expert, first_row, epoch, rank, W, L, D, tiles, chunks, table_ptr,
    stage_ptr, results_ptr, results_peers_ptr, dots_stage_ptr, dots_ptr,
    returned_ptr, returned_peers_ptr, done_ptr,
    BACKWARD: tl.constexpr, BANKS: tl.constexpr, NVSHMEM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DEDUP: tl.constexpr,
):  # fmt: skip
    """TILE_OUT is stored at the sources, or in stage [R, D] where no pointer reaches them: the last signals.

    The programs that stored the other columns of the tile published them by the counter (release), the last
    one takes them in (acquire) and publishes all of them with the signals: release is cumulative. DEDUP: it
    is MERGE that puts what is staged, waits for the counter, and signals.
    """
    E = W * L
    columns = tl.cdiv(D, BN)
    tl.debug_barrier()
    if NVSHMEM:
        width = tl.minimum(D - n * BN, BN)
        for w in range(W):
            count, before, first_send = segment(table_ptr, W, E, w, expert)
            if tl.load(results_peers_ptr + w) == 0:
                begin = tl.maximum(before, m * BM)
                end = tl.minimum(before + count, (m + 1) * BM)
                if not DEDUP:
                    for i in range(begin, end):
                        target = tl.cast(first_send + i - before, tl.int64) * D + n * BN
                        staged = tl.cast(first_row + i, tl.int64) * D + n * BN
                        device.put_row(results_ptr + target, stage_ptr + staged, width, w, NVSHMEM)
                if BACKWARD:
                    if (n == 0) & (begin < end):
                        device.put_row(
                            dots_ptr + first_send + begin - before, dots_stage_ptr + first_row + begin,
                            end - begin, w, NVSHMEM,
                        )  # fmt: skip
    # Not a fence: the program that signals may be another one.
    device.quiet(NVSHMEM)
    done = tl.atomic_add(done_ptr + tile, 1, sem="acq_rel", scope="gpu")
    if not DEDUP:
        if done == columns - 1:
            signal_sources(
                expert, m, epoch, W, L, chunks, table_ptr, returned_ptr, returned_peers_ptr, BANKS, NVSHMEM,
                BM,
            )  # fmt: skip


@triton.jit
def signal_sources(
    expert, m, epoch, W, L, chunks, table_ptr, returned_ptr, returned_peers_ptr,
    BANKS: tl.constexpr, NVSHMEM: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The results of tile m of an expert are where they belong: say so to each source of its rows."""
    word = device.word(epoch, 0)
    for w in range(W):
        count, before, first_send = segment(table_ptr, W, W * L, w, expert)
        if in_tile(count, before, m, BM):
            index = (epoch % BANKS) * chunks + chunk_number(first_send, before, expert, m, BM)
            device.put_signal(returned_ptr, returned_peers_ptr, w, index, word, NVSHMEM)


@triton.jit
def wait_done(
    tile, i, rows, first_row, rank, W, L, D, table_ptr, origin_ptr, done_ptr, max_polls, report_ptr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """MERGE waits: until the results of a tile, rows i [BM] of its expert, are staged, and those of all rows
    that belong to a token whose last row is one of them. -> are they? and the most rows of such a token.

    From its last row the way leads from row to row before it, each in an earlier tile. origin: of this bank.
    """
    columns = tl.cast(tl.cdiv(D, BN), tl.int64)
    seen = device.wait(done_ptr + tile, columns, max_polls, report_ptr, rank, rank, WAIT_DONE, tile)
    here = seen >= columns
    row = first_row + i
    more = i < 0
    if here:
        more = tl.load(origin_ptr + row, mask=i < rows, other=0) < 0
    most = 0
    while here & (tl.max(more.to(tl.int32), 0) > 0):
        previous = previous_row(tl.load(origin_ptr + row, mask=more, other=0))
        more &= previous != row
        row = previous
        tiles = tile_of_row(row, rank, W, L, table_ptr, BM)
        here = device.wait_all(
            done_ptr + tiles, more, columns, max_polls, report_ptr, rank, i * 0 + rank, WAIT_DONE, tiles, BM
        )
        most += 1
    return here, most


@triton.jit
def place_of_tile(tile, rank, W, L, table_ptr):
    """-> of a tile here: its expert, which of its tiles it is, and the expert's rows and first row."""
    expert = rank * L + tl.load(tile_ptr(table_ptr, W, W * L) + tile)
    rows, first_row, first_tile = group(table_ptr, W, W * L, expert)
    return expert, tile - first_tile, rows, first_row


@triton.jit
def again(epoch, tile, W, L, R):
    """The same, `opaque`: what follows from them is computed anew behind a wait, not kept in registers."""
    return (
        device.opaque(epoch),
        device.opaque(tile),
        device.opaque(W),
        device.opaque(L),
        device.opaque(R),
    )


@triton.jit
def merge_tile(
    tile, epoch, rank, W, L, D, R, chunks, table_ptr, origin_ptr, stage_ptr, results_ptr, results_peers_ptr,
    returned_ptr, returned_peers_ptr, done_ptr, max_polls, report_ptr,
    BANKS: tl.constexpr, NVSHMEM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, i_m=None, i_row=None, i_column=None,
):  # fmt: skip
    """MERGE: of each token whose last row here lies in the tile return one row, the sum of all its rows here.

    Float32, from the last row to the first, rounded once; to the results of its source, at the last row.
    TILE_OUT has stored there what is a token's only row. Then the sources are told that the tile is done. If
    a tile is not finished in time nobody is told. A negative tile: nothing.
    Example: BM = 4, a token of PE 1 in rows 2 and 9, which it sent as its rows 4 and 11: MERGE of the tile of
    row 9 waits for that tile and tile 0, and stores stage[9] + stage[2] as results[11] of PE 1.
    """
    if i_m is None:
        i_m = tl.arange(0, BM)
        i_row = tl.arange(0, BT)
        i_column = tl.arange(0, BD)
    if tile >= 0:
        _, m, rows, first_row = place_of_tile(tile, rank, W, L, table_ptr)
        here, most = wait_done(
            tile, m * BM + i_m, rows, first_row, rank, W, L, D, table_ptr, origin_ptr + (epoch % BANKS) * R,
            done_ptr, max_polls, report_ptr, BM, BN,
        )  # fmt: skip
        if here:
            # Read again, not kept while waiting.
            epoch, tile, W, L, R = again(epoch, tile, W, L, R)
            origin_ptr += (epoch % BANKS) * R
            expert, m, rows, first_row = place_of_tile(tile, rank, W, L, table_ptr)
            end = tl.minimum(rows, (m + 1) * BM)
            if most > 1:
                for begin in range(m * BM, end, BT):
                    _merge_rows(
                        begin + i_row, end, most, expert, first_row, W, L, D, table_ptr, origin_ptr,
                        stage_ptr, results_ptr, results_peers_ptr, NVSHMEM, BD, i_column,
                    )  # fmt: skip
            if NVSHMEM:
                tl.debug_barrier()
                for w in range(W):
                    if tl.load(results_peers_ptr + w) == 0:
                        count, before, first_send = segment(table_ptr, W, W * L, w, expert)
                        for i in range(tl.maximum(before, m * BM), tl.minimum(before + count, end)):
                            if tl.load(origin_ptr + first_row + i) < 0:
                                target = tl.cast(first_send + i - before, tl.int64) * D
                                staged = tl.cast(first_row + i, tl.int64) * D
                                device.put_row(results_ptr + target, stage_ptr + staged, D, w, NVSHMEM)
            epoch, tile, W, L, _ = again(epoch, tile, W, L, R)
            expert, m, _, _ = place_of_tile(tile, rank, W, L, table_ptr)
            signal_sources(
                expert, m, epoch, W, L, chunks, table_ptr, returned_ptr, returned_peers_ptr, BANKS, NVSHMEM,
                BM,
            )  # fmt: skip


@triton.jit
def _merge_rows(
    i, end, most, expert, first_row, W, L, D, table_ptr, origin_ptr, stage_ptr, results_ptr,
    results_peers_ptr, NVSHMEM: tl.constexpr, BD: tl.constexpr, i_column,
):  # fmt: skip
    """Of rows i of an expert, up to `end`, those that are the last of several of a token: return the sums."""
    last = first_row + i
    origin = tl.load(origin_ptr + last, mask=i < end, other=0)
    several = (origin < 0) & (device.low_word(origin) != last)
    if tl.max(several.to(tl.int32), 0) > 0:
        p_row, _ = result_rows(
            expert, i, end, first_row, W, L, D, table_ptr, stage_ptr, results_ptr, results_peers_ptr, NVSHMEM
        )
        for d in range(0, D, BD):
            i_d = d + i_column
            m_d = i_d < D
            # [BT, BD]
            b_sum = tl.cast(i[:, None] * 0 + i_column[None, :] * 0, tl.float32)
            row, way, added = last, origin, several
            for _step in range(most):
                p = stage_ptr + row[:, None].to(tl.int64) * D + i_d[None, :]
                b_sum += tl.load(p, mask=added[:, None] & m_d[None, :], other=0.0).to(tl.float32)
                previous = previous_row(way)
                added &= previous != row
                row = previous
                way = tl.load(origin_ptr + row, mask=added, other=0)
            value = b_sum.to(results_ptr.dtype.element_ty)
            tl.store(p_row[:, None] + i_d[None, :], value, mask=several[:, None] & m_d[None, :])


@triton.jit
def poison_wgrad(
    dw_ptr, dbias_ptr, m0, n0, A, B, HAS_DBIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    i_column=None,
):  # fmt: skip
    """NaN into one tile of dw [A, B] and, where m0 == 0, of dbias [B]: rows of their sums did not come."""
    if i_column is None:
        i_column = tl.arange(0, BN)
    i_n = n0 + i_column
    nan = tl.cast(i_n, tl.float32) + float("nan")
    for i_m in range(m0, tl.minimum(m0 + BM, A)):
        row_ptr = dw_ptr + tl.cast(i_m, tl.int64) * B
        tl.store(row_ptr + i_n, nan.to(dw_ptr.dtype.element_ty), mask=i_n < B)
    if HAS_DBIAS:
        if m0 == 0:
            tl.store(dbias_ptr + i_n, nan.to(dbias_ptr.dtype.element_ty), mask=i_n < B)


@triton.jit
def reduce_block(
    block, epoch, rank, sound, W, L, D, T, K, chunks, table_ptr, results_ptr, dots_ptr, spoiled_ptr,
    returned_ptr, expert_ptr, row_ptr, weight_ptr, out_ptr, dweight_ptr, origin_stage_ptr, max_polls,
    report_ptr, BACKWARD: tl.constexpr, NVSHMEM: tl.constexpr, BANKS: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, DEDUP: tl.constexpr, i_row=None, i_column=None,
):  # fmt: skip
    """REDUCE: out[t] = sum over k, in order, of weight[t, k] * results[row[t, k]], float32.

    In a backward without the weights, and dweight[t, k] = dots[row[t, k]]. Dropped choices (row < 0) are
    zero, whatever the buffers hold. DEDUP: results are weighted, and of a token's rows on a PE only the last
    one has come back, the sum of all; PUT has left in origin_stage which one that is. NaN if the table is
    void (not `sound`), and then nothing is waited for, or if any wait of this PE failed: in this exchange or,
    before, in another one with these buffers (`spoiled`), since what comes too late for that pass lands among
    the results of a later one.
    """
    bank = epoch % BANKS
    word = device.word(epoch, 0)
    if i_row is None:
        i_row = tl.arange(0, BT)
        i_column = tl.arange(0, BD)
    t = block * BT + i_row
    m_t = t < T
    first_kept = tl.where(sound != 0, 0, 0x7FFFFFFF)
    for k in range(K):
        row = tl.load(row_ptr + t * K + k, mask=m_t, other=-1).to(tl.int32)
        kept = row >= first_kept
        expert = tl.load(expert_ptr + t * K + k, mask=kept, other=0).to(tl.int32)
        _, before, first_send = segment(table_ptr, W, W * L, rank, expert, kept)
        m = (before + row - first_send) // BM
        index = bank * chunks + chunk_number(first_send, before, expert, m, BM)
        device.wait_all(
            returned_ptr + index, kept, word, max_polls, report_ptr, rank, expert // L,
            WAIT_RESULTS, index, BT, NVSHMEM,
        )  # fmt: skip
    failed = device.failed(report_ptr)
    spoiled = tl.load(spoiled_ptr) != 0
    # A void pass has put nothing, so that nobody returns anything.
    if failed & (tl.load(table_ptr + VOID) == 0):
        tl.store(spoiled_ptr, 1)
    poison = tl.where(failed | (sound == 0) | spoiled, float("nan"), 0.0)
    if BACKWARD:
        for k in range(K):
            offset, m_kept = place_row(row_ptr, t * K + k, m_t, 1)
            dot = tl.load(dots_ptr + offset, mask=m_kept, other=0.0)
            tl.store(dweight_ptr + t * K + k, dot + poison, mask=m_t)
    for d in range(0, D, BD):
        i_d = d + i_column
        m_d = i_d < D
        # [BT, BD]
        b_sum = tl.cast(i_row[:, None] * 0 + i_column[None, :] * 0, tl.float32)
        for k in range(K):
            row, m_kept = place_row(row_ptr, t * K + k, m_t, 1)
            if DEDUP:
                m_kept &= tl.load(origin_stage_ptr + row, mask=m_kept, other=0) < 0
            b_sum = add_row(
                b_sum, results_ptr, weight_ptr, t * K + k, row * D, m_kept, i_d, m_d, not (BACKWARD or DEDUP)
            )
        out = (b_sum + poison).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + t[:, None].to(tl.int64) * D + i_d[None, :], out, mask=m_t[:, None] & m_d[None, :])
