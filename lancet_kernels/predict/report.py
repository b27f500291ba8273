"""The answer as one self-contained HTML page: a script draws the figures of the embedded JSON."""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Any

from lancet_kernels.graph.costs.costs import INSIDE_NODES
from lancet_kernels.graph.program import Kind
from lancet_kernels.predict.answer import Answer, Simulated
from lancet_kernels.predict.search import SearchResult
from lancet_kernels.schedules.order.ordering import weight_gradients
from lancet_kernels.schedules.time.simulate import COMPUTE, LINK
from lancet_kernels.schedules.time.timeline import label

_FILES = resources.files("lancet_kernels.predict")
PUBLISHED = _FILES / "published.json"
"""Published measurements with their predictions, a file of `python -m bench.published --save`."""
MOST_EVENTS = 6000
"""Events of a timeline in the page: the first ones of the chain, about one microbatch of 48 layers."""


def report(answer: Answer, searched: SearchResult | None = None) -> str:
    """The page as HTML."""
    data = {
        "answer": answer.to_json(),
        "best": answer.best,
        "timelines": {
            name: _timeline(answer.strategies[name]) for name in dict.fromkeys(("none", answer.best))
        },
        "search": None if searched is None else searched.to_json(),
        "published": json.loads(PUBLISHED.read_text(encoding="utf-8"))["rows"],
    }
    page = (_FILES / "report.html").read_text(encoding="utf-8")
    # In a script element "</script" ends the data, and "<!--<script" the script behind it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return page.replace("{{question}}", html.escape(answer.question.describe())).replace("{{data}}", text)


def _timeline(simulated: Simulated) -> dict[str, Any]:
    """Events as [name, lane, start, milliseconds, index into `kinds`]; lanes are computation, messages, and
    messages inside nodes."""
    kinds: dict[str, int] = {}
    program = simulated.program
    held = frozenset(program.instructions[i].name for i in weight_gradients(program))
    rows = []
    for event in sorted(simulated.events, key=lambda event: event.start_ms)[:MOST_EVENTS]:
        kind = label(event, held)
        if event.kind is Kind.OTHER_COMMUNICATION:
            kinds_of = {"all_gather": "all-gather", "all_to_all": "all-to-all"}
            kind = next((kind for name, kind in kinds_of.items() if name in event.name), "reduce-scatter")
        number = kinds.setdefault(kind, len(kinds))
        lane = (COMPUTE, LINK, INSIDE_NODES).index(event.resource)
        rows.append(
            [event.name, lane, round(event.start_ms, 4), round(event.end_ms - event.start_ms, 4), number]
        )
    return {"kinds": list(kinds), "events": rows}
