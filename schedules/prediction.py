"""What simulating a plan predicts of its iteration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from lancet_kernels.graph.costs.costs import collective_of
from lancet_kernels.schedules.time.simulate import Timeline, exposed_intervals, lower_bound_ms


@dataclass(frozen=True)
class Prediction:
    """The simulated iteration of a plan; of several microbatches, that of one in the mean."""

    iteration_ms: float
    exposed_ms: float
    """Communication time during which compute idles."""
    peak_memory_gb: float
    lower_bound_ms: float = 0.0
    """A bound for every order of this Program: the compute time, the link time, or the critical path."""
    computation_ms: float = 0.0
    """It and `exposed_by` make up `iteration_ms`."""
    exposed_by: Mapping[str, float] = field(default_factory=dict)
    """`exposed_ms` by collective; where several are exposed at once, the one that started first counts."""

    @classmethod
    def of(cls, timeline: Timeline) -> Prediction:
        times, instructions = timeline.times, timeline.program.instructions
        ms = timeline.durations_ms
        bound = lower_bound_ms(timeline.program, ms)
        exposed_by: dict[str, float] = defaultdict(float)
        for one, number in ((times, 1), (times.before, times.others)):
            for i, idle in exposed_intervals(one).items() if one else ():
                exposed_by[collective_of(instructions[i])] += idle * number / (1 + times.others)
        return cls(
            timeline.iteration_ms,
            timeline.exposed_ms,
            timeline.peak_memory_bytes / 1e9,
            bound,
            computation_ms=sum(ms[i] for i in times.compute),
            exposed_by={name: exposed_by[name] for name in sorted(exposed_by)},
        )
