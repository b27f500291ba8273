"""The bodies of the overlap kernel's tasks (`tasks.py` says what each waits for).

    W  PEs, L experts on each     C  capacity, in chunks of BM rows     K  choices per token
    T  tokens here                D  model width                        B  banks

With a `wire_ptr` what is put takes an emulated wire (`wire.py`): due times lie behind all words of `arrived`
and `returned`. Without one nothing of that is compiled.

Index arithmetic is 64 bits wide where rows are counted: W * L * C * D passes 2^31 soon.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels import device, wire
from lancet_kernels.kernels.choices import add_choice, dot_choice

# What a wait was for, in a report; the words are exchange.REPORTED's.
WAIT_RELEASE = tl.constexpr(0)
WAIT_ROWS = tl.constexpr(1)
WAIT_READY = tl.constexpr(2)
WAIT_RESULTS = tl.constexpr(3)


@triton.jit
def put_chunk(
    expert, chunk, epoch, rank, W, L, C, D, chunks,
    source_ptr, token_ptr, scale_ptr, count_ptr,
    stage_ptr, rows_ptr, rows_peers_ptr, arrived_ptr, arrived_peers_ptr, released_ptr,
    max_polls, report_ptr,
    BANKS: tl.constexpr, SCALED: tl.constexpr, NVSHMEM: tl.constexpr,
    BM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, wire_ptr=None,
):  # fmt: skip
    """PUT: send one chunk of the rows that go to `expert`, then signal it with their count.

    source [T, D]; token int32 [E, C], which row of source sits in each slot; scale float32 [E, C]; stage
    [E, C, D], symmetric memory through which rows go where no pointer reaches.
    The first chunk is always signalled, because it carries the count; an empty later one never. Into a bank
    that the peer has not released in time nothing is put. A count above C, which no gate gives, counts as C.
    Example: BM = 4, count = 6: chunk 0 sends slots 0..3, chunk 1 slots 4..5, chunk 2 nothing.
    """
    count = tl.minimum(tl.load(count_ptr + expert), C).to(tl.int32)
    start = chunk * BM
    if (chunk == 0) | (start < count):
        peer = expert // L
        bank = epoch % BANKS
        free = device.word(epoch - BANKS, tl.full((), 0, tl.int64))
        i_released = bank * W + peer
        seen = device.wait(
            released_ptr + i_released, free, max_polls, report_ptr, rank, peer, WAIT_RELEASE, i_released
        )
        if seen >= free:
            segment = (bank * W + rank) * L + expert % L
            slot = expert.to(tl.int64) * C + start
            end = tl.minimum(count - start, BM)
            if wire_ptr is not None:
                # The wire carries the first rows while the last ones are copied.
                due = wire.book(wire_ptr, peer, num_bytes(tl.maximum(end, 0), D, rows_ptr))
                index = due_index(segment * chunks + chunk, W, L, chunks, BANKS)
                wire.put_due(arrived_ptr, arrived_peers_ptr, peer, index, due)
            for r in range(0, end, ROWS):
                device.put_rows(
                    rows_ptr, rows_peers_ptr, peer, (segment * C + start + r) * D,
                    source_ptr, token_ptr + slot + r, scale_ptr + slot + r, tl.minimum(end - r, ROWS), D,
                    SCALED, NVSHMEM, ROWS, BLOCK, stage_ptr + (slot + r) * D,
                )  # fmt: skip
            word = device.word(epoch, count)
            device.put_signal(arrived_ptr, arrived_peers_ptr, peer, segment * chunks + chunk, word, NVSHMEM)


@triton.jit
def num_bytes(rows, columns, like_ptr):
    """Of a tile (int64) of the type that `like_ptr` points to."""
    return tl.cast(rows, tl.int64) * columns * (like_ptr.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def due_index(index, W, L, chunks, BANKS: tl.constexpr):
    """Where in `arrived` or `returned` is written when word `index` is due: behind all words."""
    return BANKS * W * L * chunks + index


@triton.jit
def wait_rows(
    source, local, m, epoch, rank, W, L, chunks, arrived_ptr, max_polls, report_ptr,
    NVSHMEM: tl.constexpr, TMA: tl.constexpr, BANKS: tl.constexpr, BM: tl.constexpr, wire_ptr=None,
):  # fmt: skip
    """Wait until chunk m of the source's rows for expert `local` is here. -> how many rows come in all.

    NVSHMEM, TMA: how the rows may have come, and how they will be read; both False for the count alone.

    -1 if they did not come in time: then the caller does nothing and signals nothing, so that the peer that
    waits for what it would have made runs out of time too, instead of taking what is not there.
    """
    index = (((epoch % BANKS) * W + source) * L + local) * chunks
    word = device.word(epoch, tl.full((), 0, tl.int64))
    due_ptr = None
    if wire_ptr is not None:
        due_ptr = arrived_ptr + due_index(index, W, L, chunks, BANKS)
    seen = device.wait(
        arrived_ptr + index, word, max_polls, report_ptr, rank, source, WAIT_ROWS, index, NVSHMEM,
        wire_ptr, due_ptr,
    )  # fmt: skip
    count = tl.where(seen >= word, device.low_word(seen), -1)
    if (m > 0) & (m * BM < count):
        if wire_ptr is not None:
            due_ptr += m
        seen = device.wait(
            arrived_ptr + index + m, word, max_polls, report_ptr, rank, source, WAIT_ROWS, index + m, NVSHMEM,
            wire_ptr, due_ptr,
        )  # fmt: skip
        count = tl.where(seen >= word, count, -1)
    device.fence_tma(TMA)
    return count


@triton.jit
def finish_ready(ready_ptr, segment, m, local, segments, chunks):
    """TILE_IN is done: one more tile of its chunk, and of its expert."""
    tl.debug_barrier()
    tl.atomic_add(ready_ptr + segment * chunks + m, 1, sem="release", scope="gpu")
    tl.atomic_add(ready_ptr + segments * chunks + local, 1, sem="release", scope="gpu")


@triton.jit
def wait_ready(segment, m, tiles, rank, chunks, ready_ptr, max_polls, report_ptr, TMA: tl.constexpr):
    """Wait until all tiles of the first GEMM of chunk m of a segment are done, by whichever program.

    -> whether they are.
    """
    index = segment * chunks + m
    expected = tl.full((), 0, tl.int64) + tiles
    seen = device.wait(ready_ptr + index, expected, max_polls, report_ptr, rank, rank, WAIT_READY, index)
    device.fence_tma(TMA)
    return seen >= expected


@triton.jit
def return_tile(
    source, local, m, n, count, epoch, rank, W, L, C, D, chunks, tiles,
    stage_ptr, results_ptr, results_peers_ptr, returned_ptr, returned_peers_ptr, done_ptr,
    BANKS: tl.constexpr, NVSHMEM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, wire_ptr=None,
):  # fmt: skip
    """TILE_OUT is stored at the peer, or in stage [W, L, C, D] where no pointer reaches it: the last signals.

    The programs that stored the other tiles of the chunk published them by the counter (release), the last
    one takes them in (acquire) and publishes all of them with the signal: release is cumulative.
    """
    bank = epoch % BANKS
    segment = source * L + local
    expert = rank * L + local
    tl.debug_barrier()
    if wire_ptr is not None:
        # Each tile takes the wire as it ends; the signal of all is due with the last of them.
        size = num_bytes(tl.minimum(count - m * BM, BM), tl.minimum(D - n * BN, BN), results_ptr)
        index = due_index((bank * W * L + expert) * chunks + m, W, L, chunks, BANKS)
        wire.put_due(returned_ptr, returned_peers_ptr, source, index, wire.book(wire_ptr, source, size))
    if NVSHMEM:
        if tl.load(results_peers_ptr + source) == 0:
            staged = (segment.to(tl.int64) * C + m * BM) * D + n * BN
            target = ((bank * W * L + expert) * C + m * BM) * D + n * BN
            width = tl.minimum(D - n * BN, BN)
            for r in range(tl.minimum(count - m * BM, BM)):
                device.put_row(
                    results_ptr + target + r * D, stage_ptr + staged + r * D, width, source, NVSHMEM
                )
            # Not a fence: the program that signals may be another one.
            device.quiet(NVSHMEM)
    done = tl.atomic_add(done_ptr + segment * chunks + m, 1, sem="acq_rel", scope="gpu")
    if done == tiles - 1:
        word = device.word(epoch, tl.full((), 0, tl.int64))
        index = (bank * W * L + expert) * chunks + m
        device.put_signal(returned_ptr, returned_peers_ptr, source, index, word, NVSHMEM)


@triton.jit
def wait_expert(
    local, epoch, rank, W, L, chunks, tiles, arrived_ptr, ready_ptr, max_polls, report_ptr,
    TMA: tl.constexpr, BANKS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Wait until the first GEMM of all rows of expert `local`, of all sources, is done (for its dW).

    -> whether it is; False also if the rows of a source did not come. Whoever finished the first GEMM has
    taken in what the network wrote, and published it.
    """
    expected = tl.full((), 0, tl.int64)
    missing = tl.full((), 0, tl.int32)
    for source in range(W):
        count = wait_rows(
            source, local, 0, epoch, rank, W, L, chunks, arrived_ptr, max_polls, report_ptr,
            False, False, BANKS, BM,
        )  # fmt: skip
        missing += (count < 0).to(tl.int32)
        expected += tl.cdiv(tl.maximum(count, 0), BM) * tiles
    index = W * L * chunks + local
    seen = device.wait(ready_ptr + index, expected, max_polls, report_ptr, rank, rank, WAIT_READY, index)
    device.fence_tma(TMA)
    return (missing == 0) & (seen >= expected)


@triton.jit
def poison_wgrad(
    dw_ptr, dbias_ptr, m0, n0, A, B, HAS_DBIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """NaN into one tile of dw [A, B] and, where m0 == 0, of dbias [B]: rows of their sums did not come."""
    i_n = n0 + tl.arange(0, BN)
    nan = tl.full([BN], float("nan"), tl.float32)
    for i_m in range(m0, tl.minimum(m0 + BM, A)):
        row_ptr = dw_ptr + tl.cast(i_m, tl.int64) * B
        tl.store(row_ptr + i_n, nan.to(dw_ptr.dtype.element_ty), mask=i_n < B)
    if HAS_DBIAS:
        if m0 == 0:
            tl.store(dbias_ptr + i_n, nan.to(dbias_ptr.dtype.element_ty), mask=i_n < B)


@triton.jit
def reduce_block(
    block, epoch, rank, W, L, C, D, chunks, T, K,
    results_ptr, returned_ptr, expert_ptr, slot_ptr, weight_ptr, out_ptr, max_polls, report_ptr,
    WEIGHTED: tl.constexpr, NVSHMEM: tl.constexpr, BANKS: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, wire_ptr=None,
):  # fmt: skip
    """REDUCE: out[t] = sum over k, in order, of weight[t, k] * results[expert[t, k], slot[t, k]], float32.

    Dropped choices (slot >= C) add zero, whatever the buffer holds. NaN if any wait of this PE failed.
    """
    bank = epoch % BANKS
    word = device.word(epoch, tl.full((), 0, tl.int64))
    t = block * BT + tl.arange(0, BT)
    m_t = t < T
    for k in range(K):
        expert = tl.load(expert_ptr + t * K + k, mask=m_t, other=0)
        slot = tl.load(slot_ptr + t * K + k, mask=m_t, other=C)
        index = (bank * W * L + expert) * chunks + slot // BM
        due_ptrs = None
        if wire_ptr is not None:
            due_ptrs = returned_ptr + due_index(index, W, L, chunks, BANKS)
        device.wait_all(
            returned_ptr + index, m_t & (slot < C), word, max_polls, report_ptr, rank, expert // L,
            WAIT_RESULTS, index, BT, NVSHMEM, wire_ptr, due_ptrs,
        )  # fmt: skip
    poison = tl.where(device.failed(report_ptr), float("nan"), 0.0)
    results_ptr += bank * W * L * C * D
    for d in range(0, D, BD):
        i_d = d + tl.arange(0, BD)
        m_d = i_d < D
        # [BT, BD]
        b_sum = tl.zeros([BT, BD], tl.float32)
        for k in range(K):
            b_sum = add_choice(
                b_sum, k, results_ptr, expert_ptr, slot_ptr, weight_ptr, t, m_t, i_d, m_d, C, D, K, WEIGHTED
            )
        out = (b_sum + poison).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + t[:, None].to(tl.int64) * D + i_d[None, :], out, mask=m_t[:, None] & m_d[None, :])


@triton.jit
def dweight_block(
    block, C, D, T, K, dy_ptr, results_ptr, expert_ptr, slot_ptr, dweight_ptr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """DWEIGHT: dweight[t, k] = dy[t] . results[expert[t, k], slot[t, k]] in float32; zero where dropped.

    results [E, C, D]: those of the forward pass, which its bank still holds.
    Example: BT = 8, block 1: tokens 8 to 15, all their choices.
    """
    t = block.to(tl.int64) * BT + tl.arange(0, BT)
    for k in range(K):
        dot_choice(k, dy_ptr, results_ptr, expert_ptr, slot_ptr, dweight_ptr, t, t < T, C, D, K, BT, BD)
