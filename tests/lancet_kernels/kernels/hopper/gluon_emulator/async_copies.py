"""TMA, cp.async and wgmma: what is issued now and happens later.

A TMA load reads global memory when it is issued or when it lands, at random, and the bytes appear in shared
memory only when it lands, which lowers the byte count of its mbarrier. Until then the place holds NaN. An
mma reads its operands when the wait for it returns; had they changed since it was issued, that is a Race.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as native

from tests.lancet_kernels.kernels.hopper.gluon_emulator.scheduler import Misuse, Race, Task
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

    @property
    def nbytes_per_cta(self) -> int:
        return int(np.prod(self.block_shape)) * self.itemsize

    @property
    def block_type(self) -> tl.block_type:
        return tl.block_type(self.dtype, self.block_shape)

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
class TmaLoad:
    machine: Any
    descriptor: Descriptor
    coordinates: list[int]
    barrier: Barrier
    target: SharedArray
    name: str
    weight: float
    values: np.ndarray | None = None

    def read(self) -> None:
        addresses, inside = self.descriptor.addresses(self.coordinates)
        zero = np.zeros(addresses.shape, self.target.allocation.data.dtype)
        self.values = native.load(addresses, inside, zero, zero.dtype)

    def land(self) -> None:
        if self.values is None:
            self.read()
        traffic = self.machine.traffic
        traffic.forget(traffic.writes, self.target)
        self.target.write(self.values)
        self.machine.loads.remove(self)
        self.barrier.receive(self.target.nbytes_per_cta)


def load(
    machine: Any, descriptor: Descriptor, coordinates, barrier: SharedArray, target: SharedArray
) -> None:
    """tma.async_load."""
    scheduler, task = machine.scheduler, machine.scheduler.current
    scheduler.step()
    at = [number(c) for c in coordinates]
    name = f"the TMA load of {task.name} at {at} into {target.name}"
    if task.acquired:
        raise Misuse(f"{name} without fence.proxy.async since an acquire: the rows came by another proxy")
    if target.shape != list(descriptor.block_shape) or target.dtype != descriptor.dtype:
        raise Misuse(f"{name}: {target.shape} {target.dtype}, descriptor {descriptor}")
    machine.traffic.before_write(target, name)
    weight = scheduler.random.choice(LANDING_WEIGHTS)
    operation = TmaLoad(machine, descriptor, at, barrier.barrier(), target, name, weight)
    if scheduler.random.random() < 0.5:
        operation.read()
    target.poison()
    machine.traffic.writes.append((target, name))
    machine.loads.append(operation)
    scheduler.issue(operation)


@dataclass(eq=False)
class Copy:
    """A block that threads copy asynchronously, of which each will read what it has copied."""

    machine: Any
    pointers: np.ndarray
    mask: np.ndarray
    target: SharedArray
    name: str
    weight: float
    values: np.ndarray | None = None
    landed: bool = False

    def read(self) -> None:
        zero = np.zeros(self.pointers.shape, self.target.allocation.data.dtype)
        self.values = native.load(self.pointers, self.mask, zero, zero.dtype)

    def land(self) -> None:
        if self.values is None:
            self.read()
        self.machine.traffic.forget(self.machine.traffic.writes, self.target)
        self.target.write(np.where(self.mask, self.values, self.target.read()))
        self.landed = True


def copy(machine: Any, target: SharedArray, pointer: tl.tensor, mask: tl.tensor | None) -> None:
    """cp.async; where the mask is False nothing is copied, and there stays NaN."""
    scheduler, task = machine.scheduler, machine.scheduler.current
    scheduler.step()
    name = f"the copy of {task.name} into {target.name}"
    if list(pointer.shape) != target.shape or pointer.dtype.element_ty != target.dtype:
        raise Misuse(f"{name}: {target.shape} {target.dtype} from {pointer.type}")
    machine.traffic.before_write(target, name)
    inside = np.ones(target.shape, bool) if mask is None else mask.handle.data.astype(bool)
    weight = scheduler.random.choice(LANDING_WEIGHTS)
    operation = Copy(machine, pointer.handle.data, inside, target, name, weight)
    if scheduler.random.random() < 0.5:
        operation.read()
    target.poison()
    machine.traffic.writes.append((target, name))
    task.copies[-1].append(operation)
    scheduler.issue(operation)


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
class TmaStore:
    machine: Any
    task: Task
    descriptor: Descriptor
    coordinates: list[int]
    source: SharedArray
    name: str
    weight: float
    values: np.ndarray | None = None
    written: bool = False

    def read(self) -> None:
        """The shared memory is free after this."""
        if self.values is None:
            self.values = self.source.read()
            self.machine.traffic.forget(self.machine.traffic.reads, self.source)

    def land(self) -> None:
        self.read()
        addresses, inside = self.descriptor.addresses(self.coordinates)
        native.store(addresses, self.values, inside)
        self.written = True


def store(machine: Any, descriptor: Descriptor, coordinates, source: SharedArray) -> None:
    """tma.async_store."""
    scheduler, task = machine.scheduler, machine.scheduler.current
    scheduler.step()
    at = [number(c) for c in coordinates]
    name = f"the TMA store of {task.name} at {at} from {source.name}"
    machine.traffic.before_async_read(source, name)
    if source.shape != list(descriptor.block_shape) or source.dtype != descriptor.dtype:
        raise Misuse(f"{name}: {source.shape} {source.dtype}, descriptor {descriptor}")
    weight = scheduler.random.choice(LANDING_WEIGHTS)
    operation = TmaStore(machine, task, descriptor, at, source, name, weight)
    machine.traffic.reads.append((source, name))
    task.tma_stores.append(operation)
    scheduler.issue(operation)


def store_wait(machine: Any, pendings: Any, read_only: Any = True) -> None:
    """tma.store_wait: all but the last `pendings` have read their source, or have landed."""
    task = machine.scheduler.current
    for operation in task.tma_stores[: max(0, len(task.tma_stores) - number(pendings))]:
        if read_only:
            operation.read()
        else:
            machine.scheduler.land(operation)
    task.tma_stores = [operation for operation in task.tma_stores if not operation.written]
    machine.scheduler.step()


@dataclass(eq=False)
class Accumulator:
    """The result of mmas of which some are on their way."""

    data: np.ndarray
    shape: list[int]
    pending: list[Mma] = field(default_factory=list)


@dataclass(eq=False)
class Mma:
    operands: list[SharedArray | tl.tensor]
    before: list[np.ndarray]
    accumulator: Accumulator
    use_accumulator: bool
    name: str


def as_float(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """What the tensor core multiplies."""
    if dtype == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def start_mma(machine: Any, a, b, acc, use_acc: Any = True, is_async: Any = False):
    """warpgroup_mma -> Accumulator, or the tensor if it is not asynchronous."""
    scheduler, task = machine.scheduler, machine.scheduler.current
    scheduler.step()
    name = f"the mma of {task.name}"
    before = []
    for operand in (a, b):
        if isinstance(operand, SharedArray):
            machine.traffic.before_async_read(operand, f"{name} of {operand.name}")
            machine.traffic.reads.append((operand, f"{name} of {operand.name}"))
            before.append(operand.read())
        else:
            before.append(operand.handle.data)
    if not isinstance(acc, Accumulator):
        acc = Accumulator(acc.handle.data, list(acc.shape))
    (m, k), (k2, n) = before[0].shape, before[1].shape
    if k != k2 or acc.shape != [m, n]:
        raise Misuse(f"{name}: {m} x {k} times {k2} x {n} into {acc.shape}")
    mma = Mma([a, b], before, acc, bool(number(use_acc)), name)
    acc.pending.append(mma)
    task.mmas.append(mma)
    if is_async:
        return acc
    return wait_mmas(machine, 0, (acc,))


def wait_mmas(machine: Any, num_outstanding: Any = 0, deps: Sequence[Any] | None = None):
    """warpgroup_mma_wait -> deps, those of which nothing is on its way as tensors."""
    if deps is None:
        raise Misuse("warpgroup_mma_wait needs deps")
    machine.scheduler.step()
    mmas = machine.scheduler.current.mmas
    while len(mmas) > number(num_outstanding):
        _finish(machine, mmas.pop(0))
    done = []
    for dep in deps:
        concrete = isinstance(dep, Accumulator) and not dep.pending
        done.append(make_tensor(dep.data, tl.float32) if concrete else dep)
    return done[0] if len(done) == 1 else tuple(done)


def _finish(machine: Any, mma: Mma) -> None:
    values = []
    for operand, before in zip(mma.operands, mma.before, strict=True):
        if isinstance(operand, SharedArray):
            machine.traffic.forget(machine.traffic.reads, operand)
            now = operand.read()
            if now.tobytes() != before.tobytes():
                raise Race(f"{mma.name}: {operand.name} was overwritten before the mma had read it")
            values.append(as_float(now, operand.dtype))
        else:
            values.append(as_float(operand.handle.data, operand.dtype))
    acc = mma.accumulator
    with np.errstate(all="ignore"):  # rows behind the last one are what was there
        product = np.matmul(*values, dtype=np.float32)
        acc.data = product + acc.data if mma.use_accumulator else product
    acc.pending.remove(mma)
