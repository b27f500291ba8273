"""How long does work on a GPU take? Events on the stream, a cold L2, and all rivals in turn.

Interleaved: one run of each, then the next round, so that whatever the clock and the temperature do falls on
all alike. Medians, with the spread beside them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch

# More than the L2 of any GPU so far (B200: 126 MB).
FLUSH_BYTES = 256 << 20


class Flush:
    """Empties the L2 of a GPU by writing more than it holds; does nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = None
        if device.type == "cuda":
            self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def __call__(self) -> None:
        if self._buffer is not None:
            self._buffer.zero_()


class EventClock:
    """A clock in seconds for begin, end, begin, end, ...: what the stream did between, by CUDA events.

    Example: clock() -> 0.0; work(); clock() -> 0.0012. So it can stand in for time.perf_counter where only
    differences of two readings count.
    """

    def __init__(self) -> None:
        self._begin: torch.cuda.Event | None = None

    def __call__(self) -> float:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if self._begin is None:
            self._begin = event
            return 0.0
        event.synchronize()
        begin, self._begin = self._begin, None
        return begin.elapsed_time(event) * 1e-3


@dataclass(frozen=True)
class Timed:
    """Milliseconds: median, and the quartiles around it."""

    median: float
    low: float
    high: float


def in_turn(
    runs: Mapping[Hashable, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = 15,
    warmup: int = 2,
    clock: Callable[[], float] | None = None,
) -> dict[Hashable, Timed]:
    """Time all of them `rounds` times after `warmup` rounds, in turn, each with a cold L2.

    Args: clock: seconds; None: `EventClock`.
    """
    flush, clock = Flush(device), clock or EventClock()
    taken: dict[Hashable, list[float]] = {name: [] for name in runs}
    for round_number in range(warmup + rounds):
        for name, run in runs.items():
            flush()
            begin = clock()
            run()
            elapsed = clock() - begin
            if round_number >= warmup:
                taken[name].append(elapsed * 1e3)
    return {name: _timed(times) for name, times in taken.items()}


def _timed(times: list[float]) -> Timed:
    if len(times) == 1:
        return Timed(times[0], times[0], times[0])
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timed(median, low, high)
