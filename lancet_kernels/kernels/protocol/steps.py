"""Waits, puts and signals of the tasks of the overlap kernels.

A Gluon kernel, which lays out its blocks itself, hands over the index ranges `i_*`; without them they are
made here. Index arithmetic is 64 bits wide where elements are counted: R * D passes 2^31 soon.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels.protocol import device, schedule
from lancet_kernels.kernels.protocol.device import WAIT_READY, WAIT_RELEASE, WAIT_ROWS

# Ready words that a look takes in, one for each thread of a warp.
READY_WORDS = tl.constexpr(32)
# Put tasks of a chunk; of a small one some have no rows.
PARTS = tl.constexpr(8)
# Which word of a pass counts claimed tasks; the Hopper kernel counts its claimed puts in another one.
CLAIMS = tl.constexpr(1)
PUT_CLAIMS = tl.constexpr(2)


@triton.jit
def claim(ptrs, WORD: tl.constexpr):
    """-> the number of a task, which nobody else gets."""
    return tl.atomic_add(ptrs.of_pass.words + WORD, 1, sem="relaxed", scope="gpu").to(tl.int32)


@triton.jit
def is_sound(ptrs):
    """-> 1, or 0: of a pass whose counts did not come, or did not fit, nothing is true."""
    fits = tl.load(ptrs.of_pass.table + schedule.VOID) == 0
    return ((device.failed(ptrs.of_pass.report) == 0) & fits).to(tl.int32)


@triton.jit
def expert_of_tile(tile, ptrs, sizes):
    """-> the expert of a tile here, and which of its tiles it is; the expert's rows and its first one."""
    local = tl.load(schedule.tile_ptr(ptrs.of_pass.table, sizes.W, sizes.W * sizes.L) + tile)
    expert = sizes.rank * sizes.L + local
    rows, first_row, first_tile = schedule.group(ptrs.of_pass.table, sizes.W, sizes.W * sizes.L, expert)
    return local, expert, tile - first_tile, rows, first_row


@triton.jit
def wait_free(peer, epoch, ptrs, sizes, const):
    """Wait until rows may be put to the peer. -> may they?

    In a backward: until it has released those of the one before. In a forward its counts said that they may.
    """
    if const.BACKWARD:
        free = device.word(epoch - 1, 0)
        p = ptrs.arrivals.released + peer
        seen = device.wait(
            p, free, sizes.timeout_us, ptrs.of_pass.report, sizes.rank, peer, WAIT_RELEASE, peer
        )
        return seen >= free
    else:
        return epoch > 0


@triton.jit
def base_of(ptrs, BACKWARD: tl.constexpr):
    """-> which of the rows received here the first one of this pass is."""
    if BACKWARD:
        return 0
    else:
        return tl.load(ptrs.of_pass.table + schedule.BASE)


@triton.jit
def chunk_rows(expert, m, part, ptrs, sizes, const):
    """-> begin, end, row, first_send, signal and parts of the rows of this PE for `expert` in its tile m.

    Those of the part are begin to end of those for the expert; i of these is first_send + i in the order of
    sending, and comes to row + i of the peer's rows. signal: the word of `arrived` of the whole chunk. parts:
    how many have rows.
    """
    table_ptr, experts = ptrs.of_pass.table, sizes.W * sizes.L
    count, before, first_send = schedule.segment(table_ptr, sizes.W, experts, sizes.rank, expert)
    _, row, first_tile = schedule.group(table_ptr, sizes.W, experts, expert)
    begin = tl.maximum(m * const.BM - before, 0)
    end = tl.minimum((m + 1) * const.BM - before, count)
    row += before
    if not const.BACKWARD:
        row += tl.load(schedule.base_ptr(table_ptr, sizes.W, experts) + expert // sizes.L)
    PART: tl.constexpr = (const.BM + PARTS - 1) // PARTS
    parts = tl.cdiv(end - begin, PART)
    begin += part * PART
    end = tl.minimum(begin + PART, end)
    return begin, end, row.to(tl.int64), first_send, (first_tile + m) * sizes.W + sizes.rank, parts


@triton.jit
def num_put_tasks(ptrs):
    return tl.load(ptrs.of_pass.table + schedule.NUM_PUTS) * PARTS


@triton.jit
def put_task(i, ptrs, sizes):
    """-> expert and tile of the chunk that the i-th put task of this PE is of, and which part of it."""
    p = schedule.tile_ptr(ptrs.of_pass.table, sizes.W, sizes.W * sizes.L) + sizes.tiles + i // PARTS
    return tl.load(p), tl.load(p + sizes.chunks), i % PARTS


@triton.jit
def finish_put(i, parts, signal, peer, epoch, ptrs, const):
    """PUT i is stored at the peer: the last part of its chunk signals, as in `return_tile`."""
    device.quiet(const.NVSHMEM)
    if tl.atomic_add(ptrs.of_pass.sent + i // PARTS, 1, sem="acq_rel", scope="gpu") == parts - 1:
        word = device.word(epoch, 0)
        device.put_signal(
            ptrs.arrivals.arrived, ptrs.arrivals.arrived_peers, peer, signal, word, const.NVSHMEM
        )


@triton.jit
def put_part(i, epoch, ptrs, sizes, const):
    """PUT i: send a part of a chunk, rows for one expert that lie in one tile, to their final place.

    In a backward the weight of each row goes with it. Where no pointer reaches the peer rows go through
    `stages`. Where the peer has not released rows in time nothing is put.
    Example: BM = 16, 5 rows from first_send = 4 on, behind 14 rows of other sources: parts have 2 rows. Of
    tile 0 part 0 has rows 4 and 5, which go to rows 14 and 15 of the expert; of tile 1 part 0 has 6 and 7.
    """
    expert, m, part = put_task(i, ptrs, sizes)
    peer = expert // sizes.L
    if wait_free(peer, epoch, ptrs, sizes, const):
        begin, end, row, first_send, signal, parts = chunk_rows(expert, m, part, ptrs, sizes, const)
        if begin < end:
            stage_ptr = ptrs.stages.rows if const.NVSHMEM else None
            for r in range(begin, end, const.PUT_ROWS):
                send = first_send + r
                device.put_rows(
                    ptrs.arrivals.rows, ptrs.arrivals.rows_peers, peer, row + r, ptrs.sending.rows,
                    ptrs.sending.token + send, tl.minimum(end - r, const.PUT_ROWS), sizes.D, stage_ptr,
                    send.to(tl.int64), const.NVSHMEM, const.PUT_ROWS, const.PUT_BLOCK,
                )  # fmt: skip
            if const.BACKWARD:
                device.put_words(
                    ptrs.arrivals.weights, ptrs.arrivals.weights_peers, peer, row + begin,
                    ptrs.sending.weights + first_send + begin, end - begin, const.NVSHMEM, const.BM,
                )  # fmt: skip
            finish_put(i, parts, signal, peer, epoch, ptrs, const)


@triton.jit
def wait_rows(tile, m, expert, epoch, ptrs, sizes, const, i_w=None):
    """Wait until all rows of the tile, which is tile m of its expert, are here. -> whether they are.

    If not, the caller signals nothing, so that a peer that waits for it runs out of time, too.
    """
    if i_w is None:
        i_w = tl.arange(0, const.BW)
    count, before, _ = schedule.segment(
        ptrs.of_pass.table, sizes.W, sizes.W * sizes.L, i_w, expert, i_w < sizes.W
    )
    index = tile * sizes.W + i_w
    word = device.word(epoch, 0)
    here = device.wait_all(
        ptrs.arrivals.arrived + index, schedule.in_tile(count, before, m, const.BM), word, sizes.timeout_us,
        ptrs.of_pass.report, sizes.rank, i_w, WAIT_ROWS, index, const.NVSHMEM,
    )  # fmt: skip
    device.fence_tma(const.TMA)
    return here


@triton.jit
def finish_ready(tile, ptrs):
    """TILE_IN is done: one more column of its tile."""
    tl.debug_barrier()
    tl.atomic_add(ptrs.of_pass.ready + tile, 1, sem="release", scope="gpu")


@triton.jit
def wait_ready(tile, columns, ptrs, sizes, const):
    """Wait until that many columns of a tile of the first GEMM are done, by any program. -> are they?"""
    expected = tl.cast(columns, tl.int64)
    seen = device.wait(
        ptrs.of_pass.ready + tile, expected, sizes.timeout_us, ptrs.of_pass.report, sizes.rank, sizes.rank,
        WAIT_READY, tile,
    )  # fmt: skip
    device.fence_tma(const.TMA)
    return seen >= expected


@triton.jit
def wait_expert(rows, first_tile, sound, ptrs, sizes, const, i_tile=None):
    """`wait_ready` for all tiles of an expert, 32 at a time. -> are they, in a `sound` pass?

    A word for each expert would cost each tile a second release; a look at 32 words is one load.
    Example: 9 rows, BM = 4, first_tile 2: tiles 2, 3 and 4.
    """
    if i_tile is None:
        i_tile = tl.arange(0, READY_WORDS)
    columns = tl.cast(tl.cdiv(sizes.F, const.BN_IN), tl.int64)
    here = sound != 0
    for first in range(0, tl.cdiv(rows, const.BM), READY_WORDS):
        if here:
            i = first + i_tile
            here = device.wait_all(
                ptrs.of_pass.ready + first_tile + i, i < tl.cdiv(rows, const.BM), columns, sizes.timeout_us,
                ptrs.of_pass.report, sizes.rank, i * 0 + sizes.rank, WAIT_READY, first_tile + i,
            )  # fmt: skip
    device.fence_tma(const.TMA)
    return here


@triton.jit
def _sources(expert, i, sizes, table_ptr):
    """-> of rows i of an expert: who sent them, and as which of its rows, int64.

    Example: that of `schedule`, expert 0 of PE 0, i = 0 to 3: PEs 0, 0, 1, 1 and rows 0, 1, 0, 1.
    """
    W, E = sizes.W, sizes.W * sizes.L
    source = i * 0
    for w in range(W):
        count, before, _ = schedule.segment(table_ptr, W, E, w, expert)
        source += (i >= before + count).to(tl.int32)
    source = tl.minimum(source, W - 1)
    _, before, first_send = schedule.segment(table_ptr, W, E, source, expert)
    return source, (first_send + i - before).to(tl.int64)


@triton.jit
def result_rows(expert, i, rows, first_row, ptrs, sizes, const):
    """-> where the results of rows i of an expert go, addresses at their sources, and which of them are.

    Where no pointer reaches the source: to the stage [R, D], at the place of the row here.
    """
    source, row = _sources(expert, i, sizes, ptrs.of_pass.table)
    stage_ptr = ptrs.stages.results if const.NVSHMEM else None
    p = device.stored_at(
        ptrs.returns.rows, ptrs.returns.rows_peers, source, row, stage_ptr, (first_row + i).to(tl.int64),
        sizes.D, const.NVSHMEM,
    )  # fmt: skip
    return p, i < rows


@triton.jit
def return_dots(expert, m, rows, first_row, ptrs, sizes, const, i_m=None):
    """Gradients of the rows' weights, to dots of their sources: sums of row_dots over column tiles, in order.

    row_dots [columns, R], of TILE_IN; in the order of sending at the source, in ours in the stage.
    """
    if i_m is None:
        i_m = tl.arange(0, const.BM)
    i = m * const.BM + i_m
    p_dot = ptrs.gemms.row_dots + first_row + i
    dot = tl.cast(i * 0, tl.float32)
    for n in range(tl.cdiv(sizes.F, const.BN_IN)):
        dot += tl.load(p_dot + tl.cast(n, tl.int64) * sizes.R, mask=i < rows, other=0.0)
    source, row = _sources(expert, i, sizes, ptrs.of_pass.table)
    stage_ptr = ptrs.stages.dots if const.NVSHMEM else None
    p = device.stored_at(
        ptrs.returns.dots, ptrs.returns.dots_peers, source, row, stage_ptr, (first_row + i).to(tl.int64), 1,
        const.NVSHMEM,
    )  # fmt: skip
    tl.store(p, dot, mask=i < rows)


@triton.jit
def _send_results(w, m, n, expert, first_row, ptrs, sizes, const):
    """Column n of tile m, in the stage of results where no pointer reaches source w: to its rows there."""
    D, n0 = sizes.D, n * const.BN
    count, before, first_send = schedule.segment(ptrs.of_pass.table, sizes.W, sizes.W * sizes.L, w, expert)
    begin = tl.maximum(before, m * const.BM)
    end = tl.minimum(before + count, (m + 1) * const.BM)
    for i in range(begin, end):
        device.send_stored(
            ptrs.returns.rows + tl.cast(first_send + i - before, tl.int64) * D + n0, ptrs.returns.rows_peers,
            w, ptrs.stages.results + tl.cast(first_row + i, tl.int64) * D + n0,
            tl.minimum(D - n0, const.BN), const.NVSHMEM,
        )  # fmt: skip
    if const.BACKWARD:
        if (n == 0) & (begin < end):
            device.send_stored(
                ptrs.returns.dots + first_send + begin - before, ptrs.returns.dots_peers, w,
                ptrs.stages.dots + first_row + begin, end - begin, const.NVSHMEM,
            )  # fmt: skip


@triton.jit
def return_tile(tile, m, n, expert, first_row, epoch, ptrs, sizes, const):
    """TILE_OUT is stored at the sources, or in the stage where no pointer reaches them: the last signals.

    The counter's release publishes the other columns, its acquire takes them in, and the signals publish all.
    """
    W, E, D = sizes.W, sizes.W * sizes.L, sizes.D
    columns = tl.cdiv(D, const.BN)
    tl.debug_barrier()
    if const.NVSHMEM:
        for w in range(W):
            _send_results(w, m, n, expert, first_row, ptrs, sizes, const)
    # Not a fence: the program that signals may be another one.
    device.quiet(const.NVSHMEM)
    done = tl.atomic_add(ptrs.of_pass.done + tile, 1, sem="acq_rel", scope="gpu")
    if done == columns - 1:
        word = device.word(epoch, 0)
        for w in range(W):
            count, before, first_send = schedule.segment(ptrs.of_pass.table, W, E, w, expert)
            if schedule.in_tile(count, before, m, const.BM):
                index = schedule.chunk_number(first_send, before, expert, m, const.BM)
                device.put_signal(
                    ptrs.returns.returned, ptrs.returns.returned_peers, w, index, word, const.NVSHMEM
                )


@triton.jit
def wgrad_operands(task, first_row, ptrs, sizes):
    """-> x [rows, A], dy [rows, B], A and B of a weight gradient x^T dy: dw2's or dw1's."""
    row = first_row.to(tl.int64)
    D, F, H = sizes.D, sizes.F, sizes.H
    x_ptr, dy_ptr = ptrs.gemms.activated + row * F, ptrs.arrivals.rows + row * D
    A, B = F, D
    if task.which == 1:
        base = base_of(ptrs, False)
        x_ptr, dy_ptr = ptrs.gradients.saved_rows + (base + row) * D, ptrs.gemms.hidden + row * H
        A, B = D, H
    return x_ptr, dy_ptr, A, B


@triton.jit
def wgrad_result(task, A, B, ptrs):
    """-> dw [A, B] of a local expert."""
    dw_ptr = ptrs.gradients.weight_in
    if task.which == 1:
        dw_ptr = ptrs.gradients.weight_out
    return dw_ptr + task.index.to(tl.int64) * A * B


@triton.jit
def bias_result(task, B, ptrs):
    """-> dbias [B] of a local expert."""
    db_ptr = ptrs.gradients.bias_in
    if task.which == 1:
        db_ptr = ptrs.gradients.bias_out
    return db_ptr + task.index * B


@triton.jit
def poison_wgrad(task, dw_ptr, A, B, ptrs, const):
    """NaN into one tile of dw [A, B] and, where m is 0, of its bias: rows of their sums did not come."""
    i_n = task.n * const.BN + tl.arange(0, const.BN)
    nan = tl.cast(i_n, tl.float32) + float("nan")
    for i_m in range(task.m * const.BM, tl.minimum(task.m * const.BM + const.BM, A)):
        row_ptr = dw_ptr + tl.cast(i_m, tl.int64) * B
        tl.store(row_ptr + i_n, nan.to(dw_ptr.dtype.element_ty), mask=i_n < B)
    if ptrs.gradients.bias_in is not None:
        if task.m == 0:
            tl.store(bias_result(task, B, ptrs) + i_n, nan.to(dw_ptr.dtype.element_ty), mask=i_n < B)
