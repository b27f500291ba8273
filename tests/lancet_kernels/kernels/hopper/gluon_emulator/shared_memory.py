"""Shared memory of a program: arrays, mbarriers, and who may touch an array while a copy or an mma does.

What is on its way is known exactly, so a stage that is overwritten or read too early is a Race whenever the
accesses overlap in time, and not only when the numbers happen to be wrong.

Elements lie where their layout puts them, swizzled and in chunks of a swizzle's width: so the same bytes can
be viewed in another layout, and hold there what they would on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.lancet_kernels.kernels.hopper.gluon_emulator.scheduler import Misuse, Race

POISON = 0xFF  # bytes of what a copy has not brought yet: NaN in every floating-point format


def make_tensor(data: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    """A tensor of Triton's interpreter; of one number if data has no dimension."""
    handle = interpreter.TensorHandle(data.reshape(1) if data.ndim == 0 else data, dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(data.shape)) if data.ndim else dtype)


def number(value: Any) -> int:
    """A Python number, constexpr or scalar tensor."""
    value = value.value if isinstance(value, tl.constexpr) else value
    return int(value.handle.data.reshape(-1)[0]) if isinstance(value, tl.tensor) else int(value)


@dataclass(eq=False)
class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes have come."""

    name: str
    count: int
    bytes: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, count: int) -> None:
        if count > self.pending:
            raise Misuse(
                f"{self.name}: {count} arrivals, but phase {self.phase} waits for {self.pending} "
                f"of {self.count}"
            )
        self.pending -= count
        self._turn()

    def expect(self, num_bytes: int) -> None:
        self.bytes += num_bytes
        self.arrive(1)

    def receive(self, num_bytes: int) -> None:
        self.bytes -= num_bytes
        self._turn()

    def completed(self, parity: int) -> bool:
        """Has the phase of this parity ended, as try_wait.parity sees it?"""
        return (self.phase & 1) != parity

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count

    def __str__(self) -> str:
        missing = f"{self.pending} of {self.count} arrivals missing, {self.bytes} bytes outstanding"
        return f"{self.name} (phase {self.phase}: {missing})"


@dataclass(eq=False)
class Allocation:
    """One gl.allocate_shared_memory: its elements in the order of their addresses."""

    name: str
    data: np.ndarray
    stage: int  # elements of what .index() takes
    is_barrier: bool
    stored: bool = False  # by a partition itself
    barriers: dict[int, Barrier] = field(default_factory=dict)


def offsets(shape: Sequence[int], layout: Any) -> np.ndarray:
    """-> where each element of an array of this shape lies, in elements."""
    width = getattr(layout, "swizzle_byte_width", 0)
    if not width:
        return np.arange(int(np.prod(shape))).reshape(shape)
    if layout.transposed or len(shape) < 2:
        raise Misuse(f"{layout} of {list(shape)} is not emulated")
    *outer, rows, columns = shape
    chunk = width * 8 // layout.element_bitwidth
    if columns % chunk:
        raise Misuse(f"{columns} columns in chunks of {chunk}: {layout}")
    unit = 128 // layout.element_bitwidth  # 16 bytes
    r, c = np.arange(rows)[:, None], np.arange(columns)[None, :]
    units_per_phase, phases = 128 // width, width // 16
    swizzled = (c % chunk // unit) ^ (r // units_per_phase % phases)
    inner = (c // chunk * rows + r) * chunk + swizzled * unit + c % unit
    first = np.arange(int(np.prod(outer))).reshape(*outer, 1, 1) * rows * columns
    return first + inner


@dataclass(eq=False)
class SharedArray:
    """A shared_memory_descriptor: a view of an allocation. places: where its elements lie in that."""

    machine: Any
    allocation: Allocation
    places: np.ndarray
    dtype: tl.dtype
    layout: Any

    @property
    def shape(self) -> list[int]:
        return list(self.places.shape)

    @property
    def nbytes(self) -> int:
        return self.places.size * self.allocation.data.itemsize

    def read(self) -> np.ndarray:
        return self.allocation.data[self.places]

    def write(self, values: np.ndarray) -> None:
        self.allocation.data[self.places] = values

    def poison(self) -> None:
        self.write(np.full(self.allocation.data.itemsize, POISON, np.uint8).view(self.allocation.data.dtype))

    def overlaps(self, other: SharedArray) -> bool:
        if self.allocation is not other.allocation:
            return False
        a, b = self.places, other.places
        apart = a.max() < b.min() or b.max() < a.min()
        return not apart and bool(np.isin(a, b).any())

    def _view(self, places: np.ndarray) -> SharedArray:
        return SharedArray(self.machine, self.allocation, places, self.dtype, self.layout)

    @property
    def name(self) -> str:
        return f"{self.allocation.name}[{int(self.places.min()) // self.allocation.stage}]"

    def index(self, index: Any) -> SharedArray:
        i = number(index)
        if not 0 <= i < self.places.shape[0]:
            raise Misuse(f"{self.allocation.name}.index({i}), but it has {self.places.shape[0]}")
        return self._view(self.places[i])

    def permute(self, order: Sequence[Any]) -> SharedArray:
        return self._view(self.places.transpose([number(o) for o in order]))

    def reinterpret(self, dtype: Any, shape: Sequence[Any], layout: Any) -> SharedArray:
        shape = [number(n) for n in shape]
        whole = self.places.size == self.allocation.data.size == int(np.prod(shape))
        if not whole or dtype != self.dtype:
            raise Misuse(
                f"reinterpret of a part of {self.allocation.name}, or as another type, is not emulated"
            )
        return SharedArray(self.machine, self.allocation, offsets(shape, layout), self.dtype, layout)

    def load(self, layout: Any = None) -> tl.tensor:
        self.machine.scheduler.step()
        self.machine.traffic.before_read(self, f"the load of {self.name}")
        values = self.read()
        if values.dtype == np.int64 and (values.view(np.uint8).reshape(-1, 8) == POISON).all(1).any():
            raise Race(f"the load of {self.name}, addresses, begins before anything was stored there")
        return make_tensor(values, self.dtype)

    def store(self, value: tl.tensor) -> None:
        self.machine.scheduler.step()
        self.machine.traffic.before_write(self, f"the store to {self.name}")
        if list(value.shape) != self.shape or value.dtype != self.dtype:
            raise Misuse(f"store of {value.type} to {self.name}, which is {self.shape} {self.dtype}")
        self.write(value.handle.data)
        self.allocation.stored = True
        self.machine.scheduler.changed()

    def barrier(self) -> Barrier:
        """The mbarrier here; it must have been initialised."""
        if not self.allocation.is_barrier or self.places.size != 1:
            raise Misuse(f"{self.name} is no mbarrier")
        word = self.allocation.barriers.get(int(self.places.min()))
        if word is None:
            raise Misuse(f"{self.name} is used before mbarrier.init")
        return word


class SharedTraffic:
    """Copies into shared memory and mmas out of it that are on their way."""

    def __init__(self) -> None:
        self.writes: list[tuple[SharedArray, str]] = []
        self.reads: list[tuple[SharedArray, str]] = []

    def before_read(self, array: SharedArray, what: str) -> None:
        self._check(array, what, self.writes)

    def before_write(self, array: SharedArray, what: str) -> None:
        self._check(array, what, self.writes)
        self._check(array, what, self.reads)

    def before_async_read(self, array: SharedArray, what: str) -> None:
        self.before_read(array, what)
        if array.allocation.stored:
            raise Misuse(f"{what} reads what a partition has stored: no fence_async_shared is emulated")

    @staticmethod
    def _check(array: SharedArray, what: str, others: list[tuple[SharedArray, str]]) -> None:
        for other, name in others:
            if array.overlaps(other):
                raise Race(f"{what} begins while {name} is on its way")

    @staticmethod
    def forget(entries: list[tuple[SharedArray, str]], array: SharedArray) -> None:
        del entries[next(i for i, (other, _) in enumerate(entries) if other is array)]


def allocate(machine: Any, name: str, dtype: tl.dtype, shape: Sequence[int], layout: Any) -> SharedArray:
    """An allocation whose bytes are poison."""
    shape = [number(n) for n in shape]
    data = np.empty(int(np.prod(shape)), interpreter._get_np_dtype(dtype))
    data.view(np.uint8)[:] = POISON
    is_barrier = type(layout).__name__ == "MBarrierLayout"
    allocation = Allocation(name, data, max(1, int(np.prod(shape[1:]))), is_barrier)
    return SharedArray(machine, allocation, offsets(shape, layout), dtype, layout)
