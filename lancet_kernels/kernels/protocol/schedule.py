"""Positions of compact rows on every PE, and numbers of tasks, computed on the device from counts.

A row is one kept choice of one token. count[w, e] is how many rows PE w sends to expert e; every PE puts its
own to all others, and every offset on every PE is a prefix sum of them:

    side      order                                      a row of PE w for expert e, at slot i
    send      by expert, then slot                       first_send[w, e] + i
    receive   by local expert, then source, then slot    base + first_row[e] + before[w, e] + i

The rows of an expert are one group of the grouped GEMM, rows[e] long, cut into tiles of BM rows. A tile may
hold rows of several sources. Tiles are counted through on their PE, from first_tile[e]. What PE w sends into
one tile is a *chunk*: one put, one signal, and one signal for its results on the way back.

Example, W = 2, L = 3, BM = 4:

    count         e =  0  1  2 | 3  4  5          rows        5  6  0 |  5  2  3
        w = 0          2  5  0 | 1  0  3          first_row   0  5 11 |  0  5  7
        w = 1          3  1  0 | 4  2  0          first_tile  0  2  4 |  0  2  3
    before[1]          2  5  0 | 1  0  3          first_send[1] 0  3  4  4  8 10

PE 0 receives 11 rows in 4 tiles. Tile 0 is rows 0 to 3: two of PE 0 and two of PE 1. Tile 1 is row 4, of PE
1; so the three rows that PE 1 sends to expert 0 are two chunks. Tile 3 is rows 9 and 10: one of each source.

How rows are said to have arrived. One signal word for each (tile, source), holding the epoch; a tile looks at
those of the sources that the counts name, all at once. A counter for each tile could not say which PE is
missing, and would be off for ever after a single put that came twice or not at all.

Where a pass lies. The rows of a forward stay until its backward, so every PE keeps open passes in one region
of A rows, each as long as what came. A PE takes the largest gap between them, and says with its counts where
that begins (base) and how long it is (room). All rows of a backward lie from row 0 of their region on.

What does not fit. If the rows of any PE are more than its room, or than R, every PE sees that in the counts
before anything is put: the pass is *void*, its results are NaN, and the report says who needed how many rows.

Order of tasks, whose numbers programs claim (`hopper/kernel.py`: the Hopper kernel claims puts apart):

    [puts][independent GEMMs][tiles][weight gradients]

Puts are sorted by (local expert, tile) of where they go, and among equals by how far the peer is: rank + 1
first, the PE itself last. Each chunk is 8 puts of an eighth of a tile's rows, the last of which signals: so
132 programs that begin together have 17 chunks on their way and not 132. At D = 4096 in bfloat16 these are 17
MB, and the first arrive after 0.04 ms of NVLink's 450 GB/s; 132 MB would all arrive at its end, 0.3 ms. The
tiles of the two GEMMs take turns: the second one comes `lag` tiles behind the first.

Why one resident program per PE is enough. A put waits for releases of earlier passes only. As puts stand
first, those of all PEs come to an end, and with them all rows arrive. What a GEMM task waits for besides rows
is made by tasks with smaller numbers of its own PE: a tile of the second GEMM for its columns of the first
one, which are all claimed when its group is, at most 7 tiles further; the lag is 8 or more. So all tiles end,
and with them what `combine.py` waits for.

The table, int32, one for each pass; a backward uses that of its forward:

    header [8]   VOID, NUM_PUTS, NUM_TILES, BASE
    count [W, E]   before [W, E]   first_send [W, E]   rows [E]   first_row [E]   first_tile [E]
    base [W]   of every PE; BASE is that of this one
    tile_expert [tiles]   local expert of each tile here
    put_expert [chunks]   expert and tile (of its expert) of each put of this PE, in order
    put_tile [chunks]
"""

from __future__ import annotations

import triton
import triton.language as tl

from lancet_kernels.kernels.protocol import device
from lancet_kernels.kernels.protocol.device import TOO_MANY_ROWS, WAIT_COUNTS

# Tiles of an expert that a program of `schedule_kernel` numbers in one step.
TILES_AT_ONCE = 64
HEADER = tl.constexpr(8)
VOID = tl.constexpr(0)
NUM_PUTS = tl.constexpr(1)
NUM_TILES = tl.constexpr(2)
BASE = tl.constexpr(3)
# With its counts a PE sends base and room.
MORE_COUNTS = tl.constexpr(2)
# Counts of two passes: a PE puts those of the next pass only after the reader has finished the one before.
COUNT_BANKS = tl.constexpr(2)


def most_tiles(rows: int, local_experts: int, block_m: int) -> int:
    """Tiles that `rows` rows of `local_experts` experts can take at most."""
    return rows // block_m + local_experts


def most_chunks(rows: int, experts: int, block_m: int) -> int:
    """Chunks that `rows` rows to `experts` experts can be cut into at most."""
    return rows // block_m + 2 * experts


def table_words(world: int, experts: int, tiles: int, chunks: int) -> int:
    """Size of the table. Example: 2 PEs, 6 experts, 8 tiles, 14 chunks -> 8 + 36 + 18 + 2 + 8 + 28 = 100."""
    return HEADER.value + 3 * world * experts + 3 * experts + world + tiles + 2 * chunks


@triton.jit
def rows_ptr_of(table_ptr, W, E):
    """rows [E], followed by first_row [E] and first_tile [E]."""
    return table_ptr + (HEADER + 3 * W * E)


@triton.jit
def base_ptr(table_ptr, W, E):
    return table_ptr + (HEADER + 3 * W * E + 3 * E)


@triton.jit
def tile_ptr(table_ptr, W, E):
    """tile_expert, followed by put_expert and put_tile."""
    return base_ptr(table_ptr, W, E) + W


@triton.jit
def segment(table_ptr, W, E, w, e, mask=None):
    """-> count, before and first_send of the rows of source w for expert e; zeros where `mask` is False."""
    p = table_ptr + (HEADER + w * E + e)
    other = None if mask is None else 0
    count = tl.load(p, mask=mask, other=other)
    before = tl.load(p + W * E, mask=mask, other=other)
    first = tl.load(p + 2 * W * E, mask=mask, other=other)
    return count, before, first


@triton.jit
def group(table_ptr, W, E, e):
    """-> rows, first_row and first_tile of expert e on its PE."""
    p = rows_ptr_of(table_ptr, W, E) + e
    return tl.load(p), tl.load(p + E), tl.load(p + 2 * E)


@triton.jit
def in_tile(count, before, m, BM: tl.constexpr):
    """Are rows of this segment in tile m of their expert?

    Example: BM = 4, 3 rows behind 2 others: in tile 0 and tile 1.
    """
    return tl.maximum(before, m * BM) < tl.minimum(before + count, m * BM + BM)


@triton.jit
def chunk_number(first_send, before, e, m, BM: tl.constexpr):
    """The number of the chunk in tile m of expert e among those of its source; all are different.

    n rows touch at most n // BM + 2 tiles, the distance between the first numbers of consecutive experts.
    Example: BM = 4, first_send 3, before 5, e = 1: tiles 1 and 2 are chunks 2 and 3.
    """
    return first_send // BM + 2 * e + m - before // BM


@triton.jit
def _largest_gap(occupied_ptr, A, passes, BP: tl.constexpr):
    """-> begin and length of the largest gap between the rows of open passes; the first of equal ones.

    occupied [passes, 2]: begin and end of each, of which one at least is free, 0 and 0.
    Example: A = 10, rows 0 to 3 and 7 to 8 are occupied: 4 and 3.
    """
    i = tl.arange(0, BP)
    m = i < passes
    begin = tl.load(occupied_ptr + 2 * i, mask=m, other=0)
    end = tl.load(occupied_ptr + 2 * i + 1, mask=m, other=0)
    # Gaps begin at row 0, where the free ones are, or where another one ends; up to whatever begins next.
    behind = (begin[None, :] >= end[:, None]) & (end > begin)[None, :]
    gap = tl.min(tl.where(behind, begin[None, :], A), 1) - end
    gap = tl.where(m, gap, -1)
    room = tl.max(gap, 0)
    return tl.min(tl.where(gap == room, end, A), 0), room


@triton.jit(do_not_specialize=["rank", "W", "L", "R", "A", "passes", "place", "timeout_us"])
def exchange_counts_kernel(
    words_ptr, kept_ptr, counts_ptr, counts_peers_ptr, counted_ptr, counted_peers_ptr, occupied_ptr,
    table_ptr, report_ptr, rank, W, L, R, A, passes, place, timeout_us,
    NVSHMEM: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BW: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Put this PE's counts to all others, wait for theirs, and make the offsets of everybody's rows.

    Grid: (1,): it puts before it waits. Shapes: kept int64 [E], rows for each expert; counts int32
    [2, W, E + 2] and counted [2, W], symmetric; occupied int32 [passes, 2], rows of open passes, of this one
    at `place`. Writes the table from its header to base.
    Work: 4 E bytes to each peer, and W scans of E numbers, of several PEs at once.
    Example: that of the module; PE 1 puts [3, 1, 0, 4, 2, 0, base, room] into counts[epoch % 2, 1] of PE 0.

    A peer has read the counts of epoch e - 2 when it sends those of e - 1, which were waited for here; that
    these came in time is the report. And what a peer says of epoch e it says behind all that it did before,
    so that rows may go where it has room.
    """
    epoch = tl.load(words_ptr)
    bank = epoch % COUNT_BANKS
    E = W * L
    words = E + MORE_COUNTS
    i_e = tl.arange(0, BE)
    own = (bank * W + rank) * words
    base, room = _largest_gap(occupied_ptr, A, passes, BP)
    b_own = tl.load(kept_ptr + i_e, mask=i_e < E, other=0).to(tl.int32)
    b_own = tl.where(i_e == E, base, tl.where(i_e == E + 1, tl.minimum(room, R), b_own))
    tl.store(counts_ptr + own + i_e, b_own, mask=i_e < words)
    if device.failed(report_ptr) == 0:
        word = device.word(epoch, tl.full((), 0, tl.int64))
        for step in range(1, W):
            peer = (rank + step) % W
            device.put_values(
                counts_ptr, counts_peers_ptr, peer, own, b_own, i_e, words, counts_ptr + own, NVSHMEM
            )
        # Behind all of them: a release waits some 1 us for what is on its way, and the next for nothing more.
        for step in range(1, W):
            peer = (rank + step) % W
            device.put_signal(counted_ptr, counted_peers_ptr, peer, bank * W + rank, word, NVSHMEM)
        i_w = tl.arange(0, BW)
        m_w = (i_w < W) & (i_w != rank)
        i_counted = bank * W + i_w
        device.wait_all(
            counted_ptr + i_counted, m_w, word, timeout_us, report_ptr, rank, i_w, WAIT_COUNTS, i_counted,
            NVSHMEM,
        )  # fmt: skip
    if device.failed(report_ptr):
        tl.store(table_ptr + VOID, 1)
    else:
        rows = _offsets(counts_ptr + bank * W * words, table_ptr, report_ptr, rank, W, L, BM, BE, BW)
        # No rows are nowhere: a begin among rows of a later pass would look like a gap behind it.
        tl.store(occupied_ptr + 2 * place, tl.where(rows > 0, base, 0))
        tl.store(occupied_ptr + 2 * place + 1, tl.where(rows > 0, base + rows, 0))
    # The network may still read the counts, which a later pass through the bank overwrites.
    device.quiet(NVSHMEM)


@triton.jit
def _offsets(
    counts_ptr, table_ptr, report_ptr, rank, W, L, BM: tl.constexpr, BE: tl.constexpr, BW: tl.constexpr
):  # fmt: skip
    """The table up to base, from counts [W, E + 2]. Void, and reported, if a PE has no room. -> rows here."""
    E = W * L
    words = E + MORE_COUNTS
    i_e = tl.arange(0, BE)
    m_e = i_e < E
    b_rows = tl.zeros([BE], tl.int32)
    num_puts = 0
    # [PES, BE] at once, 16 numbers in each of 256 threads: step by step each PE would cost a look at memory.
    PES: tl.constexpr = max(1, min(BW, 4096 // BE))
    for first in range(0, W, PES):
        i_w = first + tl.arange(0, PES)
        m = (i_w < W)[:, None] & m_e[None, :]
        b_count = tl.load(counts_ptr + i_w[:, None] * words + i_e[None, :], mask=m, other=0)
        b_before = b_rows[None, :] + tl.cumsum(b_count, 0) - b_count
        p = table_ptr + (HEADER + i_w[:, None] * E + i_e[None, :])
        tl.store(p, b_count, mask=m)
        tl.store(p + W * E, b_before, mask=m)
        tl.store(p + 2 * W * E, tl.cumsum(b_count, 1) - b_count, mask=m)
        b_base = tl.load(counts_ptr + i_w * words + E, mask=i_w < W)
        tl.store(base_ptr(table_ptr, W, E) + i_w, b_base, mask=i_w < W)
        b_chunks = _num_chunks(b_count, b_before, BM)
        num_puts += tl.sum(tl.sum(tl.where((i_w == rank)[:, None], b_chunks, 0), 1), 0)
        b_rows += tl.sum(b_count, 0)
    p = rows_ptr_of(table_ptr, W, E) + i_e
    b_tiles = tl.cdiv(b_rows, BM)
    tl.store(p, b_rows, mask=m_e)
    row = tl.cumsum(b_rows, 0) - b_rows
    tile = tl.cumsum(b_tiles, 0) - b_tiles
    tl.store(p + E, row, mask=m_e)
    tl.store(p + 2 * E, tile, mask=m_e)
    # Counted on from the first expert of each PE: that one's values lie in another thread.
    tl.debug_barrier()
    p_first = rows_ptr_of(table_ptr, W, E) + i_e // L * L
    row -= tl.load(p_first + E, mask=m_e, other=0)
    tile -= tl.load(p_first + 2 * E, mask=m_e, other=0)
    tl.debug_barrier()
    tl.store(p + E, row, mask=m_e)
    tl.store(p + 2 * E, tile, mask=m_e)
    b_room = tl.load(counts_ptr + i_e // L * words + E + 1, mask=m_e, other=0)
    b_lacking = tl.where(m_e, row + b_rows - b_room, 0)
    lacking = tl.max(b_lacking, 0)
    b_here = (i_e // L == rank) & m_e
    rows = tl.where(lacking > 0, 0, tl.sum(tl.where(b_here, b_rows, 0), 0))
    tl.store(table_ptr + NUM_PUTS, tl.where(lacking > 0, 0, num_puts))
    tl.store(table_ptr + NUM_TILES, tl.where(lacking > 0, 0, tl.sum(tl.where(b_here, b_tiles, 0), 0)))
    tl.store(table_ptr + BASE, tl.load(counts_ptr + rank * words + E))
    if lacking > 0:
        tl.store(table_ptr + VOID, 1)
        peer = tl.argmax(b_lacking, 0) // L
        room = tl.load(counts_ptr + peer * words + E + 1)
        device.report_failure(
            report_ptr, rank, peer, TOO_MANY_ROWS, 0, (room + lacking).to(tl.int64), room.to(tl.int64)
        )
    return rows


@triton.jit
def _num_chunks(count, before, BM: tl.constexpr):
    """Tiles that `count` rows behind `before` others touch. Example: BM = 4: 3 behind 2 -> 2; 0 -> 0."""
    return tl.where(count > 0, (before + count - 1) // BM - before // BM + 1, 0)


@triton.jit(do_not_specialize=["rank", "W", "L", "tiles", "chunks"])
def schedule_kernel(
    table_ptr, rank, W, L, tiles, chunks,
    BM: tl.constexpr, BE: tl.constexpr, BW: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Number the tiles here and the puts of this PE: tile_expert, put_expert, put_tile.

    Grid: (L,). Program l owns the tiles of local expert l, and the puts to local expert l of every PE.
    tiles, chunks: room for that many in the table. A void table is left as it is.
    Work: (W + 1) words for each tile.
    Example: that of the module, PE 1: its puts are (3, 0) of its own expert 0 behind (0, 0), both of key (0,
    0); then (0, 1), (3, 1) of key (0, 1); (1, 1) of key (1, 1), behind (4, 0) of key (1, 0).
    So put_expert = [0, 3, 0, 3, 4, 1] and put_tile = [0, 0, 1, 1, 0, 1].
    """
    if tl.load(table_ptr + VOID) == 0:
        local = tl.program_id(0)
        E = W * L
        i_e = tl.arange(0, BE)
        b_count, b_before, _ = segment(table_ptr, W, E, rank, i_e, i_e < E)
        first_put = tl.sum(tl.where(i_e % L < local, _num_chunks(b_count, b_before, BM), 0), 0)
        i_w = tl.arange(0, BW)
        b_count, b_before, _ = segment(table_ptr, W, E, rank, i_w * L + local, i_w < W)
        b_first = b_before // BM
        b_end = b_first + _num_chunks(b_count, b_before, BM)
        rows, _, first_tile = group(table_ptr, W, E, rank * L + local)
        own_tiles = tl.cdiv(rows, BM)
        p_tile = tile_ptr(table_ptr, W, E)
        p_put = p_tile + tiles
        for m0 in range(0, tl.maximum(own_tiles, tl.max(b_end, 0)), BT):
            m = m0 + tl.arange(0, BT)
            # Puts to this expert, of any PE, with a tile before m; then those of tile m, peer after peer.
            passed = tl.minimum(m[:, None], b_end[None, :]) - tl.minimum(m[:, None], b_first[None, :])
            number = first_put + tl.sum(passed, 1)
            for step in range(1, W + 1):
                e = (rank + step) % W * L + local
                count, before, _ = segment(table_ptr, W, E, rank, e)
                here = in_tile(count, before, m, BM)
                tl.store(p_put + number, tl.zeros([BT], tl.int32) + e, mask=here)
                tl.store(p_put + chunks + number, m, mask=here)
                number += here.to(tl.int32)
            m_own = m < own_tiles
            tl.store(p_tile + first_tile + m, tl.zeros([BT], tl.int32) + local, mask=m_own)
