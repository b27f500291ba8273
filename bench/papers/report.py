"""Reproductions of papers as text, JSON and pictures.

A paper is a module with TITLE, ASSUMPTIONS and FIGURES (that can be chosen), and functions

    simulate(figures, run) -> data     a JSON object; `run` runs calls, here or in other processes
    quantities(data)                   the numbers of the paper's claims (claims.json), by name
    exhibits(data)                     tables and charts

and optionally `timelines(path)`, which draws timelines.
"""

from __future__ import annotations

import json
import math
import operator
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from string import Formatter
from types import ModuleType
from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm

from lancet_kernels.cli import aligned
from lancet_kernels.timing import cpu_cores

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Chart:
    """A chart of rows.

    kind: "bars" beside each other, "stack" on top of each other, or "lines". at: columns of the labels on the
    x axis. series: columns, or mappings in one (`flat`). panels: columns; each combination of their values
    has its own axes.
    """

    kind: str
    at: tuple[str, ...]
    series: tuple[str, ...]
    panels: tuple[str, ...] = ()

    def split(self, rows: Sequence[Row]) -> dict[str, list[Row]]:
        """Title of a panel -> its rows."""
        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(", ".join(str(row[key]) for key in self.panels), []).append(row)
        return groups

    def draw(self, panel: Any, rows: Sequence[Row]) -> None:
        """Into axes of matplotlib. Args: rows: one group of `split`, flat."""
        columns = dict.fromkeys(c for row in rows for c in row if c.startswith(self.series))
        series = {c.replace("_", " "): [row.get(c, math.nan) for row in rows] for c in columns}
        if self.kind == "lines":
            for name, heights in series.items():
                panel.plot([row[self.at[0]] for row in rows], heights, "o-", label=name)
            panel.set_xlabel(self.at[0])
            panel.set_ylim(0, 1.1 * max(max(heights) for heights in series.values()))
            return
        stacked = self.kind == "stack"
        width, bottom = (0.7 if stacked else 0.8 / len(series)), [0.0] * len(rows)
        for n, (name, heights) in enumerate(series.items()):
            side = 0.0 if stacked else (n - (len(series) - 1) / 2) * width
            panel.bar([g + side for g in range(len(rows))], heights, width, bottom=bottom, label=name)
            if stacked:
                bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        names = ["\n".join(textwrap.fill(str(row[key]), 12) for key in self.at) for row in rows]
        panel.set_xticks(range(len(rows)), names, fontsize=8)


def flat(row: Row) -> dict[str, Any]:
    """Example: {"gpus": 8, "ms": {"none": 2.0}} -> {"gpus": 8, "ms none": 2.0}."""
    cells: dict[str, Any] = {}
    for key, value in row.items():
        cells |= (
            {f"{key} {name}": v for name, v in value.items()} if isinstance(value, Mapping) else {key: value}
        )
    return cells


def draw(charts: Sequence[tuple[Chart, Sequence[Row]]], title: str, path: str | Path) -> None:
    """All panels of some charts in one picture, at most three beside each other, below them one legend."""
    panels = [(chart, name, own) for chart, rows in charts for name, own in chart.split(rows).items()]
    across = min(len(panels), 2 if len(panels) == 4 else 3)
    down = -(-len(panels) // across)
    # Not pyplot: it looks for a display.
    figure = Figure(figsize=(max(8, 5.5 * across), 4 * down), layout="constrained")
    figure.suptitle(title, fontsize=11)
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (chart, name, rows) in zip(grid, panels, strict=False):
        axes.set_title(name, fontsize=10)
        chart.draw(axes, [flat(row) for row in rows])
    for empty in grid[len(panels) :]:
        empty.axis("off")
    legends = [axes.get_legend_handles_labels() for axes in figure.axes]
    once = {label: handle for legend in legends for handle, label in zip(*legend, strict=True)}
    figure.legend(once.values(), once, loc="outside lower center", ncols=min(len(once), 6), frameon=False)
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


Call = tuple[Callable[..., Any], tuple]
Run = Callable[[Sequence[Call]], list]
Data = Mapping[str, Any]
Claim = dict[str, Any]
CLAIMS: list[Claim] = json.loads(Path(__file__).with_name("claims.json").read_text(encoding="utf-8"))
"""Claims of the papers: paper, name, published value; `ours`, a format of our quantities; `holds`, rules that
must all be true: [quantity, relation, bound], for "near" also a tolerance; `why`: the reason if it does not
hold."""
RELATIONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "is": operator.eq}


@dataclass(frozen=True)
class Exhibit:
    """A figure or table of a paper. Exhibits of one name share a picture."""

    name: str
    title: str
    rows: Sequence[Row]
    chart: Chart | None = None
    notes: Sequence[str] = ()

    def lines(self) -> list[str]:
        """Heading, table, notes."""
        return ["", self.title, *table([flat(row) for row in self.rows]), *(f"  {n}" for n in self.notes)]


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of a table, indented; names to the left, numbers to the right. Floats have four digits."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(key)) for key in keys] for row in rows]
    numbers = [n for n in range(len(keys)) if any(row[n][:1].isdigit() for row in cells)]
    head = [key.replace("_", " ") for key in keys]
    return [f"  {line}" for line in aligned([head, *cells], right=numbers).split("\n")]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class Span:
    """The least and the most of some numbers."""

    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Span:
        values = list(values)
        return cls(min(values), max(values))


def claims(paper: ModuleType, data: Data) -> list[Claim]:
    """The claims of a paper about the simulated figures, beside our results."""
    quantities, name = paper.quantities(data), paper.__name__.rpartition(".")[2]
    return [
        compared(claim, quantities)
        for claim in CLAIMS
        if claim["paper"] == name and re.split(r"[.[]", claim["holds"][0][0])[0] in quantities
    ]


def compared(claim: Claim, quantities: Data) -> Claim:
    """A claim beside our result; `why` only if it does not hold."""
    holds = all(_holds(quantities, *rule) for rule in claim["holds"])
    ours = claim["ours"].format(**quantities)
    entry = {"name": claim["name"], "paper": claim["published"], "ours": ours, "holds": holds}
    return entry if holds or "why" not in claim else entry | {"why": claim["why"].format(**quantities)}


def _holds(quantities: Data, name: str, relation: str, bound: Any, within: float = 0.0) -> bool:
    def value(field: str) -> Any:
        return Formatter().get_field(field, (), quantities)[0]

    if relation == "near":
        return abs(value(name) - bound) <= within
    is_name = isinstance(bound, str) and relation != "is"
    return bool(RELATIONS[relation](value(name), value(bound) if is_name else bound))


def text(paper: ModuleType, data: Data) -> str:
    """Everything but the pictures."""
    checked = claims(paper, data)
    shown = [{key: c[key] for key in ("name", "paper", "ours", "holds")} for c in checked]
    why = [f"{c['name']}: {c['why']}" for c in checked if "why" in c]
    exhibits = [*paper.exhibits(data), Exhibit("", "Claims of the paper", shown, notes=why)]
    lines = [f"{paper.TITLE} by simulation: nothing here was run on a GPU."]
    lines += [line for exhibit in exhibits for line in exhibit.lines()]
    return "\n".join([*lines, "", "Assumptions", *(f"  - {a}" for a in paper.ASSUMPTIONS)])


def as_json(paper: ModuleType, data: Data, files: Mapping[str, str]) -> dict[str, Any]:
    """The values of `--json`. Args: files: of the pictures."""
    facts = {"simulated": True, "assumptions": paper.ASSUMPTIONS, **data}
    return facts | {"claims": claims(paper, data), "pictures": files}


def save_pictures(paper: ModuleType, prefix: str, data: Data, folder: Path) -> dict[str, str]:
    """-> file of each. Args: prefix: of their names. Raises: OSError."""
    exhibits: dict[str, list[Exhibit]] = {}
    for exhibit in paper.exhibits(data):
        if exhibit.chart:
            exhibits.setdefault(exhibit.name, []).append(exhibit)
    files = {name: folder / f"{prefix}-{name}.png" for name in exhibits}
    for name, group in exhibits.items():
        charts = [(exhibit.chart, exhibit.rows) for exhibit in group if exhibit.chart]
        draw(charts, f"{paper.TITLE} by simulation. {group[0].title}", files[name])
    if hasattr(paper, "timelines"):
        files["timelines"] = folder / f"{prefix}-timelines.png"
        paper.timelines(files["timelines"])
    return {name: str(file) for name, file in files.items()}


def one_by_one(calls: Sequence[Call]) -> list:
    return [function(*arguments) for function, arguments in calls]


def in_processes(calls: Sequence[Call]) -> list:
    """The results of calls, by a process per core; long calls come first."""
    if len(calls) == 1:
        return one_by_one(calls)
    # Spawned, not forked: torch's threads do not survive a fork.
    with ProcessPoolExecutor(cpu_cores(), mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(function, *arguments) for function, arguments in calls]
        for job in tqdm(as_completed(jobs), "simulating", len(jobs), False, disable=not sys.stderr.isatty()):
            job.result()  # the first error ends it
        return [job.result() for job in jobs]
