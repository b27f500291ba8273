"""What the emulator has for each builtin of Gluon, by identity of the builtin, in Triton 3.6 to 3.9."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tests.lancet_kernels.kernels.hopper.gluon_emulator import async_copies, shared_memory
from tests.lancet_kernels.kernels.hopper.gluon_emulator.scheduler import Misuse
from tests.lancet_kernels.kernels.hopper.gluon_emulator.shared_memory import Barrier, SharedArray, number

# Of the same name and meaning in triton.language; a `layout` is dropped.
SAME = (
    "add sub mul load store where arange full zeros full_like zeros_like sum max min maximum minimum cdiv "
    "cast clamp abs exp exp2 log log2 erf sqrt sqrt_rn rsqrt sin cos floor ceil fma umulhi expand_dims "
    "reshape permute broadcast split join gather ravel reduce associative_scan program_id num_programs "
    "multiple_of max_contiguous max_constancy assume atomic_add atomic_and atomic_cas atomic_max atomic_min "
    "atomic_or atomic_xchg atomic_xor atomic_load atomic_store static_assert static_range device_assert "
    "static_print to_tensor device_print histogram cumsum xor_sum div_rn fdiv"
).split()
LAYOUT_AT = {"arange": 2, "full": 3, "zeros": 2}  # where a layout is positional, behind all others
DROPPED = ("layout", "cache_policy", "cache_modifier", "eviction_policy")


def table(machine: Any) -> dict[int, Any]:
    """-> {id(builtin): replacement} for one emulator."""
    replacements: dict[int, Any] = {}

    def put(replacement: Callable[..., Any], *builtins: Any) -> None:
        replacements.update({id(builtin): replacement for builtin in builtins if builtin is not None})

    for name in SAME:
        if hasattr(gl, name) and hasattr(tl, name):
            put(_same(name), getattr(gl, name))
    scheduler, memory = machine.scheduler, machine.memory
    put(lambda x, layout, assert_trivial=False: x, gl.convert_layout)
    put(lambda x, layout: x, gl.set_auto_layout)
    put(lambda a, b, acc, **options: async_copies.start_mma(machine, a, b, acc, **_mma_options(options)),
        hopper.warpgroup_mma)  # fmt: skip
    put(lambda acc: acc, getattr(hopper, "warpgroup_mma_init", None))
    put(lambda num_outstanding=0, deps=None: async_copies.wait_mmas(machine, num_outstanding, deps),
        hopper.warpgroup_mma_wait)  # fmt: skip
    put(lambda cluster=False: _fence_shared(machine), hopper.fence_async_shared)
    put(
        lambda **_: memory.create_barrier(), getattr(gl, "barrier", None), getattr(gl, "thread_barrier", None)
    )
    put(lambda *args, **options: _asm(machine, *args, **options), gl.inline_asm_elementwise)
    put(lambda: scheduler.current.num_warps, gl.num_warps)
    put(lambda: 1, gl.num_ctas)
    put(lambda element_ty, shape, layout, value=None: _allocate(machine, element_ty, shape, layout, value),
        gl.allocate_shared_memory)  # fmt: skip
    put(lambda parts, num_warps, num_regs=None: machine.specialize(parts, num_warps), gl.warp_specialize)
    _put_barriers(machine, put)
    _put_tma(machine, put)
    _put_copies(machine, put)
    return replacements


def _same(name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        args = args[: LAYOUT_AT.get(name, len(args))]
        return getattr(tl, name)(*args, **{k: v for k, v in options.items() if k not in DROPPED})

    return call


def _mma_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("use_acc", "is_async") if name in options}


def _put_barriers(machine: Any, put: Callable[..., None]) -> None:
    scheduler, memory = machine.scheduler, machine.memory

    def init(barrier: SharedArray, count: Any) -> None:
        barrier.allocation.barriers[int(barrier.places.min())] = Barrier(barrier.name, number(count))

    def expect(barrier: SharedArray, bytes_per_cta: Any = None, pred: Any = True, **other: Any) -> None:
        num_bytes = other.pop("bytes", bytes_per_cta)
        scheduler.step()
        if number(pred):
            memory.arrive(scheduler.current)
            barrier.barrier().expect(number(num_bytes))
            scheduler.changed()

    def arrive(barrier: SharedArray, *, count: Any = 1, pred: Any = True, **_: Any) -> None:
        scheduler.step()
        if number(pred):
            memory.arrive(scheduler.current)
            barrier.barrier().arrive(number(count))
            scheduler.changed()

    def wait(barrier: SharedArray, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        if number(pred):
            word, parity = barrier.barrier(), number(phase)
            if parity not in (0, 1):
                raise Misuse(f"wait for phase {parity} of {word}: a parity is 0 or 1")
            scheduler.wait_until(
                lambda: word.completed(parity), lambda: f"waits for parity {parity} of {word}"
            )

    put(init, mbarrier.init)
    put(lambda barrier: barrier.allocation.barriers.pop(int(barrier.places.min())), mbarrier.invalidate)
    put(expect, mbarrier.expect)
    put(arrive, mbarrier.arrive)
    put(wait, mbarrier.wait)


def _put_tma(machine: Any, put: Callable[..., None]) -> None:
    def make(base, shape, strides, block_shape, layout, padding_option="zero") -> async_copies.Descriptor:
        frame = sys._getframe(1)
        slot = (machine.scheduler.current.program, frame.f_code, frame.f_lineno)
        machine.scheduler.step()
        async_copies.check_rebuild(machine, slot)
        lists = ([number(n) for n in numbers] for numbers in (shape, strides, block_shape))
        pointer, element = number_u64(base), base.dtype.element_ty
        return async_copies.Descriptor(pointer, element, *lists, layout, slot)

    def load(descriptor, coordinates, barrier, result, pred=True, **options: Any) -> None:
        if options.pop("multicast", False) or any(options.pop("offsets", ()) or ()):
            raise Misuse("multicast TMA loads are not emulated")
        if number(pred):
            async_copies.load(machine, descriptor, coordinates, barrier, result)

    put(make, tma.make_tensor_descriptor)
    put(load, getattr(tma, "async_load", None), getattr(tma, "async_copy_global_to_shared", None))
    put(lambda descriptor, at, source: async_copies.store(machine, descriptor, at, source),
        getattr(tma, "async_store", None), getattr(tma, "async_copy_shared_to_global", None))  # fmt: skip
    put(
        lambda pendings, read_only=True: async_copies.store_wait(machine, pendings, read_only), tma.store_wait
    )


def _put_copies(machine: Any, put: Callable[..., None]) -> None:
    put(
        lambda target, pointer, mask=None, **_: async_copies.copy(machine, target, pointer, mask),
        getattr(async_copy, "async_load", None), async_copy.async_copy_global_to_shared,
    )  # fmt: skip
    put(lambda: machine.scheduler.current.copies.append([]), async_copy.commit_group)
    put(lambda num_outstanding=0: async_copies.wait_copies(machine, num_outstanding), async_copy.wait_group)


def number_u64(pointer: tl.tensor) -> int:
    return int(pointer.handle.data.reshape(-1)[0])


def _fence_shared(machine: Any) -> None:
    name = machine.scheduler.current.name
    machine.traffic.unfenced[:] = [entry for entry in machine.traffic.unfenced if entry[1] != name]


def by_name(machine: Any) -> dict[str, Any]:
    """Functions of the library that stand for one instruction, by their names."""
    return {
        "fence_tma": lambda TMA=True: fence_global(machine, TMA),
        "opaque": lambda value: value,
        "view": lambda memory, shape, layout: memory.reinterpret(memory.dtype, shape, layout),
    }


def _asm(machine: Any, asm: str, *_: Any, **__: Any) -> tl.tensor:
    if "fence.proxy.async" not in asm:
        raise Misuse(f"inline assembly is not emulated: {asm}")
    fence_global(machine)
    return tl.full((1,), 0, tl.int32)


def fence_global(machine: Any, TMA: Any = True) -> None:
    """fence.proxy.async.global, also of device.fence_tma, which is nothing in the interpreter."""
    if number(TMA):
        machine.scheduler.current.acquired = False


def _allocate(machine: Any, dtype: tl.dtype, shape: Any, layout: Any, value: Any) -> SharedArray:
    frame = sys._getframe(2)  # the kernel, behind the lambda of the table
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    name = re.match(r"\s*(\w+)\s*=", line)
    array = shared_memory.allocate(machine, name[1] if name else "shared", dtype, shape, layout)
    if value is not None:
        array.store(value)
    return array
