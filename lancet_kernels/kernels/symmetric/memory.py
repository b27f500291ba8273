"""Symmetric memory: named regions that every PE has, and the addresses by which PEs write into them.

    memory = create(group, device)
    rows = memory.allocate("rows", (E, C, D), torch.bfloat16)      # collective, zero-filled
    arrived = memory.allocate("arrived", (E,), torch.int64)        # signal words, only ever growing
    kernel[grid](rows.local, rows.peers, arrived.local, arrived.peers, ...)
    memory.barrier()

`rows.local` is this PE's copy. `rows.peers[p]` is the address of PE p's copy as this PE reaches it:
what is stored there arrives at p, also while p runs. 0: no pointer reaches p (then NVSHMEM's puts do).

With `VirtualMemory` one thread plays several PEs on a device: it allocates for each, then launches for each.
Kernels may wait for peers if each PE has its own stream, and all are launched before anything synchronises.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lancet_kernels.errors import UserError

# Every copy starts at a multiple of this many bytes and has at least as many, so that none has address 0.
ALIGNMENT = 16


@dataclass(eq=False)
class Region:
    """A named region: this PE's copy, of the shape and dtype asked for, and where all copies are.

    peers: int64 [world], on the device: the base address of each PE's copy; this PE's own included.
    After the memory is closed, `local` and `peers` raise UserError. Code that kept `peers` must not use it.
    """

    name: str
    local: Tensor = field(repr=False)
    peers: Tensor = field(repr=False)

    def __getattr__(self, attribute: str) -> Tensor:
        # Python calls this only for attributes that do not exist: the two that `_forget` deletes.
        if attribute in ("local", "peers"):
            raise _closed(f"region {self.name!r}")
        raise AttributeError(attribute)

    def _forget(self) -> None:
        del self.local, self.peers


class SymmetricMemory(ABC):
    """The regions of one PE among `world`; created by `create`, or by one of the implementations.

    Attributes:
        rank, world: this PE's number, and how many there are.
        device: where the regions are. reason: why this implementation, in words.
        far: has any PE a peer that no pointer reaches? The same on every PE; set by the first region.
        shares_device: do kernels of other PEs run on the device beside those of this one?
    """

    shares_device = False

    def __init__(self, rank: int, world: int, device: torch.device, reason: str):
        self.rank, self.world, self.device, self.reason = rank, world, device, reason
        self.far = False
        self._regions: dict[str, Region] = {}
        # What the addresses of peers need beside this PE's copies. Peers keep what they have mapped.
        self._held: list[Any] = []
        self._open = True

    @property
    def kind(self) -> str:
        """The implementation: "torch", "nvshmem", "shared" or "virtual"; `reason` begins with it."""
        return self.reason.partition(":")[0]

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Region:
        """A region of this shape on every PE, filled with zeros. Collective: returns when every PE can put.

        Raises UserError, on every PE, if PEs ask for different regions or in a different order, the name is
        taken or there is no room; CommunicationError if a PE stays away.
        """
        self._check_open()
        # Checks come after the meeting: an error of this PE alone before it would leave the others waiting.
        shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        request = f"allocate {name!r} {list(shape)} {str(dtype).removeprefix('torch.')}"
        self._gather(request)
        if name in self._regions:
            raise UserError(
                f"symmetric memory: {request}",
                got="a name that exists already",
                expected="a new name for each region",
                do="keep the region of the first call, or choose another name",
            )
        if not all(isinstance(n, int) and n >= 0 for n in shape) or not isinstance(dtype, torch.dtype):
            raise UserError(
                "symmetric memory",
                got=request,
                expected="a shape of integers that are not negative, and a torch dtype",
                do="correct the call",
            )
        num_bytes = math.prod(shape) * dtype.itemsize
        room = max(ALIGNMENT, -(-num_bytes // ALIGNMENT) * ALIGNMENT)
        raw, addresses = self._allocate(request, room)
        region = Region(
            name,
            raw[:num_bytes].view(dtype).view(shape),
            torch.tensor(addresses, dtype=torch.int64, device=self.device),
        )
        self._regions[name] = region
        return region

    def largest(self, value: int) -> int:
        """The largest of the values that the PEs bring. Collective."""
        self._check_open()
        return max(self._gather("largest", value))

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when every PE is here and what its device was doing is done.

        Raises CommunicationError, naming the PEs that did not come, after `timeout_s` (None: as at creation).
        Of PEs in one process each launches before.
        """
        self._check_open()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Free all regions; may be called twice. Does not wait for peers, which may still write into them."""
        if self._open:
            self._open = False
            for region in self._regions.values():
                region._forget()
            self._regions.clear()
            self._held.clear()

    def _check_open(self) -> None:
        if not self._open:
            raise _closed("symmetric memory")

    @abstractmethod
    def _gather(self, request: str, value: Any = "") -> list[Any]:
        """The values (JSON) that all PEs bring. Raises on every PE, unless each makes this request now."""

    @abstractmethod
    def _allocate(self, request: str, num_bytes: int) -> tuple[Tensor, list[int]]:
        """-> (this PE's copy, uint8 and zero; the addresses of all copies).

        `_held` gets what must stay until the memory is closed.
        """


def disagreement(asked: dict[int, str]) -> UserError:
    """The error for PEs that ask for different things. `asked`: what each rank asked for."""
    return UserError(
        "symmetric memory",
        got=by_rank(asked),
        expected="the same request from every rank",
        do="make the same calls in the same order, with the same arguments, on every rank",
    )


def by_rank(texts: dict[int, str]) -> str:
    """Equal texts once, with their ranks. {0: "a", 1: "b", 2: "a"} gives "a (rank 0, 2), b (rank 1)"."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text, []).append(rank)
    return ", ".join(f"{text} (rank {', '.join(map(str, who))})" for text, who in ranks.items())


def _closed(what: str) -> UserError:
    return UserError(
        what,
        got="a call after close()",
        expected="calls before close()",
        do="close the memory when nothing needs it",
    )


class VirtualMemory(SymmetricMemory):
    """PE `rank` of those that `virtual_memories` makes.

    requests: of all of them: which PE made it first, what it asked for, its copies [world] if it is a region.
    """

    def __init__(
        self, rank: int, world: int, device: torch.device, requests: list[tuple[int, str, list[Tensor]]]
    ) -> None:
        what = "one PE: no peers" if world == 1 else f"{world} PEs in one process"
        super().__init__(rank, world, device, f"virtual: {what}, on {device}")
        self.shares_device = world > 1
        # The copies go with the last PE that has them.
        self._held.append(requests)
        self._requests, self._count = requests, 0

    def _gather(self, request: str, value: Any = "") -> list[Any]:
        # One thread runs all PEs one after another, so they must bring the same.
        request = f"{request} {value}".rstrip()
        if self._count == len(self._requests):
            self._requests.append((self.rank, request, []))
        first, expected, _ = self._requests[self._count]
        if request != expected:
            raise disagreement({first: expected, self.rank: request})
        self._count += 1
        return [value]

    def _allocate(self, request: str, num_bytes: int) -> tuple[Tensor, list[int]]:
        *_, copies = self._requests[self._count - 1]
        while len(copies) < self.world:
            copies.append(torch.zeros(num_bytes, dtype=torch.uint8, device=self.device))
        return copies[self.rank], [copy.data_ptr() for copy in copies]


def virtual_memories(world: int, device: torch.device | str = "cpu") -> list[VirtualMemory]:
    """`world` PEs in this process, on `device`. Each allocates for itself, in any order of the PEs."""
    requests: list[tuple[int, str, list[Tensor]]] = []
    return [VirtualMemory(rank, world, torch.device(device), requests) for rank in range(world)]
