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

from lancet_kernels.kernels.moe.choices import add_row, place_row
from lancet_kernels.kernels.protocol import device
from lancet_kernels.kernels.protocol.failure import (
    WAIT_READY,
    WAIT_RELEASE,
    WAIT_RESULTS,
    WAIT_ROWS,
)
from lancet_kernels.kernels.protocol.schedule import VOID, chunk_number, group, in_tile, segment


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
    BANKS: tl.constexpr, BACKWARD: tl.constexpr, NVSHMEM: tl.constexpr,
    BM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """PUT: send those rows for `expert` that lie in its tile m, to their final place, then signal them.

    source [T, D]; token int32 [S], which row of source each row to send is; stage [S, D], symmetric memory
    through which rows go where no pointer reaches. In a backward the weight of each row goes with it, from
    send_weights to row_weights [B, R], float32. Into a bank that the peer has not released in time nothing is
    put.
    Example: BM = 4, 3 rows from first_send = 4 on, behind 2 rows of other sources: with m = 0 rows 4 and 5 go
    to rows 2 and 3 of the expert, with m = 1 row 6 goes to row 4.
    """
    peer = expert // L
    if wait_free(peer, epoch, rank, W, released_ptr, max_polls, report_ptr, BANKS):
        begin, end, row, first_send, signal = chunk_rows(
            expert, m, epoch, rank, W, L, R, tiles, table_ptr, BANKS, BM
        )
        for r in range(begin, end, ROWS):
            device.put_rows(
                rows_ptr, rows_peers_ptr, peer, (row + r) * D, source_ptr, token_ptr + first_send + r,
                tl.minimum(end - r, ROWS), D, NVSHMEM, ROWS, BLOCK,
                stage_ptr + tl.cast(first_send + r, tl.int64) * D,
            )  # fmt: skip
        if BACKWARD:
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
    NVSHMEM: tl.constexpr,
):  # fmt: skip
    """-> where the results of rows i of an expert go, addresses at their sources, and which of them are.

    Where no pointer reaches the source: to stage [R, D], at the place of the row here.
    """
    source, row = _sources(expert, i, W, L, table_ptr)
    base = tl.load(results_peers_ptr + source)
    # Base and row are chosen one by one: of a choice between addresses the compiler does not see how they
    # are aligned, and stores element by element.
    if NVSHMEM:
        staged = base == 0
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
):  # fmt: skip
    """TILE_OUT is stored at the sources, or in stage [R, D] where no pointer reaches them: the last signals.

    The programs that stored the other columns of the tile published them by the counter (release), the last
    one takes them in (acquire) and publishes all of them with the signals: release is cumulative.
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
    if done == columns - 1:
        word = device.word(epoch, 0)
        for w in range(W):
            count, before, first_send = segment(table_ptr, W, E, w, expert)
            if in_tile(count, before, m, BM):
                index = (epoch % BANKS) * chunks + chunk_number(first_send, before, expert, m, BM)
                device.put_signal(returned_ptr, returned_peers_ptr, w, index, word, NVSHMEM)


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
    returned_ptr, expert_ptr, row_ptr, weight_ptr, out_ptr, dweight_ptr, max_polls, report_ptr,
    BACKWARD: tl.constexpr, NVSHMEM: tl.constexpr, BANKS: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, i_row=None, i_column=None,
):  # fmt: skip
    """REDUCE: out[t] = sum over k, in order, of weight[t, k] * results[row[t, k]], float32.

    In a backward without the weights, and dweight[t, k] = dots[row[t, k]]. Dropped choices (row < 0) are
    zero, whatever the buffers hold. NaN if the table is void (not `sound`), and then nothing is waited for,
    or if any wait of this PE failed: in this exchange or, before, in another one with these buffers
    (`spoiled`), since what comes too late for that pass lands among the results of a later one.
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
            b_sum = add_row(
                b_sum, results_ptr, weight_ptr, t * K + k, row * D, m_kept, i_d, m_d, not BACKWARD
            )
        out = (b_sum + poison).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + t[:, None].to(tl.int64) * D + i_d[None, :], out, mask=m_t[:, None] & m_d[None, :])
