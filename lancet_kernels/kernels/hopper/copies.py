"""The copy warps of the Hopper kernel: puts.

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
from lancet_kernels.kernels.protocol.device import opaque, opaque_sizes
from lancet_kernels.kernels.protocol.steps import chunk_rows, finish_put, put_task, wait_free


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
def _put_part(
    i, epoch, of_pass, sizes, sending, arrivals, ring, BACKWARD: gl.constexpr, BM: gl.constexpr,
    SLOTS: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, WIDE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """PUT i, as `put_part` does it, through the ring."""
    expert, m, part = put_task(i, of_pass, sizes)
    peer = expert // sizes.L
    if wait_free(peer, epoch, sizes, of_pass, arrivals.released, BACKWARD):
        # Read again, not kept while waiting.
        sizes = opaque_sizes(sizes)
        i, epoch, expert = opaque(i), opaque(epoch), opaque(expert)
        peer = expert // sizes.L
        begin, end, row, first_send, signal, parts = chunk_rows(
            expert, m, part, sizes, of_pass.table, BACKWARD, BM
        )
        if begin < end:
            send = first_send + begin
            _put_rows(
                device.remote_pointer(arrivals.rows, arrivals.rows_peers, peer) + (row + begin) * sizes.D,
                sending.rows, sending.token + send, end - begin, sizes.D, ring, SLOTS, ROWS, BLOCK, WIDE,
            )  # fmt: skip
            if BACKWARD:
                device.put_words(
                    arrivals.weights, arrivals.weights_peers, peer, row + begin, sending.weights + send,
                    end - begin, False, BM, gl.arange(0, BM, gl.BlockedLayout([1], [32], [WARPS], [0])),
                )  # fmt: skip
            finish_put(i, parts, signal, peer, epoch, of_pass, arrivals, False)


@gluon.jit
def copy(
    of_pass, sizes, sending, arrivals, num_puts, ring, BACKWARD: gl.constexpr, BM: gl.constexpr,
    PUT_SLOTS: gl.constexpr, PUT_ROWS: gl.constexpr, PUT_BLOCK: gl.constexpr, COUNTER: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The partition of the copy warps: all puts."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, WARPS], [1, 0])
    i = gl.atomic_add(of_pass.words + COUNTER, 1, sem="relaxed", scope="gpu").to(gl.int32)
    while i < num_puts:
        # With opaque sizes what follows from them is computed here; each put reads the epoch, which takes no
        # registers between them.
        here = opaque_sizes(sizes)
        _put_part(
            i, gl.load(of_pass.words), of_pass, here, sending, arrivals, ring,
            BACKWARD, BM, PUT_SLOTS, PUT_ROWS, PUT_BLOCK, wide, WARPS,
        )  # fmt: skip
        i = gl.atomic_add(of_pass.words + COUNTER, 1, sem="relaxed", scope="gpu").to(gl.int32)
