"""Times launches on the device with events: with a cold L2 cache, and without the time of the host.

For each sample, the device first sleeps as long as the host needs to launch everything, so that launch
overhead is not measured; then the L2 cache is overwritten; then event, work, event. Candidates are timed in
turn, so that clock rates and heat affect all of them equally, and they can be compared round by round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)
Value = TypeVar("Value")
# Cycles per ms: at least the clock of any GPU, so the device sleeps at least as long as requested.
CYCLES_PER_MS = 2_000_000


def in_turn(
    names: Iterable[Name],
    measure: Callable[[Name], Value],
    rounds: int,
    warmup: int,
    first_changes: bool = False,
) -> dict[Name, list[Value]]:
    """What `measure` gives for all names in turn, `rounds` times after `warmup` rounds, which do not count.

    Args: first_changes: from round to round, for whoever comes first finds the caches as the last one left
    them.
    """
    order = list(names)
    values: dict[Name, list[Value]] = {name: [] for name in order}
    for number in range(warmup + rounds):
        turn = number % len(order) if first_changes else 0
        for name in (*order[turn:], *order[:turn]):
            value = measure(name)
            if number >= warmup:
                values[name].append(value)
    return values


class Clock:
    """Measures on `device`; on the CPU (smoke runs) by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cold = None
        if device.type == "cuda":
            size = 4 * torch.cuda.get_device_properties(device).L2_cache_size
            self._cold = torch.empty(max(size, 64 << 20), dtype=torch.uint8, device=device)
        self._host_ms = 1.0
        self._start: torch.cuda.Event | None = None
        self._launched = 0.0

    def prepare(self) -> None:
        """Let the device sleep while the host launches, and empty its L2 cache. Nothing on a CPU."""
        if self._cold is not None:
            torch.cuda._sleep(int(CYCLES_PER_MS * (1.5 * self._host_ms + 0.2)))
            self._cold.zero_()

    def read(self) -> float:
        """Seconds, for readings in pairs: begin, end, begin, end. Only differences within a pair count.

        It can be used in place of time.perf_counter. The end waits for the device.
        """
        if self._cold is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        now = time.perf_counter()
        if self._start is None:
            self._start, self._launched = event, now
            return 0.0
        # A decaying maximum over the latest calls, so that one slow call has no lasting effect.
        self._host_ms = min(50.0, max((now - self._launched) * 1e3, 0.8 * self._host_ms))
        torch.cuda.synchronize(self.device)
        start, self._start = self._start, None
        return start.elapsed_time(event) * 1e-3

    def once(self, work: Callable[[], object]) -> float:
        """Milliseconds of one call. Waits for the device before and after, not within."""
        self.prepare()
        begin = self.read()
        work()
        return (self.read() - begin) * 1e3

    def rounds(
        self, contenders: Mapping[Name, Callable[[], object]], rounds: int, warmup: int
    ) -> dict[Name, list[float]]:
        """Time all contenders in turn, `rounds` times after `warmup` rounds. -> milliseconds by name."""
        return in_turn(contenders, lambda name: self.once(contenders[name]), rounds, warmup)
