"""The signal warp of the Hopper kernel: where do the rows of a tile go, and who is told that they are there?

It is the fourth warp of the group of the producer and the copy warps, and takes the same tasks in the same
order as the consumers. While they multiply it looks up where each row of the result goes, and in a backward
returns the gradients of the rows' weights. When they have stored a tile it signals it, while they are at the
next one: a release waits until all stores of the program have drained.

What a tile costs the consumers beyond its product, in cycles of an H100, by arithmetic (2026-11-26; 600 a
load from L2, 1.5 us until a store at a peer is acknowledged, W = 8; none has measured it): 1200 to 1800, of
which the floor of the stores is 1024, 64 KB to L2 at 64 bytes a cycle. With looking up (1000 to 5000) and
release (3000 to 4500) it was 6000 to 9000. A TILE_OUT of 16,384 cycles of product (F = 1024) took 1.4 to
1.5 times as long with all of this in the way, and takes 1.1 times; at F = 256 2.5 to 3.2 and 1.4 times.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lancet_kernels.kernels.hopper.pipeline import TASKS, await_task, barrier, put_columns, read_task
from lancet_kernels.kernels.protocol import device, steps, tasks
from lancet_kernels.kernels.protocol.device import opaque_sizes


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
