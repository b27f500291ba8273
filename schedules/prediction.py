"""What simulating a plan predicts of its iteration, and what of it no order could hide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lancet_kernels.graph.costs.costs import collective_of
from lancet_kernels.graph.program.program import Kind, Program
from lancet_kernels.schedules.time.clock import link_of
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


def exposed_bounds(program: Program, ms: Sequence[float]) -> dict[str, float]:
    """By collective, milliseconds of it during which compute idles in every order.

    A message is hidden by computation that no path connects with it; what is longer than all of that is
    exposed, for each message alone and for all of a kind together. Nothing is said where messages travel on
    several links, because what two of them expose at once counts for one.

    Args: ms: durations by position.
    """
    messages = [i for i, x in enumerate(program.instructions) if x.kind.is_communication]
    if len({link_of(program.instructions[i]) for i in messages}) > 1:
        return {}
    computes = [x.kind is Kind.COMPUTE for x in program.instructions]
    compute_ms = np.where(computes, ms, 0.0)

    def bits(bitset: int) -> np.ndarray:
        """[positions] of truth values."""
        raw = np.frombuffer(bitset.to_bytes((len(ms) + 7) // 8, "little"), dtype=np.uint8)
        return np.unpackbits(raw, count=len(ms), bitorder="little").astype(bool)

    alone: dict[str, float] = {}
    sent_ms: dict[str, float] = {}
    hides: dict[str, np.ndarray] = {}
    for i in messages:
        kind = collective_of(program.instructions[i])
        beside = bits(program.reachability.independent(i))
        alone[kind] = alone.get(kind, 0.0) + max(0.0, ms[i] - float(compute_ms @ beside))
        sent_ms[kind] = sent_ms.get(kind, 0.0) + ms[i]
        hides[kind] = beside if kind not in hides else hides[kind] | beside
    together = {kind: sent_ms[kind] - float(compute_ms @ hides[kind]) for kind in sent_ms}
    return {kind: max(alone[kind], together[kind]) for kind in sorted(sent_ms)}
