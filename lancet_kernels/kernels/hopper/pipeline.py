"""From global memory to the accumulators: one warp loads operands by TMA, two warpgroups multiply them.

Producer and consumers share two rings in shared memory: operands, one stage for each step, and tasks. A ring
has two mbarriers for each place: `full`, on which the consumers wait, and `empty`, on which the producer
waits. Place i % STAGES is used for the i-th time in phase i // STAGES. A place of the ring of tasks has a
third one, `stored`, on which the signal warp waits for the consumers: then it empties the place.

Operands lie in one of three ways:

    forward   a [rows, K]    b [K, columns]
    backward  a [rows, K]    b [columns, K]      dX
    across    a [K, rows]    b [K, columns]      dW

The producer claims GEMM tasks, waits for their rows, and loads their operands by TMA. A task whose rows do
not come in time is not handed to the consumers, except a weight gradient, which they then fill with NaN: as
in the portable kernel, nobody is told that something is there which is not.

Descriptors. Those of TILE_IN and TILE_OUT come from the host, over all received rows and over the weights of
all experts: the rows of a tile behind the last of its expert end in rows of the accumulator that are never
stored; the contraction ends at the buffer's edge or, along the rows of the weights, at a multiple of BK. A
weight gradient contracts over rows, of which those behind the expert's last must count as zero, so its
descriptors have the extent of this expert's rows; the operands of an independent GEMM stand in a table on the
device. Both are made here, in the one place that Triton gives each, when no load that reads the former one is
in flight any more.
"""

from collections import namedtuple
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

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

# What has other names in Triton 3.6 than in 3.9, or none.
# (descriptor, [row, column], mbarrier, shared memory): start copying a box; the mbarrier counts its bytes.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
# (shared memory, pointers, mask): start copying a block without registers, 16 bytes at once (cp.async).
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
# All threads of the partition.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@builtin
def view(memory: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """The same bytes of shared memory with another shape and layout."""
    reinterpret = getattr(memory, "reinterpret", None) or memory._reinterpret
    shape = [_unwrap_if_constexpr(size) for size in shape]
    return reinterpret(memory.dtype, shape, _unwrap_if_constexpr(layout), _semantic=_semantic)


# A task in its ring: its five fields, steps, whether its operands are there; columns of the result, which the
# signal warp adds.
TASK_WORDS = gl.constexpr(8)
NO_TASK = gl.constexpr(-1)
# Tasks that are handed over and not stored yet. A third one would wait for stages of operands anyway.
TASKS = gl.constexpr(2)


Descriptors = namedtuple("Descriptors", "rows weight_in hidden weight_out")
"""From the host: of received rows, of hidden (backward: dh), and of the weights of both GEMMs."""

Rings = namedtuple("Rings", "a b empty full tasks task_empty task_full stored targets targets_full")
"""In shared memory: a [STAGES, BM, BK] and b [STAGES, BK, BN], the operands; their mbarriers; words of
tasks, and their mbarriers; targets int64 [BM], where the rows of a result go, and its mbarriers."""

Views = namedtuple("Views", "a b a_across b_across b_halves")
"""The same bytes for operands that lie as they are or the other way, and for halves of gate and up."""


@gluon.jit
def views_of(rings, const):
    BM: gl.constexpr = const.BM
    BN: gl.constexpr = const.BN
    BK: gl.constexpr = const.BK
    element: gl.constexpr = rings.a.dtype
    across_a: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BM], element)
    across_b: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BK], element)
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BN // 2], element)
    a_across = view(rings.a, [const.STAGES, BK, BM], across_a)
    b_across = view(rings.b, [const.STAGES, BN, BK], across_b)
    b_halves = view(rings.b, [2 * const.STAGES, BK, BN // 2], half)
    return Views(rings.a, rings.b, a_across, b_across, b_halves)


@gluon.jit
def load_steps(
    it, steps, a_desc, b_desc, a_row, a_column, b_row, b_column, second_column, a_bufs, b_bufs, rings,
    A_DOWN: gl.constexpr, B_DOWN: gl.constexpr, PAIR: gl.constexpr, const,
):  # fmt: skip
    """Load the operands of `steps` steps of a tile, as places become empty. -> it, the step that comes next.

    The contraction runs down the rows of a with A_DOWN, of b with B_DOWN, else along the columns. PAIR: the
    right half of b comes from `second_column`: gate and up of swiglu, side by side.
    """
    element_bytes: gl.constexpr = a_bufs.dtype.primitive_bitwidth // 8
    for step in range(steps):
        place = it % const.STAGES
        k = step * const.BK
        mbarrier.wait(rings.empty.index(place), ((it // const.STAGES) & 1) ^ 1)
        mbarrier.expect(rings.full.index(place), (const.BM + const.BN) * const.BK * element_bytes)
        a_at = [a_row + k, a_column] if A_DOWN else [a_row, a_column + k]
        load_tile(a_desc, a_at, rings.full.index(place), a_bufs.index(place))
        b_at = [b_row + k, b_column] if B_DOWN else [b_row, b_column + k]
        if PAIR:
            load_tile(b_desc, b_at, rings.full.index(place), b_bufs.index(2 * place))
            second_at = [b_row + k, second_column]
            load_tile(b_desc, second_at, rings.full.index(place), b_bufs.index(2 * place + 1))
        else:
            load_tile(b_desc, b_at, rings.full.index(place), b_bufs.index(place))
        it += 1
    return it


@gluon.jit
def wait_for_loads(it, rings, const):
    """Wait until all loads up to step `it` have arrived: then a descriptor in memory may be overwritten."""
    for back in gl.static_range(const.STAGES):
        i = it - 1 - back
        if i >= 0:
            mbarrier.wait(rings.full.index(i % const.STAGES), (i // const.STAGES) & 1)


@gluon.jit
def multiply_steps(
    it, steps, a_bufs, b_bufs, rings, A_DOWN: gl.constexpr, B_DOWN: gl.constexpr, MMA: gl.constexpr, const,
):  # fmt: skip
    """-> float32 [BM, BN], the sum of the products of `steps` steps, and the step that comes next.

    One product is always in flight: a place is empty when the product after it has been started.
    """
    acc = gl.zeros((const.BM, const.BN), gl.float32, MMA)
    for k in range(steps):
        place = it % const.STAGES
        mbarrier.wait(rings.full.index(place), (it // const.STAGES) & 1)
        a = a_bufs.index(place).permute([1, 0]) if A_DOWN else a_bufs.index(place)
        b = b_bufs.index(place) if B_DOWN else b_bufs.index(place).permute([1, 0])
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(rings.empty.index((it + const.STAGES - 1) % const.STAGES), count=1, pred=k > 0)
        it += 1
    if A_DOWN:
        # Behind one of a kernel's two loops. Else LLVM joins their equal ends, and ptxas, which then sees
        # accumulators copied before the wait, lets every product wait (C7515; Triton 3.6, 3.9, 2026-11-26).
        it = opaque(it)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(rings.empty.index((it + const.STAGES - 1) % const.STAGES), count=1, pred=steps > 0)
    return acc, it


@gluon.jit
def _put_word(tasks, i, value, WARPS: gl.constexpr):
    word: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    tasks.index(i).store(gl.full([1], value, gl.int32, word))


@gluon.jit
def _word(tasks, i, WARPS: gl.constexpr):
    word: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.sum(tasks.index(i).load(word), 0)


@gluon.jit
def hand_over(j, rings, task, steps, sound):
    """The producer's j-th task, for the consumers and the signal warp. -> j + 1."""
    place = j % TASKS
    mbarrier.wait(rings.task_empty.index(place), ((j // TASKS) & 1) ^ 1)
    first = place * TASK_WORDS
    _put_word(rings.tasks, first, task.kind, 1)
    _put_word(rings.tasks, first + 1, task.which, 1)
    _put_word(rings.tasks, first + 2, task.index, 1)
    _put_word(rings.tasks, first + 3, task.m, 1)
    _put_word(rings.tasks, first + 4, task.n, 1)
    _put_word(rings.tasks, first + 5, steps, 1)
    _put_word(rings.tasks, first + 6, sound, 1)
    barrier()
    mbarrier.arrive(rings.task_full.index(place), count=1)
    return j + 1


@gluon.jit
def await_task(j, rings, WARPS: gl.constexpr):
    """Wait for the j-th task. -> what the product needs of what `hand_over` got: kind and steps."""
    place = j % TASKS
    mbarrier.wait(rings.task_full.index(place), (j // TASKS) & 1)
    first = place * TASK_WORDS
    return _word(rings.tasks, first, WARPS), _word(rings.tasks, first + 5, WARPS)


@gluon.jit
def read_task(j, kind, rings, WARPS: gl.constexpr):
    """-> the j-th task, and sound. The consumers read it behind the product."""
    first = j % TASKS * TASK_WORDS
    which = _word(rings.tasks, first + 1, WARPS)
    index = _word(rings.tasks, first + 2, WARPS)
    m = _word(rings.tasks, first + 3, WARPS)
    n = _word(rings.tasks, first + 4, WARPS)
    return Task(kind, which, index, m, n), _word(rings.tasks, first + 6, WARPS)


@gluon.jit
def put_columns(j, columns, rings):
    """Columns of the result of the j-th task, for `result_columns`."""
    _put_word(rings.tasks, j % TASKS * TASK_WORDS + 7, columns, 1)


@gluon.jit
def result_columns(j, rings, WARPS: gl.constexpr):
    """-> what `put_columns` got."""
    return _word(rings.tasks, j % TASKS * TASK_WORDS + 7, WARPS)


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
