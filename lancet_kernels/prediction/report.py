"""The answer as one HTML page that needs nothing else: no network, no framework, no font.

The figures are those of the answer's JSON, which the page carries; a script draws them.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from lancet_kernels.graph.program.program import Kind
from lancet_kernels.prediction.answer import Answer, Simulated
from lancet_kernels.prediction.search import Found
from lancet_kernels.prediction.timelines import events_of
from lancet_kernels.schedules.time.clock import COMPUTE
from lancet_kernels.schedules.time.timeline import label

MOST_EVENTS = 6000
"""Events of a timeline in the page: the first ones of the chain, about one microbatch of 48 layers."""


def save_report(
    answer: Answer, path: str | Path, found: Found | None = None, published: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Write the page. Args: published: rows of published measurements with `name`, `measured`, `predicted`,
    `error`, `fitted`."""
    Path(path).write_text(report(answer, found, published), encoding="utf-8")


def report(answer: Answer, found: Found | None = None, published: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page as HTML."""
    data = {
        "answer": answer.to_json(),
        "best": answer.best,
        "timelines": {
            name: _timeline(answer.strategies[name]) for name in dict.fromkeys(("none", answer.best))
        },
        "search": None if found is None else found.to_json(),
        "published": [dict(row) for row in published],
    }
    page = (resources.files("lancet_kernels.prediction") / "report.html").read_text(encoding="utf-8")
    # In a script element, only "</" could end the data.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return page.replace("{{question}}", html.escape(answer.question.describe())).replace("{{data}}", text)


def _timeline(simulated: Simulated) -> dict[str, Any]:
    """Events as [name, lane, start, milliseconds, kind], with kinds as numbers of `kinds`."""
    kinds: dict[str, int] = {}
    held = {simulated.step.program.instructions[i].name for i in simulated.weight_gradients}
    rows = []
    for event in sorted(events_of(simulated), key=lambda event: event.start_ms)[:MOST_EVENTS]:
        kind = label(event, frozenset(held))
        if event.kind is Kind.OTHER_COMMUNICATION:
            kind = "all-gather" if "all_gather" in event.name else "reduce-scatter"
        number = kinds.setdefault(kind, len(kinds))
        lane = 0 if event.resource == COMPUTE else 1
        rows.append(
            [event.name, lane, round(event.start_ms, 4), round(event.end_ms - event.start_ms, 4), number]
        )
    return {"kinds": list(kinds), "events": rows}
