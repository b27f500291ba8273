"""TMA, cp.async and wgmma: what is issued now and happens later.

A copy reads global memory when it is issued or when it lands, at random, and the bytes appear in shared
memory only when it lands; a TMA load then lowers the byte count of its mbarrier. Until then the place holds
NaN. An mma reads its operands when the wait for it returns; had they changed since it was issued, that is a
Race.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as native

from tests.lancet_kernels.kernels.hopper.gluon_emulator.scheduler import Misuse, Race
from tests.lancet_kernels.kernels.hopper.gluon_emulator.shared_memory import (
    Barrier,
    SharedArray,
    make_tensor,
    number,
)

LANDING_WEIGHTS = (1.0, 0.1, 0.02)


@dataclass(eq=False)
class Descriptor:
    """A tensor descriptor. slot: the scratch memory in which a program has built it; None of a host's."""

    base: int
    dtype: tl.dtype
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any
    slot: Any = None

    def __post_init__(self) -> None:
        size = self.itemsize
        if self.base % 16 or any(stride * size % 16 for stride in self.strides[:-1]):
            raise Misuse(f"a descriptor needs 16-byte alignment: {self}")
        if self.strides[-1] != 1 or self.block_shape[-1] * size < 16:
            raise Misuse(f"a descriptor needs contiguous rows, blocks of 16 bytes or more: {self}")
        if any(n < 1 for n in self.shape) or max(self.block_shape) > 256:
            raise Misuse(f"a descriptor needs a shape of at least 1, blocks of at most 256: {self}")

    @property
    def itemsize(self) -> int:
        return self.dtype.primitive_bitwidth // 8

    def addresses(self, coordinates: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """-> addresses of a block, and which of them are inside."""
        address, inside = np.uint64(self.base), np.bool_(True)
        for d, (first, n) in enumerate(zip(coordinates, self.block_shape, strict=True)):
            i = (first + np.arange(n)).reshape([n if d == e else 1 for e in range(len(self.block_shape))])
            address = address + (i * self.strides[d] * self.itemsize).astype(np.uint64)
            inside = inside & (i >= 0) & (i < self.shape[d])
        shape = tuple(self.block_shape)
        return np.broadcast_to(address, shape).copy(), np.broadcast_to(inside, shape).copy()


@dataclass(eq=False)
class AsyncCopy:
    """A block on its way into shared memory. zeros: come where `inside` is False, not NaN."""

    machine: Any
    name: str
    pointers: np.ndarray
    inside: np.ndarray
    target: SharedArray
    zeros: bool

    def __post_init__(self) -> None:
        scheduler, traffic = self.machine.scheduler, self.machine.traffic
        traffic.before_write(self.target, self.name)
        self.target.poison()
        there = self.target.read()
        self.outside = np.zeros_like(there) if self.zeros else there
        self.values: np.ndarray | None = None
        self.weight = scheduler.random.choice(LANDING_WEIGHTS)
        if scheduler.random.random() < 0.5:
            self.read()
        traffic.writes.append((self.target, self.name))
        scheduler.operations.append(self)

    def read(self) -> None:
        self.values = native.load(self.pointers, self.inside, self.outside, self.outside.dtype)

    def land(self) -> None:
        if self.values is None:
            self.read()
        self.machine.traffic.forget(self.machine.traffic.writes, self.target)
        self.target.write(self.values)


@dataclass(eq=False)
class TmaLoad(AsyncCopy):
    descriptor: Descriptor
    barrier: Barrier

    def land(self) -> None:
        super().land()
        self.machine.loads.remove(self)
        self.barrier.receive(self.target.nbytes)


def load(
    machine: Any, descriptor: Descriptor, coordinates, barrier: SharedArray, target: SharedArray
) -> None:
    """tma.async_load."""
    task = machine.scheduler.current
    machine.scheduler.step()
    at = [number(c) for c in coordinates]
    name = f"the TMA load of {task.name} at {at} into {target.name}"
    if task.acquired:
        raise Misuse(f"{name} without fence.proxy.async since an acquire: the rows came by another proxy")
    if target.shape != list(descriptor.block_shape) or target.dtype != descriptor.dtype:
        raise Misuse(f"{name}: {target.shape} {target.dtype}, descriptor {descriptor}")
    place = descriptor.addresses(at)
    machine.loads.append(TmaLoad(machine, name, *place, target, True, descriptor, barrier.barrier()))


def copy(machine: Any, target: SharedArray, pointer: tl.tensor, mask: tl.tensor) -> None:
    """cp.async; where the mask is False nothing is copied, and there stays NaN."""
    task = machine.scheduler.current
    machine.scheduler.step()
    name = f"the copy of {task.name} into {target.name}"
    if list(pointer.shape) != target.shape or pointer.dtype.element_ty != target.dtype:
        raise Misuse(f"{name}: {target.shape} {target.dtype} from {pointer.type}")
    inside = mask.handle.data.astype(bool)
    task.copies[-1].append(AsyncCopy(machine, name, pointer.handle.data, inside, target, False))


def wait_copies(machine: Any, num_outstanding: Any = 0) -> None:
    """wait_group: the copies of all committed groups but the last `num_outstanding` have come."""
    task = machine.scheduler.current
    committed = task.copies[:-1]
    for group in committed[: max(0, len(committed) - number(num_outstanding))]:
        for operation in group:
            machine.scheduler.land(operation)
        task.copies.remove(group)
    machine.scheduler.step()


def check_rebuild(machine: Any, slot: Any) -> None:
    """Before a descriptor is built in its slot of the scratch memory."""
    for operation in machine.loads:
        if operation.descriptor.slot == slot:
            raise Race(f"a descriptor is built anew where {operation.name}, still on its way, has its own")


@dataclass(eq=False)
class Accumulator:
    """The result of mmas of which some are on their way."""

    data: np.ndarray
    shape: list[int]
    pending: list[Mma] = field(default_factory=list)


@dataclass(eq=False)
class Mma:
    operands: tuple[SharedArray, SharedArray]
    before: list[np.ndarray]
    accumulator: Accumulator
    name: str


def as_float(array: SharedArray) -> np.ndarray:
    """What the tensor core multiplies."""
    data = array.read()
    if array.dtype == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b in float32, summed in float64: the same bits on every CPU, however many rows there are."""
    return np.matmul(a, b, dtype=np.float64).astype(np.float32)


def start_mma(machine: Any, a: SharedArray, b: SharedArray, acc: Any, is_async: bool) -> Accumulator:
    """warpgroup_mma, asynchronous."""
    machine.scheduler.step()
    task = machine.scheduler.current
    name = f"the mma of {task.name}"
    for operand in (a, b):
        machine.traffic.before_async_read(operand, f"{name} of {operand.name}")
        machine.traffic.reads.append((operand, f"{name} of {operand.name}"))
    if not isinstance(acc, Accumulator):
        acc = Accumulator(acc.handle.data, list(acc.shape))
    (m, k), (k2, n) = a.shape, b.shape
    if k != k2 or acc.shape != [m, n]:
        raise Misuse(f"{name}: {m} x {k} times {k2} x {n} into {acc.shape}")
    mma = Mma((a, b), [a.read(), b.read()], acc, name)
    acc.pending.append(mma)
    task.mmas.append(mma)
    return acc


def wait_mmas(machine: Any, num_outstanding: Any, deps: tuple[Accumulator]) -> Accumulator | tl.tensor:
    """warpgroup_mma_wait -> the dep; if nothing of it is on its way, as a tensor."""
    machine.scheduler.step()
    mmas = machine.scheduler.current.mmas
    while len(mmas) > number(num_outstanding):
        _finish(machine, mmas.pop(0))
    (acc,) = deps
    concrete = isinstance(acc, Accumulator) and not acc.pending
    return make_tensor(acc.data, tl.float32) if concrete else acc


def _finish(machine: Any, mma: Mma) -> None:
    for operand, before in zip(mma.operands, mma.before, strict=True):
        machine.traffic.forget(machine.traffic.reads, operand)
        if operand.read().tobytes() != before.tobytes():
            raise Race(f"{mma.name}: {operand.name} was overwritten before the mma had read it")
    acc = mma.accumulator
    with np.errstate(all="ignore"):  # rows behind the last one are what was there
        acc.data = product(*map(as_float, mma.operands)) + acc.data
    acc.pending.remove(mma)
