"""Collectives on CUDA: how long each travels and how long computation waits, by events on its streams.

Where a process stands for one of several ranks, they also take as long as on an emulated wire. That is a
stream of its own: it waits for each collective in the order in which they were issued, and then sleeps as
long as a wire would carry it. Unlike on CPU ranks, a sum does not give way to an all-to-all that enters
later: nor does it on a communicator of NCCL.

What sleeps is the driver's thread for host functions: no kernel may wait on the GPU. A kernel of one warp
that did so slowed the GEMMs beside it: in `large_step` of `bench/gpu/steps.py`, the order `lancet-dw`,
which cuts nothing, computed 23 ms longer than `none` beside that kernel, and 3 ms beside a host function
(H100, 2026-11-28). The step `wire` there is to measure GEMMs alone and beside a message.
"""

from __future__ import annotations

import ctypes
from collections import deque

import torch

from lancet_kernels.ops.comm.waiting import Waitable

_LONGEST_SLEEP_NS = 60_000_000_000
"""No message takes as long."""
_MOST_TIMES = 1 << 16
"""Bound on the times that are kept unread."""


class CudaStreams:
    """The stream on which the collectives of one device arrive, and those that ended."""

    def __init__(self, device: torch.device) -> None:
        self.wire = torch.cuda.Stream(device)
        self.ended: deque[CudaTransfer] = deque(maxlen=_MOST_TIMES)

    def take_ended(self) -> list[CudaTransfer]:
        """The collectives that ended since the last call. Waits for the device."""
        if self.ended:
            torch.cuda.synchronize()
        ended = [*self.ended]
        self.ended.clear()
        return ended


class CudaTransfer:
    """One collective on CUDA, from its start until `finish`.

    Args: wire_ns: how long an emulated wire carries it; 0: there is none.
    """

    def __init__(self, streams: CudaStreams, collective: str, wire_ns: int, is_urgent: bool) -> None:
        self.collective, self.is_urgent = collective, is_urgent
        self._streams, self._wire_ns = streams, wire_ns
        # When it starts, is complete, is first waited for, and when that wait ends.
        self._begin, self._arrived, self._asked, self._here = (
            torch.cuda.Event(enable_timing=True) for _ in range(4)
        )
        self._begin.record()

    def watch(self, work: Waitable) -> None:
        """Record when it is complete, on a stream that does nothing else: the compute stream may wait later.

        NCCL keeps the buffer that it sends alive until the first wait; after that the caller has to, until
        `finish`.
        """
        with torch.cuda.stream(self._streams.wire):
            work.wait()
            if self._wire_ns:
                sleep_on_stream(self._streams.wire, self._wire_ns)
            self._arrived.record()

    def finish(self, work: Waitable) -> None:
        """Let the compute stream wait for it."""
        self._asked.record()
        work.wait()
        torch.cuda.current_stream().wait_event(self._arrived)
        self._here.record()
        self._streams.ended.append(self)

    def times(self) -> tuple[float, float]:
        """Milliseconds that it travelled, and that the compute stream waited for it, after it has ended."""
        return self._begin.elapsed_time(self._arrived), self._asked.elapsed_time(self._here)


def sleep_on_stream(stream: torch.cuda.Stream, duration_ns: int) -> None:
    """Delay what is issued to the stream later, by 60 s at most, without a kernel on the GPU."""
    driver, libc = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
    microseconds = ctypes.c_void_p(round(min(duration_ns, _LONGEST_SLEEP_NS) / 1000))
    # usleep(microseconds) has the signature of a host function but for its result.
    function = ctypes.cast(libc.usleep, ctypes.c_void_p)
    if code := driver.cuLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), function, microseconds):
        raise RuntimeError(f"cuLaunchHostFunc: error {code} of the CUDA driver")
