"""From global memory to the accumulators: one warp loads operands by TMA, two warpgroups multiply them.

Producer and consumers share two rings in shared memory: operands, one stage for each step, and tasks. A ring
has two mbarriers for each place: `full`, on which the consumers wait, and `empty`, on which the producer
waits. Place i % STAGES is used for the i-th time in phase i // STAGES. A place of the ring of tasks has a
third one, `stored`, on which the signal warp waits for the consumers: then it empties the place.

Operands lie in one of three ways:

    forward   a [rows, K]    b [K, columns]
    backward  a [rows, K]    b [columns, K]      dX
    across    a [K, rows]    b [K, columns]      dW
"""

from collections import namedtuple
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from lancet_kernels.kernels.protocol.device import opaque
from lancet_kernels.kernels.protocol.tasks import Task

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
