"""The copy warps of the Hopper kernel: puts.

Loads and stores are 16 bytes a thread. Every program has copy warps, so all put at first. The rows of a put
go through a ring in shared memory: asynchronous copies fill PUT_SLOTS steps of PUT_ROWS * PUT_BLOCK elements,
and hold no registers while they are on their way; what has come is stored at the peer, and nobody waits for
that but the release at the end. A thread reads from the ring what it has copied there itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from lancet_kernels.kernels.hopper.pipeline import copy_async
from lancet_kernels.kernels.protocol import device, steps
from lancet_kernels.kernels.protocol.device import opaque, opaque_sizes

# Warps that copy, in one warpgroup with the one that loads by TMA and the one that signals.
COPY_WARPS = gl.constexpr(2)


@gluon.jit
def _put_rows(target_ptr, source_ptr, token_ptr, num_rows, D, ring, WIDE: gl.constexpr, const):
    """Copy source[token[i]] for i < num_rows, D wide, to row i of target, in steps of [ROWS, BLOCK].

    The stores of a step come SLOTS - 1 steps behind its loads.
    Example: D = 1024, BLOCK = 512, ROWS = 2, 3 rows: 4 steps; with 4 slots all are on their way at once.
    """
    i_row = gl.arange(0, const.PUT_ROWS, gl.SliceLayout(1, WIDE))
    i_column = gl.arange(0, const.PUT_BLOCK, gl.SliceLayout(0, WIDE))
    columns = gl.cdiv(D, const.PUT_BLOCK)
    steps = gl.cdiv(num_rows, const.PUT_ROWS) * columns
    # A step ahead, so that its addresses do not wait for it.
    i = i_row
    token = gl.load(token_ptr + i, mask=i < num_rows, other=0)
    for step in range(steps + const.PUT_SLOTS - 1):
        # Not masked behind the last step: that would fill places with zeros, which nobody waits for.
        if step < steps:
            d = gl.multiple_of(step % columns * const.PUT_BLOCK, const.PUT_BLOCK) + i_column
            p = source_ptr + token.to(gl.int64)[:, None] * D + d[None, :]
            copy_async(ring.index(step % const.PUT_SLOTS), p, mask=(i < num_rows)[:, None] & (d < D)[None, :])
        async_copy.commit_group()
        i = (step + 1) // columns * const.PUT_ROWS + i_row
        token = gl.load(token_ptr + i, mask=i < num_rows, other=0)
        async_copy.wait_group(const.PUT_SLOTS - 1)
        past = step - (const.PUT_SLOTS - 1)
        if past >= 0:
            i_past = past // columns * const.PUT_ROWS + i_row
            d = gl.multiple_of(past % columns * const.PUT_BLOCK, const.PUT_BLOCK) + i_column
            value = ring.index(past % const.PUT_SLOTS).load(WIDE)
            p = target_ptr + i_past.to(gl.int64)[:, None] * D + d[None, :]
            gl.store(p, value, mask=(i_past < num_rows)[:, None] & (d < D)[None, :])


@gluon.jit
def _put_part(i, epoch, ptrs, sizes, ring, WIDE: gl.constexpr, const):
    """PUT i, as `put_part` does it, through the ring."""
    expert, m, part = steps.put_task(i, ptrs, sizes)
    peer = expert // sizes.L
    if steps.wait_free(peer, epoch, ptrs, sizes, const):
        # Read again, not kept while waiting.
        sizes = opaque_sizes(sizes)
        i, epoch, expert = opaque(i), opaque(epoch), opaque(expert)
        peer = expert // sizes.L
        begin, end, row, first_send, signal, parts = steps.chunk_rows(expert, m, part, ptrs, sizes, const)
        if begin < end:
            send = first_send + begin
            target_ptr = device.remote_pointer(ptrs.arrivals.rows, ptrs.arrivals.rows_peers, peer)
            _put_rows(
                target_ptr + (row + begin) * sizes.D, ptrs.sending.rows, ptrs.sending.token + send,
                end - begin, sizes.D, ring, WIDE, const,
            )  # fmt: skip
            if const.BACKWARD:
                line: gl.constexpr = gl.BlockedLayout([1], [32], [COPY_WARPS], [0])
                device.put_words(
                    ptrs.arrivals.weights, ptrs.arrivals.weights_peers, peer, row + begin,
                    ptrs.sending.weights + send, end - begin, False, const.BM, gl.arange(0, const.BM, line),
                )  # fmt: skip
            steps.finish_put(i, parts, signal, peer, epoch, ptrs, const)


@gluon.jit
def copy(ptrs, sizes, num_puts, ring, const):
    """The partition of the copy warps: all puts."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, COPY_WARPS], [1, 0])
    i = steps.claim(ptrs, steps.PUT_CLAIMS)
    while i < num_puts:
        # With opaque sizes what follows from them is computed here; each put reads the epoch, which takes no
        # registers between them.
        here = opaque_sizes(sizes)
        _put_part(i, gl.load(ptrs.of_pass.words), ptrs, here, ring, wide, const)
        i = steps.claim(ptrs, steps.PUT_CLAIMS)
