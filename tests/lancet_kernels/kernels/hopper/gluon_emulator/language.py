"""What the emulator has for each builtin of Gluon, by identity of the builtin, in Triton 3.6 to 3.9."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from lancet_kernels.kernels.hopper import pipeline
from lancet_kernels.kernels.protocol import device
from tests.lancet_kernels.kernels.hopper.gluon_emulator import async_copies, shared_memory
from tests.lancet_kernels.kernels.hopper.gluon_emulator.scheduler import Misuse
from tests.lancet_kernels.kernels.hopper.gluon_emulator.shared_memory import Barrier, SharedArray, number

# Of the same name and meaning in triton.language; a layout is dropped.
SAME = (
    "load store where arange full zeros sum maximum minimum cdiv cast program_id num_programs multiple_of "
    "atomic_add atomic_xchg static_assert static_range"
).split()
LAYOUT_AT = {"arange": 2, "full": 3, "zeros": 2}  # where a layout is positional, behind all others


def table(machine: Any) -> dict[int, Any]:
    """-> {id(builtin): replacement} for one emulator."""
    replacements: dict[int, Any] = {}

    def put(replacement: Callable[..., Any], builtin: Any) -> None:
        replacements[id(builtin)] = replacement

    for name in SAME:
        put(_same(name), getattr(gl, name))
    put(lambda x, layout, assert_trivial=False: x, gl.convert_layout)
    put(partial(async_copies.start_mma, machine), hopper.warpgroup_mma)
    put(partial(async_copies.wait_mmas, machine), hopper.warpgroup_mma_wait)
    put(machine.memory.create_barrier, pipeline.barrier)
    put(partial(_allocate, machine), gl.allocate_shared_memory)
    put(machine.specialize, gl.warp_specialize)
    # Functions of the library that stand for one instruction.
    put(lambda value: value, device.opaque)
    put(lambda memory, shape, layout: memory.reinterpret(memory.dtype, shape, layout), pipeline.view)
    _put_barriers(machine, put)
    _put_copies(machine, put)
    return replacements


def _same(name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        args = args[: LAYOUT_AT.get(name, len(args))]
        return getattr(tl, name)(*args, **{k: v for k, v in options.items() if k != "layout"})

    return call


def _put_barriers(machine: Any, put: Callable[..., None]) -> None:
    scheduler, memory = machine.scheduler, machine.memory

    def init(barrier: SharedArray, count: Any) -> None:
        barrier.allocation.barriers[int(barrier.places.min())] = Barrier(barrier.name, number(count))

    def expect(barrier: SharedArray, num_bytes: Any) -> None:
        scheduler.step()
        memory.arrive()
        barrier.barrier().expect(number(num_bytes))
        scheduler.changed()

    def arrive(barrier: SharedArray, *, count: Any, pred: Any = True) -> None:
        scheduler.step()
        if number(pred):
            memory.arrive()
            barrier.barrier().arrive(number(count))
            scheduler.changed()

    def wait(barrier: SharedArray, phase: Any) -> None:
        word, parity = barrier.barrier(), number(phase)
        if parity not in (0, 1):
            raise Misuse(f"wait for phase {parity} of {word}: a parity is 0 or 1")
        scheduler.wait_until(lambda: word.completed(parity), lambda: f"waits for parity {parity} of {word}")

    put(init, mbarrier.init)
    put(expect, mbarrier.expect)
    put(arrive, mbarrier.arrive)
    put(wait, mbarrier.wait)


def _put_copies(machine: Any, put: Callable[..., None]) -> None:
    def make(base, shape, strides, block_shape, layout) -> async_copies.Descriptor:
        frame = sys._getframe(1)
        slot = (machine.scheduler.current.program, frame.f_code, frame.f_lineno)
        machine.scheduler.step()
        async_copies.check_rebuild(machine, slot)
        lists = ([number(n) for n in numbers] for numbers in (shape, strides, block_shape))
        return async_copies.Descriptor(number(base), base.dtype.element_ty, *lists, layout, slot)

    def fence_tma(TMA: Any) -> None:
        if number(TMA):
            machine.scheduler.current.acquired = False

    put(fence_tma, device.fence_tma)
    put(make, tma.make_tensor_descriptor)
    put(partial(async_copies.load, machine), pipeline.load_tile)
    put(partial(async_copies.copy, machine), pipeline.copy_async)
    put(lambda: machine.scheduler.current.copies.append([]), async_copy.commit_group)
    put(partial(async_copies.wait_copies, machine), async_copy.wait_group)


def _allocate(machine: Any, dtype: tl.dtype, shape: Any, layout: Any) -> SharedArray:
    frame = sys._getframe(1)  # the kernel
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    name = re.match(r"\s*(\w+)\s*=", line)
    return shared_memory.allocate(machine, name[1] if name else "shared", dtype, shape, layout)
