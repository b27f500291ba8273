"""Collectives on CUDA: how long each travels and how long computation waits, by events on its streams.

Where a process stands for one of several ranks, they also take as long as on an emulated wire:

    stream       what it does with a collective
    entry        waits for its result; an urgent one takes the wire
    waiting      waits for its result, one that is not urgent takes the wire; waits for its end on the wire.
                 One stream for urgent ones, one for the others
    computation  where the result is read, waits for the event behind that

None of them computes: each kernel there is one program (`kernels.wire`), which waits for the GPU's timer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lancet_kernels.ops.comm.waiting import Waitable

_SLOTS = 4096
"""More messages than can be under way at a time."""
_MOST_TIMES = 1 << 16
"""Times that nobody reads: only so many are kept."""


class CudaStreams:
    """The streams of the collectives of one device, its emulated wire, and the collectives that ended."""

    def __init__(self, device: torch.device) -> None:
        self.entry, self.urgent, self.other = (torch.cuda.Stream(device) for _ in range(3))
        self.free_at = torch.zeros(1, dtype=torch.int64, device=device)
        self._ends = torch.zeros(_SLOTS, dtype=torch.int64, device=device)
        self._messages = 0
        self._ended: deque[CudaTransfer] = deque(maxlen=_MOST_TIMES)

    def next_end(self) -> torch.Tensor:
        """[1] int64, for when the next message has arrived."""
        self._messages += 1
        return self._ends[self._messages % _SLOTS :][:1]

    def ended(self, transfer: CudaTransfer) -> None:
        """Computation has waited for it."""
        self._ended.append(transfer)

    def times(self) -> list[TransferTimes]:
        """The times of the collectives that ended since the last call. Waits for the device."""
        if self._ended:
            torch.cuda.synchronize()
        times = [transfer.times() for transfer in self._ended]
        self._ended.clear()
        return times


class TransferTimes(NamedTuple):
    """How long a collective travelled, and how long the compute stream waited for it."""

    collective: str
    is_urgent: bool
    travelled_ms: float
    waited_ms: float


@dataclass
class _Events:
    """When one transfer starts, is complete, is first waited for, and when that wait ends."""

    begin: torch.cuda.Event
    arrived: torch.cuda.Event
    asked: torch.cuda.Event
    here: torch.cuda.Event


class CudaTransfer:
    """One collective on CUDA, from its start until `finish`.

    Args: wire_ns: how long an emulated wire carries it; 0: there is none.
    """

    def __init__(self, streams: CudaStreams, collective: str, wire_ns: int, is_urgent: bool) -> None:
        self.collective, self.is_urgent = collective, is_urgent
        self._streams, self._wire_ns = streams, wire_ns
        self._events = _Events(*(torch.cuda.Event(enable_timing=True) for _ in range(4)))
        self._events.begin.record()

    def watch(self, work: Waitable) -> None:
        """Record when it is complete, on a stream that does nothing else: the compute stream may wait later.

        NCCL keeps the buffer that it sends alive until the first wait; after that the caller has to, until
        `finish`.
        """
        streams = self._streams
        waiting = streams.urgent if self.is_urgent else streams.other
        end = streams.next_end()
        if self._wire_ns and self.is_urgent:
            with torch.cuda.stream(streams.entry):
                work.wait()
                _take_wire(streams.free_at, end, self._wire_ns, urgent=True)
            waiting.wait_stream(streams.entry)
        with torch.cuda.stream(waiting):
            work.wait()
            if self._wire_ns and not self.is_urgent:
                _take_wire(streams.free_at, end, self._wire_ns, urgent=False)
            if self._wire_ns:
                _await_wire(end)
            self._events.arrived.record()

    def finish(self, work: Waitable) -> None:
        """Let the compute stream wait for it."""
        self._events.asked.record()
        work.wait()
        torch.cuda.current_stream().wait_event(self._events.arrived)
        self._events.here.record()
        self._streams.ended(self)

    def times(self) -> TransferTimes:
        """How long it took, after it has ended."""
        events = self._events
        travelled_ms = events.begin.elapsed_time(events.arrived)
        return TransferTimes(
            self.collective, self.is_urgent, travelled_ms, events.asked.elapsed_time(events.here)
        )


def _take_wire(free_at: torch.Tensor, end: torch.Tensor, wire_ns: int, urgent: bool) -> None:
    # Imported here, because a CPU needs no Triton.
    from lancet_kernels.kernels.runtime import launch
    from lancet_kernels.kernels.wire import take_free_wire_kernel, take_wire_kernel

    kernel = take_wire_kernel if urgent else take_free_wire_kernel
    launch(kernel, (1,), free_ptr=free_at, end_ptr=end, wire_ns=wire_ns, num_warps=1)


def _await_wire(end: torch.Tensor) -> None:
    from lancet_kernels.kernels.runtime import launch
    from lancet_kernels.kernels.wire import await_wire_kernel

    launch(await_wire_kernel, (1,), end_ptr=end, num_warps=1)
