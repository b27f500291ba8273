"""What the tasks of the overlap kernels wait for, put and signal.

`tasks.py` says what each waits for, `schedule.py` where rows lie, `arguments.py` what is handed on.

A Gluon kernel, which lays out its blocks itself, hands over the index ranges `i_*`; without them they are
made here.

Index arithmetic is 64 bits wide where elements are counted: R * D passes 2^31 soon.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels.protocol import device, nvshmem_device, schedule
from lancet_kernels.kernels.protocol.device import WAIT_READY, WAIT_RELEASE, WAIT_ROWS

# Ready words that a look takes in, one for each thread of a warp.
READY_WORDS = tl.constexpr(32)
# Put tasks of a chunk; of a small one some have no rows.
PARTS = tl.constexpr(8)


@triton.jit
def expert_of_tile(tile, of_pass, sizes):
    """-> the expert of a tile here, and which of its tiles it is; the expert's rows and its first one."""
    local = tl.load(schedule.tile_ptr(of_pass.table, sizes.W, sizes.W * sizes.L) + tile)
    expert = sizes.rank * sizes.L + local
    rows, first_row, first_tile = schedule.group(of_pass.table, sizes.W, sizes.W * sizes.L, expert)
    return local, expert, tile - first_tile, rows, first_row


@triton.jit
def wait_free(peer, epoch, sizes, of_pass, released_ptr, BACKWARD: tl.constexpr):
    """Wait until rows may be put to the peer. -> may they?

    In a backward: until it has released those of the one before. In a forward they may: its counts of this
    pass are here, behind all that it did before, and say where it has room.
    """
    if BACKWARD:
        free = device.word(epoch - 1, 0)
        seen = device.wait(
            released_ptr + peer, free, sizes.timeout_us, of_pass.report, sizes.rank, peer, WAIT_RELEASE, peer
        )
        return seen >= free
    else:
        return epoch > 0


@triton.jit
def base_of(of_pass, BACKWARD: tl.constexpr):
    """-> which of the rows received here the first one of this pass is."""
    if BACKWARD:
        return 0
    else:
        return tl.load(of_pass.table + schedule.BASE)


@triton.jit
def chunk_rows(expert, m, part, sizes, table_ptr, BACKWARD: tl.constexpr, BM: tl.constexpr):
    """-> begin, end, row, first_send, signal and parts of the rows of this PE for `expert` in its tile m.

    Those of the part are begin to end of those for the expert; i of these is first_send + i in the order of
    sending, and comes to row + i of the peer's rows. signal: the word of `arrived` of the whole chunk. parts:
    how many have rows.
    """
    experts = sizes.W * sizes.L
    count, before, first_send = schedule.segment(table_ptr, sizes.W, experts, sizes.rank, expert)
    _, row, first_tile = schedule.group(table_ptr, sizes.W, experts, expert)
    begin = tl.maximum(m * BM - before, 0)
    end = tl.minimum((m + 1) * BM - before, count)
    row += before
    if not BACKWARD:
        row += tl.load(schedule.base_ptr(table_ptr, sizes.W, experts) + expert // sizes.L)
    PART: tl.constexpr = (BM + PARTS - 1) // PARTS
    parts = tl.cdiv(end - begin, PART)
    begin += part * PART
    end = tl.minimum(begin + PART, end)
    return begin, end, row.to(tl.int64), first_send, (first_tile + m) * sizes.W + sizes.rank, parts


@triton.jit
def num_put_tasks(of_pass):
    return tl.load(of_pass.table + schedule.NUM_PUTS) * PARTS


@triton.jit
def put_task(i, of_pass, sizes):
    """-> expert and tile of the chunk that the i-th put task of this PE is of, and which part of it."""
    p = schedule.tile_ptr(of_pass.table, sizes.W, sizes.W * sizes.L) + sizes.tiles + i // PARTS
    return tl.load(p), tl.load(p + sizes.chunks), i % PARTS


@triton.jit
def finish_put(i, parts, signal, peer, epoch, of_pass, arrivals, NVSHMEM: tl.constexpr):
    """PUT i is stored at the peer: the last part of its chunk signals, as in `return_tile`."""
    device.quiet(NVSHMEM)
    if tl.atomic_add(of_pass.sent + i // PARTS, 1, sem="acq_rel", scope="gpu") == parts - 1:
        word = device.word(epoch, 0)
        device.put_signal(arrivals.arrived, arrivals.arrived_peers, peer, signal, word, NVSHMEM)


@triton.jit
def put_part(
    i, epoch, of_pass, sizes, sending, arrivals, stages,
    BACKWARD: tl.constexpr, NVSHMEM: tl.constexpr, BM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """PUT i: send a part of a chunk, rows for one expert that lie in one tile, to their final place.

    In a backward the weight of each row goes with it. Where no pointer reaches the peer rows go through
    `stages`. Where the peer has not released rows in time nothing is put.
    Example: BM = 16, 5 rows from first_send = 4 on, behind 14 rows of other sources: parts have 2 rows. Of
    tile 0 part 0 has rows 4 and 5, which go to rows 14 and 15 of the expert; of tile 1 part 0 has 6 and 7.
    """
    expert, m, part = put_task(i, of_pass, sizes)
    peer = expert // sizes.L
    D = sizes.D
    if wait_free(peer, epoch, sizes, of_pass, arrivals.released, BACKWARD):
        begin, end, row, first_send, signal, parts = chunk_rows(
            expert, m, part, sizes, of_pass.table, BACKWARD, BM
        )
        if begin < end:
            for r in range(begin, end, ROWS):
                stage_ptr = None
                if NVSHMEM:
                    stage_ptr = stages.rows + tl.cast(first_send + r, tl.int64) * D
                device.put_rows(
                    arrivals.rows, arrivals.rows_peers, peer, (row + r) * D, sending.rows,
                    sending.token + first_send + r, tl.minimum(end - r, ROWS), D, NVSHMEM, ROWS, BLOCK,
                    stage_ptr,
                )  # fmt: skip
            if BACKWARD:
                device.put_words(
                    arrivals.weights, arrivals.weights_peers, peer, row + begin,
                    sending.weights + first_send + begin, end - begin, NVSHMEM, BM,
                )  # fmt: skip
            finish_put(i, parts, signal, peer, epoch, of_pass, arrivals, NVSHMEM)


@triton.jit
def wait_rows(
    tile, m, expert, epoch, of_pass, sizes, arrived_ptr, NVSHMEM: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BW: tl.constexpr, i_w=None,
):  # fmt: skip
    """Wait until all rows of the tile, which is tile m of its expert, are here. -> whether they are.

    If not, the caller does nothing and signals nothing, so that a peer that waits for what it would have made
    runs out of time too, instead of taking what is not there.
    """
    if i_w is None:
        i_w = tl.arange(0, BW)
    count, before, _ = schedule.segment(of_pass.table, sizes.W, sizes.W * sizes.L, i_w, expert, i_w < sizes.W)
    index = tile * sizes.W + i_w
    word = device.word(epoch, 0)
    here = device.wait_all(
        arrived_ptr + index, schedule.in_tile(count, before, m, BM), word, sizes.timeout_us, of_pass.report,
        sizes.rank, i_w, WAIT_ROWS, index, NVSHMEM,
    )  # fmt: skip
    device.fence_tma(TMA)
    return here


@triton.jit
def finish_ready(tile, of_pass):
    """TILE_IN is done: one more column of its tile."""
    tl.debug_barrier()
    tl.atomic_add(of_pass.ready + tile, 1, sem="release", scope="gpu")


@triton.jit
def wait_ready(tile, columns, of_pass, sizes, TMA: tl.constexpr):
    """Wait until that many columns of a tile of the first GEMM are done, by whichever program. -> are they?

    Whoever finished the first GEMM has taken in what the network wrote, and published it.
    """
    expected = tl.cast(columns, tl.int64)
    seen = device.wait(
        of_pass.ready + tile, expected, sizes.timeout_us, of_pass.report, sizes.rank, sizes.rank, WAIT_READY,
        tile,
    )  # fmt: skip
    device.fence_tma(TMA)
    return seen >= expected


@triton.jit
def wait_expert(rows, first_tile, sound, of_pass, sizes, blocks, TMA: tl.constexpr, i_tile=None):
    """`wait_ready` for all tiles of an expert, 32 at a time. -> are they, in a `sound` pass?

    A word for each expert would save these looks, and cost each tile a second release; by the time that
    weight gradients are claimed nearly all tiles are done, and a look at 32 words is one load.
    Example: 9 rows, BM = 4, first_tile 2: tiles 2, 3 and 4.
    """
    if i_tile is None:
        i_tile = tl.arange(0, READY_WORDS)
    columns = tl.cast(tl.cdiv(sizes.F, blocks.BN_IN), tl.int64)
    here = sound != 0
    for first in range(0, tl.cdiv(rows, blocks.BM), READY_WORDS):
        if here:
            i = first + i_tile
            here = device.wait_all(
                of_pass.ready + first_tile + i, i < tl.cdiv(rows, blocks.BM), columns, sizes.timeout_us,
                of_pass.report, sizes.rank, i * 0 + sizes.rank, WAIT_READY, first_tile + i,
            )  # fmt: skip
    device.fence_tma(TMA)
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
def result_rows(expert, i, rows, first_row, of_pass, sizes, returns, stages, NVSHMEM: tl.constexpr):
    """-> where the results of rows i of an expert go, addresses at their sources, and which of them are.

    Where no pointer reaches the source: to the stage [R, D], at the place of the row here.
    """
    source, row = _sources(expert, i, sizes, of_pass.table)
    base = tl.load(returns.rows_peers + source)
    # Base and row are chosen one by one: of a choice between addresses the compiler does not see how they
    # are aligned, and stores element by element.
    if NVSHMEM:
        staged = base == 0
        base = tl.where(staged, stages.results.to(tl.int64), base)
        row = tl.where(staged, (first_row + i).to(tl.int64), row)
    p = tl.multiple_of(base.to(returns.rows.dtype), [16]) + row * sizes.D
    return p, i < rows


@triton.jit
def return_dots(
    expert, m, rows, first_row, columns, of_pass, sizes, row_dots_ptr, returns, stages,
    NVSHMEM: tl.constexpr, BM: tl.constexpr, i_m=None,
):  # fmt: skip
    """Gradients of the rows' weights, to dots of their sources: sums of row_dots over column tiles, in order.

    row_dots [columns, R], of TILE_IN; in the order of sending at the source, in ours in the stage.
    """
    if i_m is None:
        i_m = tl.arange(0, BM)
    i = m * BM + i_m
    p_dot = row_dots_ptr + first_row + i
    dot = tl.cast(i * 0, tl.float32)
    for n in range(columns):
        dot += tl.load(p_dot + tl.cast(n, tl.int64) * sizes.R, mask=i < rows, other=0.0)
    source, row = _sources(expert, i, sizes, of_pass.table)
    base = tl.load(returns.dots_peers + source)
    p = base.to(returns.dots.dtype) + row
    if NVSHMEM:
        p = tl.where(base == 0, stages.dots + first_row + i, p)
    tl.store(p, dot, mask=i < rows)


@triton.jit
def return_tile(
    tile, m, n, expert, first_row, epoch, of_pass, sizes, returns, stages, BACKWARD: tl.constexpr,
    NVSHMEM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """TILE_OUT is stored at the sources, or in the stage where no pointer reaches them: the last signals.

    The programs that stored the other columns of the tile published them by the counter (release), the last
    one takes them in (acquire) and publishes all of them with the signals: release is cumulative.
    """
    W, E, D = sizes.W, sizes.W * sizes.L, sizes.D
    columns = tl.cdiv(D, BN)
    tl.debug_barrier()
    if NVSHMEM:
        width = tl.minimum(D - n * BN, BN)
        for w in range(W):
            count, before, first_send = schedule.segment(of_pass.table, W, E, w, expert)
            if tl.load(returns.rows_peers + w) == 0:
                begin = tl.maximum(before, m * BM)
                end = tl.minimum(before + count, (m + 1) * BM)
                for i in range(begin, end):
                    target = tl.cast(first_send + i - before, tl.int64) * D + n * BN
                    staged = tl.cast(first_row + i, tl.int64) * D + n * BN
                    nvshmem_device.put_row(returns.rows + target, stages.results + staged, width, w)
                if BACKWARD:
                    if (n == 0) & (begin < end):
                        nvshmem_device.put_row(
                            returns.dots + first_send + begin - before, stages.dots + first_row + begin,
                            end - begin, w,
                        )  # fmt: skip
    # Not a fence: the program that signals may be another one.
    device.quiet(NVSHMEM)
    done = tl.atomic_add(of_pass.done + tile, 1, sem="acq_rel", scope="gpu")
    if done == columns - 1:
        word = device.word(epoch, 0)
        for w in range(W):
            count, before, first_send = schedule.segment(of_pass.table, W, E, w, expert)
            if schedule.in_tile(count, before, m, BM):
                index = schedule.chunk_number(first_send, before, expert, m, BM)
                device.put_signal(returns.returned, returns.returned_peers, w, index, word, NVSHMEM)


@triton.jit
def wgrad_operands(task, first_row, of_pass, sizes, arrivals, gemms, gradients):
    """-> x [rows, A], dy [rows, B], A and B of a weight gradient x^T dy: dw2's or dw1's."""
    row = first_row.to(tl.int64)
    D, F, H = sizes.D, sizes.F, sizes.H
    x_ptr, dy_ptr = gemms.activated + row * F, arrivals.rows + row * D
    A, B = F, D
    if task.which == 1:
        base = base_of(of_pass, False)
        x_ptr, dy_ptr = gradients.saved_rows + (base + row) * D, gemms.hidden + row * H
        A, B = D, H
    return x_ptr, dy_ptr, A, B


@triton.jit
def wgrad_result(task, A, B, gradients):
    """-> dw [A, B] of a local expert."""
    dw_ptr = gradients.weight_in
    if task.which == 1:
        dw_ptr = gradients.weight_out
    return dw_ptr + task.index.to(tl.int64) * A * B


@triton.jit
def bias_result(task, B, gradients):
    """-> dbias [B] of a local expert."""
    db_ptr = gradients.bias_in
    if task.which == 1:
        db_ptr = gradients.bias_out
    return db_ptr + task.index * B


@triton.jit
def poison_wgrad(task, dw_ptr, A, B, gradients, BM: tl.constexpr, BN: tl.constexpr, i_column=None):
    """NaN into one tile of dw [A, B] and, where m is 0, of its bias: rows of their sums did not come."""
    if i_column is None:
        i_column = tl.arange(0, BN)
    i_n = task.n * BN + i_column
    nan = tl.cast(i_n, tl.float32) + float("nan")
    for i_m in range(task.m * BM, tl.minimum(task.m * BM + BM, A)):
        row_ptr = dw_ptr + tl.cast(i_m, tl.int64) * B
        tl.store(row_ptr + i_n, nan.to(dw_ptr.dtype.element_ty), mask=i_n < B)
    if gradients.bias_in is not None:
        if task.m == 0:
            tl.store(bias_result(task, B, gradients) + i_n, nan.to(dw_ptr.dtype.element_ty), mask=i_n < B)
