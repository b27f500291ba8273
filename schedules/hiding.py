"""What computes while messages travel, by layer: the facts that `Plan.explain` puts into words."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lancet_kernels.graph.program.program import Kind, Phase, original_name
from lancet_kernels.graph.rules.part_instruction import whole_name
from lancet_kernels.schedules.time.simulate import Event, Timeline
from lancet_kernels.schedules.time.timeline import WEIGHT_GRADIENT, label

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
    found: dict[tuple[Kind, Phase, str], list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.kind is not Kind.COMPUTE:
            layer = "" if event.kind is Kind.ALL_REDUCE else layers.get(_of_graph(event), "")
            found[event.kind, event.phase, layer].append(event)
    result = []
    for (kind, phase, layer), messages in found.items():
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
