"""When do others see what a partition stores to global memory? At the latest possible time, or earlier.

A store of a block is made by many threads. It is on its way until it lands at a random time, and nothing but
these makes it land before:

    the partition's own access to the same addresses
    a release atomic of the partition, if a barrier of the partition lies between (the atomic is made by one
    thread, which can publish the stores of others only after a barrier); of one element, also without
    an mbarrier arrive (before which Triton 3.6 and 3.9 put a barrier, seen in PTX), and after it a release
    atomic of any partition of the program; until then partitions of the same program see the store
    the end of the kernel

So a signal that is sent too early is seen with the old values at the place it announces.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from triton._C.libtriton import interpreter as native
from triton._C.libtriton import ir

from tests.lancet_kernels.kernels.hopper.gluon_emulator.scheduler import Scheduler, Task

RELEASES = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
ACQUIRES = (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
STORE_WEIGHT = 0.02


@dataclass(eq=False)
class Program:
    """What the partitions of a program share.

    Attributes:
        name: for reports. stores: on their way, of all its partitions.
    """

    name: str
    stores: list[Store] = field(default_factory=list)


@dataclass(eq=False)
class Store:
    """A store on its way. ordered: behind a barrier of its partition. shared: an mbarrier told the others."""

    program: Program
    task: Task
    pointers: np.ndarray
    values: np.ndarray
    mask: np.ndarray
    ordered: bool = False
    shared: bool = False
    weight: float = STORE_WEIGHT

    def __post_init__(self) -> None:
        used = self.pointers[self.mask]
        self.first, self.last = int(used.min()), int(used.max()) + self.values.itemsize

    def overlaps(self, first: int, last: int) -> bool:
        return first < self.last and self.first < last

    def land(self) -> None:
        """With what the program stored there before, in order; once."""
        stores = self.program.stores
        for store in stores[: stores.index(self) + 1] if self in stores else ():
            if store.overlaps(self.first, self.last):
                stores.remove(store)
                native.store(store.pointers, store.values, store.mask)


class GlobalMemory:
    """Stands between Triton's interpreter and the memory: its methods replace those of the builder."""

    HOOKS = (
        "create_masked_load create_masked_store create_atomic_rmw create_atomic_cas create_barrier"
    ).split()

    def __init__(self, scheduler: Scheduler, builder: Any) -> None:
        self.scheduler = scheduler
        self.real = {name: getattr(builder, name) for name in self.HOOKS}

    def create_masked_load(self, pointers, mask, *rest, **options):
        self.scheduler.step()
        self._meet(pointers.data, mask.data)
        return self.real["create_masked_load"](pointers, mask, *rest, **options)

    def create_masked_store(self, pointers, value, mask, *_, **__):
        task = self.scheduler.current
        self.scheduler.step()
        mask = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        if mask.any():
            values = np.broadcast_to(value.data, pointers.data.shape)
            store = Store(task.program, task, pointers.data.copy(), values.copy(), mask.copy())
            task.program.stores.append(store)
            self.scheduler.operations.append(store)
            task.polled = None

    def create_atomic_rmw(self, kind, pointers, value, mask, semantic, scope):
        run = lambda: self.real["create_atomic_rmw"](kind, pointers, value, mask, semantic, scope)  # noqa: E731
        return self._atomic(run, pointers, mask.data, semantic)

    def create_atomic_cas(self, pointers, compare, value, semantic, scope):
        run = lambda: self.real["create_atomic_cas"](pointers, compare, value, semantic, scope)  # noqa: E731
        return self._atomic(run, pointers, np.ones_like(pointers.data, dtype=bool), semantic)

    def _atomic(self, run, pointers, mask, semantic):
        self.scheduler.step()
        self._meet(pointers.data, mask)
        if semantic in RELEASES:
            self._publish()
        before = run()
        if semantic in ACQUIRES:
            self.scheduler.current.acquired = True
        zero = np.zeros_like(before.data)
        after = native.load(
            pointers.data, np.broadcast_to(mask, pointers.data.shape).copy(), zero, zero.dtype
        )
        if np.array_equal(after, np.where(mask, before.data, zero)):
            self.scheduler.polled((pointers.data.tobytes(), after.tobytes()))
        else:
            self.scheduler.changed()
        return before

    def create_barrier(self) -> None:
        """All threads of the partition have come here."""
        task = self.scheduler.current
        for store in task.program.stores:
            store.ordered = store.ordered or store.task is task

    def arrive(self) -> None:
        """Others of the program that see the arrival see what the partition stored before it."""
        self.create_barrier()
        task = self.scheduler.current
        for store in task.program.stores:
            store.shared = store.shared or store.task is task

    def flush(self, program: Program) -> None:
        """The kernel ends."""
        for store in list(program.stores):
            self.scheduler.land(store)

    def _meet(self, pointers: np.ndarray, mask: np.ndarray) -> None:
        """An access of a task lands what its program may see there."""
        task = self.scheduler.current
        used = pointers[np.broadcast_to(mask, pointers.shape).astype(bool)]
        if not used.size:
            return
        first, last = int(used.min()), int(used.max()) + 8
        for store in list(task.program.stores):
            if (store.task is task or store.shared) and store.overlaps(first, last):
                self.scheduler.land(store)

    def _publish(self) -> None:
        task = self.scheduler.current
        for store in list(task.program.stores):
            mine = store.task is task and (store.ordered or store.values.size == 1)
            if mine or store.shared:
                self.scheduler.land(store)
