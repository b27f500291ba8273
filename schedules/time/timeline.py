"""Timelines of an iteration: a Chrome/Perfetto trace, and a picture with a row per resource."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lancet_kernels.graph.program.program import Kind, Phase, original_name, whole_name
from lancet_kernels.schedules.time.simulate import COMPUTE, LINK, Event

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
