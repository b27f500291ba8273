"""The producer of the Hopper kernel: one warp that claims GEMM tasks, waits, and loads their operands by TMA.

A task whose rows do not come in time is not handed to the consumers, except a weight gradient, which they
then fill with NaN: as in the portable kernel, nobody is told that something is there which is not.

Descriptors. Those of TILE_IN and TILE_OUT come from the host, over all received rows and over the weights of
all experts: the rows of a tile behind the last of its expert end in rows of the accumulator that are never
stored; the contraction ends at the buffer's edge or, along the rows of the weights, at a multiple of BK. A
weight gradient contracts over rows, of which those behind the expert's last must count as zero, so its
descriptors have the extent of this expert's rows; the operands of an independent GEMM stand in a table on the
device. Both are made here, in the one place that Triton gives each, when no load that reads the former one is
in flight any more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from lancet_kernels.kernels.hopper.pipeline import NO_TASK, hand_over, load_steps, views_of, wait_for_loads
from lancet_kernels.kernels.protocol.device import opaque, opaque_sizes
from lancet_kernels.kernels.protocol.schedule import group
from lancet_kernels.kernels.protocol.steps import (
    CLAIMS,
    READY_WORDS,
    base_of,
    claim,
    expert_of_tile,
    wait_expert,
    wait_ready,
    wait_rows,
    wgrad_operands,
)
from lancet_kernels.kernels.protocol.tasks import (
    DENSE,
    TILE_IN,
    TILE_OUT,
    WGRAD,
    Task,
    dense_problem,
    gemm_task,
    lag_of,
)


@gluon.jit
def _load_in(it, j, task, epoch, ptrs, sizes, descs, rings, views, const):
    """TILE_IN: wait for the rows of the tile, hand it over, load. -> it, j."""
    sizes = opaque_sizes(sizes)
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    local, expert, m, _, first_row = expert_of_tile(task.index, ptrs, sizes)
    D, F = sizes.D, sizes.F
    here = wait_rows(task.index, m, expert, epoch, ptrs, sizes, const, gl.arange(0, const.BW, lanes))
    if here:
        steps = gl.cdiv(D, const.BK)
        row = base_of(ptrs, const.BACKWARD) + first_row + m * const.BM
        n0 = task.n * const.BN_IN
        j = hand_over(j, rings, task, steps, 1)
        DOWN: gl.constexpr = not const.BACKWARD
        PAIR: gl.constexpr = DOWN and const.ACT == "swiglu"
        b_bufs = (views.b_halves if PAIR else views.b) if DOWN else views.b_across
        it = load_steps(
            it, steps, descs.rows, descs.weight_in, row, 0, local * D if DOWN else local * F + n0,
            n0 if DOWN else 0, F + n0 if PAIR else 0, views.a, b_bufs, rings, False, DOWN, PAIR, const,
        )  # fmt: skip
    return it, j


@gluon.jit
def _load_out(it, j, task, ptrs, sizes, descs, rings, views, const):
    """TILE_OUT: wait until the tile's columns of the first GEMM are ready, hand it over, load. -> it, j."""
    sizes = opaque_sizes(sizes)
    local, _, m, _, first_row = expert_of_tile(task.index, ptrs, sizes)
    here = wait_ready(task.index, gl.cdiv(sizes.F, const.BN_IN), ptrs, sizes, const)
    if here:
        row = first_row + m * const.BM
        n0 = task.n * const.BN
        DOWN: gl.constexpr = not const.BACKWARD
        steps = gl.cdiv(sizes.F if DOWN else sizes.H, const.BK)
        j = hand_over(j, rings, task, steps, 1)
        b_bufs = views.b if DOWN else views.b_across
        it = load_steps(
            it, steps, descs.hidden, descs.weight_out, row, 0,
            local * sizes.F if DOWN else local * sizes.D + n0, n0 if DOWN else 0, 0, views.a, b_bufs, rings,
            False, DOWN, False, const,
        )  # fmt: skip
    return it, j


@gluon.jit
def _load_across(it, j, task, x_ptr, dy_ptr, rows, A, B, steps, sound, rings, views, const):
    """Hand over a tile of x^T dy, of x [rows, A] and dy [rows, B], and load its operands. -> it, j."""
    j = hand_over(j, rings, task, steps, sound)
    if steps > 0:
        wait_for_loads(it, rings, const)
        x_desc = tma.make_tensor_descriptor(
            x_ptr, [rows, A], [A, 1], [const.BK, const.BM], views.a_across.layout
        )
        dy_desc = tma.make_tensor_descriptor(dy_ptr, [rows, B], [B, 1], [const.BK, const.BN], views.b.layout)
        it = load_steps(
            it, steps, x_desc, dy_desc, 0, task.m * const.BM, 0, task.n * const.BN, 0, views.a_across,
            views.b, rings, True, True, False, const,
        )  # fmt: skip
    return it, j


@gluon.jit
def _load_wgrad(it, j, task, sound, ptrs, sizes, rings, views, const):
    """WGRAD: wait until all tiles of the expert are ready, hand it over, load its rows. -> it, j."""
    sizes = opaque_sizes(sizes)
    expert = sizes.rank * sizes.L + task.index
    rows, first_row, first_tile = group(ptrs.of_pass.table, sizes.W, sizes.W * sizes.L, expert)
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    here = wait_expert(rows, first_tile, sound, ptrs, sizes, const, gl.arange(0, READY_WORDS, lanes))
    x_ptr, dy_ptr, A, B = wgrad_operands(task, first_row, ptrs, sizes)
    steps = gl.where(here, gl.cdiv(rows, const.BK), 0)
    return _load_across(it, j, task, x_ptr, dy_ptr, rows, A, B, steps, here.to(gl.int32), rings, views, const)


@gluon.jit
def _load_dense(it, j, task, ptrs, rings, views, const):
    """DENSE: hand the tile over, and load its operands. -> it, j."""
    a_ptr, b_ptr, _, M, N, K = dense_problem(task.index, ptrs, const)
    steps = gl.cdiv(K, const.BK)
    return _load_across(it, j, task, a_ptr, b_ptr, K, M, N, steps, 1, rings, views, const)


@gluon.jit
def produce(ptrs, sizes, descs, num_tasks, num_tiles, epoch, sound, rings, const):
    """The producer's partition: all tasks but puts. num_tasks: of these."""
    views = views_of(rings, const)
    # Producers claim a task ahead: what a tile of the second GEMM needs is finished a task later.
    lag = lag_of(2 * gl.num_programs(0), gl.cdiv(opaque(sizes.F), const.BN_IN))
    it = 0
    j = 0
    i = claim(ptrs, CLAIMS)
    while i < num_tasks:
        task = gemm_task(i, num_tiles, opaque(lag), ptrs, opaque_sizes(sizes), const)
        if task.kind == TILE_IN:
            it, j = _load_in(it, j, task, epoch, ptrs, sizes, descs, rings, views, const)
        if task.kind == TILE_OUT:
            it, j = _load_out(it, j, task, ptrs, sizes, descs, rings, views, const)
        if const.BACKWARD:
            if task.kind == WGRAD:
                it, j = _load_wgrad(it, j, task, sound, ptrs, sizes, rings, views, const)
        if ptrs.problems is not None:
            if task.kind == DENSE:
                it, j = _load_dense(it, j, task, ptrs, rings, views, const)
        i = claim(ptrs, CLAIMS)
    hand_over(j, rings, Task(NO_TASK, 0, 0, 0, 0), 0, 0)
