"""What simulating a plan predicts of its iteration, and what computes while messages travel, by layer: the
facts that `Plan.explain` puts into words."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from lancet_kernels.graph.costs.costs import collective_of
from lancet_kernels.graph.program.program import Kind, Phase, original_name, whole_name
from lancet_kernels.schedules.time.simulate import Event, Timeline, exposed_intervals, lower_bound_ms
from lancet_kernels.schedules.time.timeline import WEIGHT_GRADIENT, label


@dataclass(frozen=True)
class Prediction:
    """The simulated iteration of a plan; of several microbatches, that of one in the mean."""

    iteration_ms: float = 0.0
    exposed_ms: float = 0.0
    """Communication time during which compute idles."""
    peak_memory_gb: float = 0.0
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


WEIGHT_GRADIENTS = "weight gradients"


@dataclass(frozen=True)
class Filler:
    """Computation of some layers while a message travels: `work` is a phase, "weight gradients" or
    "recomputation"."""

    work: str
    layers: tuple[str, ...]
    ms: float


@dataclass(frozen=True)
class Hiding:
    """The messages of one kind, phase and layer in a predicted iteration, and what computes meanwhile.

    layer: path of the module; "": messages of no layer, gradient all-reduces say. count: of messages.
    ms: the sum of their times, `exposed_ms` the part of it in which nothing computes. fillers: longest first;
    they and `exposed_ms` make up `ms`.
    """

    kind: str
    phase: str
    layer: str
    count: int
    ms: float
    exposed_ms: float
    fillers: tuple[Filler, ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Hiding:
        """The value from those of `asdict`, as lists."""
        fillers = tuple(Filler(f["work"], tuple(f["layers"]), f["ms"]) for f in data["fillers"])
        return cls(**{**data, "fillers": fillers})


def what_hides(
    timeline: Timeline, layers: Mapping[str, str], weight_gradients: Collection[str]
) -> tuple[Hiding, ...]:
    """What computes while each message of a simulated iteration travels, in the order of their start.

    Args: layers: instruction of the graph before it was cut -> path of its module. weight_gradients: names
        of instructions, of the same graph.
    """
    # One after the other, as compute is one resource.
    computed = [event for event in timeline.events if event.kind is Kind.COMPUTE]
    of_layer: dict[tuple[Kind, Phase, str], list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.kind is not Kind.COMPUTE:
            layer = "" if event.kind is Kind.ALL_REDUCE else layers.get(_of_graph(event), "")
            of_layer[event.kind, event.phase, layer].append(event)
    result = []
    for (kind, phase, layer), messages in of_layer.items():
        shares: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for message in messages:
            first = bisect_right(computed, message.start_ms, key=lambda event: event.end_ms)
            for event in islice(computed, first, None):
                if event.start_ms >= message.end_ms:
                    break
                both = min(event.end_ms, message.end_ms) - max(event.start_ms, message.start_ms)
                if both > 0:
                    work = label(event, weight_gradients)
                    work = WEIGHT_GRADIENTS if work == WEIGHT_GRADIENT else work
                    shares[work][layers.get(_of_graph(event), "")] += both
        fillers = [Filler(work, tuple(of), sum(of.values())) for work, of in shares.items()]
        fillers.sort(key=lambda filler: -filler.ms)
        ms = sum(message.end_ms - message.start_ms for message in messages)
        exposed = max(0.0, ms - sum(filler.ms for filler in fillers))
        result.append(Hiding(kind.value, phase.value, layer, len(messages), ms, exposed, tuple(fillers)))
    return tuple(result)


def _of_graph(event: Event) -> str:
    """The instruction of the graph before it was cut."""
    name = whole_name(event.name)
    return original_name(name) or name
