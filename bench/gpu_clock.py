"""How long does a launch take on the device? Events around it, the L2 cache cold, the host out of the way.

A sample: the device first sleeps as long as the host needs to launch everything, so that launches are not
what is measured; then the L2 cache is overwritten; then event, work, event. Contenders take turns, so that
clocks and heat fall on all alike, and are compared round by round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Times = dict[str, list[float]]
# Cycles per ms: at least the clock of any GPU, so the device sleeps at least as long as it is told.
CYCLES_PER_MS = 2_000_000


class Clock:
    """Measures on `device`; on the CPU (smoke runs) by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cold = None
        if device.type == "cuda":
            size = 4 * torch.cuda.get_device_properties(device).L2_cache_size
            self._cold = torch.empty(max(size, 64 << 20), dtype=torch.uint8, device=device)
        self._host_ms = 1.0

    def once(self, work: Callable[[], object]) -> float:
        """Milliseconds of one call. Waits for the device before and after, not within."""
        if self._cold is None:
            begin = time.perf_counter()
            work()
            return (time.perf_counter() - begin) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(CYCLES_PER_MS * (1.5 * self._host_ms + 0.2)))
        self._cold.zero_()
        start.record()
        begin = time.perf_counter()
        work()
        end.record()
        host_ms = (time.perf_counter() - begin) * 1e3
        # Of the latest calls the longest, but a hiccup is forgotten.
        self._host_ms = min(50.0, max(host_ms, 0.8 * self._host_ms))
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end)

    def rounds(self, contenders: Mapping[str, Callable[[], object]], rounds: int, warmup: int) -> Times:
        """All contenders in turn, `rounds` times after `warmup` rounds. -> milliseconds by name."""
        taken: Times = {name: [] for name in contenders}
        for number in range(warmup + rounds):
            for name, work in contenders.items():
                elapsed_ms = self.once(work)
                if number >= warmup:
                    taken[name].append(elapsed_ms)
        return taken


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and the tenth and ninetieth percentile. Example: [3, 1, 2] -> median 2, p10 1, p90 3."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "p10": ordered[round(0.1 * last)],
        "p90": ordered[round(0.9 * last)],
        "rounds": len(ordered),
    }


def each_round(function: Callable[..., float], *columns: Sequence[float]) -> list[float]:
    """function(a, b, ...) for the values of each round; contenders of one round saw the same clocks."""
    return [function(*values) for values in zip(*columns, strict=True)]
