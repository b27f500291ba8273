"""The warps of the Hopper kernel that send: the signal warp (where do the rows of a tile go, and who is told
that they are there?) and the copy warps (puts).

The signal warp is the fourth warp of the group of the producer and the copy warps, and takes the same tasks
in the same order as the consumers. While they multiply it looks up where each row of the result goes, and in
a backward returns the gradients of the rows' weights. When they have stored a tile it signals it, while they
are at the next one: a release waits until all stores of the program have drained.

What a tile costs the consumers beyond its product, in cycles of an H100, by arithmetic (2026-11-26; 600 a
load from L2, 1.5 us until a store at a peer is acknowledged, W = 8; none has measured it): 1200 to 1800, of
which the floor of the stores is 1024, 64 KB to L2 at 64 bytes a cycle. With looking up (1000 to 5000) and
release (3000 to 4500) it was 6000 to 9000. A TILE_OUT of 16,384 cycles of product (F = 1024) took 1.4 to
1.5 times as long with all of this in the way, and takes 1.1 times; at F = 256 2.5 to 3.2 and 1.4 times.

The copy warps' loads and stores are 16 bytes a thread. Every program has copy warps, so all put at first. The
rows of a put go through a ring in shared memory: asynchronous copies fill PUT_SLOTS steps of PUT_ROWS *
PUT_BLOCK elements, and hold no registers while they are on their way; what has come is stored at the peer,
and nobody waits for that but the release at the end. A thread reads from the ring what it has copied there
itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lancet_kernels.kernels.hopper.pipeline import (
    TASKS,
    await_task,
    barrier,
    copy_async,
    put_columns,
    read_task,
)
from lancet_kernels.kernels.protocol import device, steps, tasks
from lancet_kernels.kernels.protocol.device import opaque, opaque_sizes


@gluon.jit
def _addresses(result_ptr, i, A, B):
    """-> where rows i of result [A, B] begin; 0 for those that it has not."""
    return gl.where(i < A, (result_ptr + i.to(gl.int64) * B).to(gl.int64), 0)


@gluon.jit
def _look_up(j, task, ptrs, sizes, rings, const):
    """Put down where each row of the tile begins, and how wide rows are.

    In a backward's TILE_OUT with n = 0 also return the gradients of the rows' weights.
    """
    i_m = gl.arange(0, const.BM, gl.BlockedLayout([4], [32], [1], [0]))
    sizes = opaque_sizes(sizes)
    i = task.m * const.BM + i_m
    if task.kind == tasks.TILE_OUT:
        _, expert, m, rows, first_row = steps.expert_of_tile(task.index, ptrs, sizes)
        p_row, m_row = steps.result_rows(expert, m * const.BM + i_m, rows, first_row, ptrs, sizes, const)
        rings.targets.store(gl.where(m_row, p_row.to(gl.int64), 0))
        put_columns(j, sizes.D, rings)
        if const.BACKWARD:
            if task.n == 0:
                steps.return_dots(expert, m, rows, first_row, ptrs, sizes, const, i_m)
    if const.BACKWARD:
        if task.kind == tasks.WGRAD:
            # Of the operands only the sizes, wherever they begin.
            _, _, A, B = steps.wgrad_operands(task, task.index, ptrs, sizes)
            rings.targets.store(_addresses(steps.wgrad_result(task, A, B, ptrs), i, A, B))
            put_columns(j, B, rings)
    if ptrs.problems is not None:
        if task.kind == tasks.DENSE:
            _, _, c_ptr, M, N, _ = tasks.dense_problem(task.index, ptrs, const)
            rings.targets.store(_addresses(c_ptr, i, M, N))
            put_columns(j, N, rings)


@gluon.jit
def _signal_out(task, ptrs, sizes, const):
    """TILE_OUT is stored: with the last column of the tile its sources are told."""
    sizes = opaque_sizes(sizes)
    _, expert, m, _, first_row = steps.expert_of_tile(task.index, ptrs, sizes)
    epoch = gl.load(ptrs.of_pass.words)
    steps.return_tile(task.index, m, task.n, expert, first_row, epoch, ptrs, sizes, const)


@gluon.jit
def signal(ptrs, sizes, rings, const):
    """The signal warp's partition: look up, wait until the consumers have stored, signal; task by task.

    `targets` is one tile's: the consumers have read it when they have stored the tile. It has an mbarrier for
    each place of the ring of tasks, as they look at it for some tasks only, and may be ahead of this warp.
    """
    j = 0
    kind, _ = await_task(j, rings, 1)
    while kind >= 0:
        task, _ = read_task(j, kind, rings, 1)
        _look_up(j, task, ptrs, sizes, rings, const)
        place = j % TASKS
        barrier()
        mbarrier.arrive(rings.targets_full.index(place), count=1)
        mbarrier.wait(rings.stored.index(place), (j // TASKS) & 1)
        # All have read the task.
        mbarrier.arrive(rings.task_empty.index(place), count=1)
        if kind == tasks.TILE_IN:
            # What is stored is loaded by TMA.
            device.fence_tma(True)
            steps.finish_ready(task.index, ptrs)
        if kind == tasks.TILE_OUT:
            _signal_out(task, ptrs, sizes, const)
        j += 1
        kind, _ = await_task(j, rings, 1)


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
