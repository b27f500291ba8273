"""What simulating a plan predicts of its iteration."""

from __future__ import annotations

from dataclasses import dataclass

from lancet_kernels.schedules.time.simulate import Timeline, lower_bound_ms


@dataclass(frozen=True)
class Prediction:
    """The simulated iteration of a plan."""

    iteration_ms: float
    exposed_ms: float
    """Communication time during which compute idles."""
    peak_memory_gb: float
    lower_bound_ms: float = 0.0
    """A bound for every order of this Program: the compute time, the link time, or the critical path."""

    @classmethod
    def of(cls, timeline: Timeline) -> Prediction:
        times = timeline.times
        ms = [end - start for start, end in zip(times.start, times.end, strict=True)]
        bound = lower_bound_ms(timeline.program, ms)
        return cls(timeline.iteration_ms, timeline.exposed_ms, timeline.peak_memory_bytes / 1e9, bound)
