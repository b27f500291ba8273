"""How do several PEs run on one GPU at once? A stream each, SMs shared out, everything warm before it waits.

One process and one thread play all W PEs of `virtual_memories`. A kernel of one PE waits for kernels of the
others, so until all of them are launched nothing may make the host wait for the device, or the device for
the host:

- each PE has its own stream and, with default_overlap_config(..., pes_here=W), its share of the SMs: programs
  of all PEs are resident at once;
- the first use of anything is a hidden wait: Triton compiles, the driver loads a module, the caching
  allocator asks it for memory. So `warm_up` what will be played.

    pes = VirtualPes(2, "cuda")
    exchanges = [Exchange(memory, "layer", ...) for memory in pes.memories]
    pes.warm_up(play)          # play(rank): begins, launches, releases; asks the device for nothing
    results = pes.each(play)    # all PEs at once

On the CPU the interpreter runs one launch after the other: only what needs no later launch can be played.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar
from unittest import mock

import torch

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import overlap
from lancet_kernels.kernels.overlap import warming_up
from lancet_kernels.kernels.protocol.exchange import Exchange
from lancet_kernels.kernels.symmetric.memory import virtual_memories

T = TypeVar("T")


class VirtualPes:
    """W PEs on one device.

    Attributes:
        memories: the symmetric memory of each.
    """

    def __init__(self, world: int, device: torch.device | str) -> None:
        self.world, self.device = world, torch.device(device)
        if self.device.type == "cuda":
            _check_connections(world)
        self.memories = virtual_memories(world, self.device)
        self._streams = _streams(self.device, world) if self.device.type == "cuda" else []

    def on(self, rank: int) -> AbstractContextManager:
        """Inside, torch and Triton use the PE's stream."""
        return torch.cuda.stream(self._streams[rank]) if self._streams else nullcontext()

    def each(self, play: Callable[[int], T]) -> list[T]:
        """play(rank) of every PE, each on its stream; -> what they return.

        What the current stream did before is seen by all, and it waits for all of them; the host does not.
        """
        results = []
        with self._forked():
            for rank in range(self.world):
                with self.on(rank):
                    results.append(play(rank))
        return results

    @contextmanager
    def _forked(self) -> Iterator[None]:
        """What the current stream did before is seen by all PEs; afterwards it waits for all of them."""
        if not self._streams:
            yield
            return
        here = torch.cuda.current_stream(self.device)
        for stream in self._streams:
            stream.wait_stream(here)
        yield
        for stream in self._streams:
            here.wait_stream(stream)

    def warm_up(self, play: Callable[[int], object], *others: Any) -> None:
        """Do everything that play does the first time, but put nothing and wait for nobody.

        First without launching the overlap kernel and `others`, which are compiled side by side; then, if
        there are no others, with launches that have no tasks. To the exchanges these are two passes that all
        PEs skip: epochs go on, nothing is sent, no rows are occupied. Memory is a first time, too: warm up
        while what will be held meanwhile is held.
        """
        if not self._streams:
            return
        torch.cuda.synchronize(self.device)
        with warming_up(*others):
            self.each(play)
        torch.cuda.synchronize(self.device)
        if not others:
            with launched_without_tasks():
                self.each(play)
            torch.cuda.synchronize(self.device)


@contextmanager
def launched_without_tasks() -> Iterator[None]:
    """Inside, overlap kernels are launched as always, and end at once: nothing is sent, nothing waited for.

    What a driver does at the first launch of a kernel (memory for its stack, say) is done after that.
    """
    no_schedule = mock.patch.object(Exchange, "schedule")
    with no_schedule, mock.patch.object(overlap, "ALL_TASKS", 0):
        yield


def _check_connections(world: int) -> None:
    """Raise UserError if streams share a queue: a PE's launch would stand behind another's that waits."""
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    if not given.isdigit() or int(given) <= world:
        raise UserError(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            got=given,
            expected=f"more than {world}, for as many PEs on one device",
            do="set it to 32 before Python starts",
        )


@functools.cache
def _streams(device: torch.device, world: int) -> list[torch.cuda.Stream]:
    """The same ones for every VirtualPes: the memory that was freed on them is used again on them."""
    return [torch.cuda.Stream(device) for _ in range(world)]
