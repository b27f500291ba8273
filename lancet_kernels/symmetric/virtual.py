"""Symmetric memory of several PEs in one process on one device: a whole protocol on one GPU, or on the CPU.

One thread plays all PEs, one after another: it allocates for each, then launches for each. So nothing here
waits. A kernel may: give each PE a stream of its own and launch all of them before anything synchronises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lancet_kernels.symmetric.memory import SymmetricMemory, disagreement


@dataclass
class _Heap:
    """What all PEs share: each request, the PE that made it first, and its copies [world]."""

    world: int
    device: torch.device
    requests: list[tuple[int, str]] = field(default_factory=list)
    copies: dict[int, list[Tensor]] = field(default_factory=dict)

    def copies_of(self, number: int, num_bytes: int) -> list[Tensor]:
        if number not in self.copies:
            self.copies[number] = [
                torch.zeros(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(self.world)
            ]
        return self.copies[number]


class VirtualMemory(SymmetricMemory):
    """PE `rank` of those that `virtual_memories` makes."""

    def __init__(self, heap: _Heap, rank: int):
        what = "one PE: no peers" if heap.world == 1 else f"{heap.world} PEs in one process"
        super().__init__(rank, heap.world, heap.device, f"virtual: {what}, on {heap.device}")
        self.shares_device = heap.world > 1
        self._heap = heap
        self._count = 0

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when what the device was doing for any PE is done. Launch for every PE before."""
        self._check_open()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _gather(self, request: str, value: Any = "") -> list[Any]:
        # One thread runs all PEs one after another, so they must bring the same.
        request = f"{request} {value}".rstrip()
        if self._count == len(self._heap.requests):
            self._heap.requests.append((self.rank, request))
        first, expected = self._heap.requests[self._count]
        if request != expected:
            raise disagreement({first: expected, self.rank: request})
        self._count += 1
        return [value]

    def _allocate(self, request: str, num_bytes: int) -> tuple[Tensor, list[int]]:
        copies = self._heap.copies_of(self._count - 1, num_bytes)
        return copies[self.rank], [copy.data_ptr() for copy in copies]

    def _free(self, together: bool) -> None:
        # The copies go with the last PE that has them.
        del self._heap


def virtual_memories(world: int, device: torch.device | str = "cpu") -> list[VirtualMemory]:
    """`world` PEs in this process, on `device`. Each allocates for itself, in any order of the PEs."""
    heap = _Heap(world, torch.device(device))
    return [VirtualMemory(heap, rank) for rank in range(world)]
