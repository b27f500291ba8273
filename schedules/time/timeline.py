"""Views of a simulated iteration: a Chrome/Perfetto trace, a picture with a row for each resource, and the
facts of `Plan.explain`: times, and what computes while messages travel, by layer."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from lancet_kernels.graph.costs.costs import collective_of
from lancet_kernels.graph.program import Kind, Phase, original_name, whole_name
from lancet_kernels.schedules.time.simulate import (
    COMPUTE,
    LINK,
    Event,
    Timeline,
    lower_bound_ms,
)

WEIGHT_GRADIENT, RECOMPUTATION = "weight gradient", "recomputation"
COLOURS = {
    "forward": "#4c78a8",
    "backward": "#72b7b2",
    WEIGHT_GRADIENT: "#54a24b",
    RECOMPUTATION: "#bab0ac",
    "optimizer": "#9d9d9d",
    "all-to-all": "#e45756",
    "all-reduce": "#f2b25c",
    "point to point": "#eeca3b",
    "other communication": "#b279a2",
}
_KIND_LABELS = {
    Kind.ALL_TO_ALL: "all-to-all",
    Kind.ALL_REDUCE: "all-reduce",
    Kind.POINT_TO_POINT: "point to point",
    Kind.OTHER_COMMUNICATION: "other communication",
}


def label(event: Event, weight_gradients: Collection[str]) -> str:
    """The legend entry of an event: on the link its kind; on compute its phase, "weight gradient" or
    "recomputation"."""
    if event.kind is not Kind.COMPUTE:
        return _KIND_LABELS[event.kind]
    if original_name(whole_name(event.name)) is not None:
        return RECOMPUTATION
    if event.phase is Phase.BACKWARD and whole_name(event.name) in weight_gradients:
        return WEIGHT_GRADIENT
    return event.phase.value


def save_trace(events: Sequence[Event], path: str | Path, weight_gradients: Collection[str] = ()) -> None:
    """Write a Chrome trace, for ui.perfetto.dev or chrome://tracing: a track per resource.

    Args: weight_gradients: names of the instructions that are categorized as dW.
    """
    entries: list[dict[str, Any]] = []
    for track, resource in enumerate(dict.fromkeys((COMPUTE, LINK, *(e.resource for e in events)))):
        on_track = {"pid": 0, "tid": track}
        entries.append({**on_track, "ph": "M", "name": "thread_name", "args": {"name": resource}})
        entries += [
            {
                **on_track,
                "ph": "X",
                "name": e.name,
                "cat": label(e, weight_gradients),
                # In microseconds.
                "ts": e.start_ms * 1e3,
                "dur": (e.end_ms - e.start_ms) * 1e3,
            }
            for e in events
            if e.resource == resource
        ]
    trace = {"traceEvents": entries, "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(trace), encoding="utf-8")


def save_picture(
    rows: Mapping[str, Sequence[Event]],
    path: str | Path,
    *,
    weight_gradients: Sequence[str] = (),
    title: str = "",
) -> None:
    """Draw timelines below each other on one time axis, each with a compute and a communication row.

    Args:
        rows: name (a strategy, "measured") -> its events.
        weight_gradients: names of the instructions that are drawn as dW.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    gradients = frozenset(weight_gradients)
    figure = Figure(figsize=(14, 1.3 + 1.25 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    used: set[str] = set()
    for axis, (name, events) in zip(axes, rows.items(), strict=True):
        length = max((e.end_ms for e in events), default=0.0)
        for computes, bottom in ((True, 1.05), (False, 0.0)):
            by_label: dict[str, list[tuple[float, float]]] = {}
            for e in events:
                if (e.resource == COMPUTE) is computes:
                    by_label.setdefault(label(e, gradients), []).append((e.start_ms, e.end_ms - e.start_ms))
            for what, spans in by_label.items():
                used.add(what)
                axis.broken_barh(spans, (bottom, 0.9), facecolors=COLOURS[what], linewidth=0)
        axis.axvline(length, color="black", linewidth=0.8)
        axis.text(length, 1.5, f" {length:.1f} ms", va="center", fontsize=9)
        axis.set_yticks([0.45, 1.5], ["link", "compute"], fontsize=8)
        axis.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=10, labelpad=8)
        axis.set_ylim(-0.1, 2.05)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    longest = max((e.end_ms for events in rows.values() for e in events), default=1.0)
    axes[-1].set_xlim(0, longest * 1.07)
    axes[-1].set_xlabel("milliseconds")
    figure.suptitle(title, fontsize=11)
    handles = [Patch(color=COLOURS[what], label=what) for what in COLOURS if what in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


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
            for i, idle in one.exposed.items() if one else ():
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
    """Computation beside each message of a simulated iteration, in the order of their start.

    Args: layers: instruction of the graph before it was cut -> path of its module. weight_gradients: names
        of instructions, of the same graph.
    """
    # One after the other, as compute is one resource.
    computed = [event for event in timeline.events if event.kind is Kind.COMPUTE]
    by_layer: dict[tuple[Kind, Phase, str], list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.kind is not Kind.COMPUTE:
            layer = "" if event.kind is Kind.ALL_REDUCE else layers.get(_uncut_name(event), "")
            by_layer[event.kind, event.phase, layer].append(event)
    result = []
    for (kind, phase, layer), messages in by_layer.items():
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
                    shares[work][layers.get(_uncut_name(event), "")] += both
        fillers = [Filler(work, tuple(ms), sum(ms.values())) for work, ms in shares.items()]
        fillers.sort(key=lambda filler: -filler.ms)
        ms = sum(message.end_ms - message.start_ms for message in messages)
        exposed = max(0.0, ms - sum(filler.ms for filler in fillers))
        result.append(Hiding(kind.value, phase.value, layer, len(messages), ms, exposed, tuple(fillers)))
    return tuple(result)


def _uncut_name(event: Event) -> str:
    """The instruction of the graph before it was cut."""
    name = whole_name(event.name)
    return original_name(name) or name
