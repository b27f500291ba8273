"""What a reproduction shows, as text, as JSON and as pictures.

A paper is a module with TITLE, ASSUMPTIONS and FIGURES (what can be chosen), and functions

    simulate(figures, run) -> data     a JSON object; `run` works out calls, here or in other processes
    quantities(data)                   the numbers that the paper's claims (claims.json) are about, by name
    exhibits(data)                     rows that are shown as a table, and drawn

and, if it has such, `timelines(path)`, a picture of another sort.
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
from lancet_kernels.cli.environment import cpu_cores

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Chart:
    """Which columns of rows to draw, and how.

    kind: "bars" beside each other, "stack" on top of each other, or "lines". at: columns whose values name a
    place on the x axis. series: columns, or mappings in one (`flat`). panels: columns of whose values each
    combination gets axes of its own.
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
    panels = [(chart, name, of) for chart, rows in charts for name, of in chart.split(rows).items()]
    across = min(len(panels), 2 if len(panels) == 4 else 3)
    down = -(-len(panels) // across)
    # Not pyplot: it looks for a display.
    figure = Figure(figsize=(max(8, 5.5 * across), 4 * down), layout="constrained")
    figure.suptitle(title, fontsize=11)
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (chart, name, of) in zip(grid, panels, strict=False):
        axes.set_title(name, fontsize=10)
        chart.draw(axes, [flat(row) for row in of])
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
"""What the papers say: paper, name, published value; `ours`, a format of what came out; `holds`, rules that
are all true if it does: [quantity, relation, bound], for "near" also how far off; `why` it does not."""
RELATIONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "is": operator.eq}


@dataclass(frozen=True)
class Exhibit:
    """A figure or table of a paper. Those of one name are drawn into one picture."""

    name: str
    title: str
    rows: Sequence[Row]
    chart: Chart | None = None
    notes: Sequence[str] = ()

    def lines(self) -> list[str]:
        """Heading, a column for each key, notes."""
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
    """What a paper claims beside what came out, of the figures that were simulated."""
    quantities, name = paper.quantities(data), paper.__name__.rpartition(".")[2]
    return [
        compared(told, quantities)
        for told in CLAIMS
        if told["paper"] == name and re.split(r"[.[]", told["holds"][0][0])[0] in quantities
    ]


def compared(told: Claim, quantities: Data) -> Claim:
    """A claim of the table beside what came out; `why` only if it does not hold."""
    holds = all(_holds(quantities, *rule) for rule in told["holds"])
    ours = told["ours"].format(**quantities)
    entry = {"name": told["name"], "paper": told["published"], "ours": ours, "holds": holds}
    return entry if holds or "why" not in told else entry | {"why": told["why"].format(**quantities)}


def _holds(quantities: Data, name: str, relation: str, bound: Any, within: float = 0.0) -> bool:
    def value(of: str) -> Any:
        return Formatter().get_field(of, (), quantities)[0]

    if relation == "near":
        return abs(value(name) - bound) <= within
    is_name = isinstance(bound, str) and relation != "is"
    return bool(RELATIONS[relation](value(name), value(bound) if is_name else bound))


def text(paper: ModuleType, data: Data) -> str:
    """Everything but the pictures."""
    held = claims(paper, data)
    shown = [{key: c[key] for key in ("name", "paper", "ours", "holds")} for c in held]
    why = [f"{c['name']}: {c['why']}" for c in held if "why" in c]
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
    for name, of in exhibits.items():
        charts = [(exhibit.chart, exhibit.rows) for exhibit in of if exhibit.chart]
        draw(charts, f"{paper.TITLE} by simulation. {of[0].title}", files[name])
    if hasattr(paper, "timelines"):
        files["timelines"] = folder / f"{prefix}-timelines.png"
        paper.timelines(files["timelines"])
    return {name: str(file) for name, file in files.items()}


def one_by_one(calls: Sequence[Call]) -> list:
    """Their results."""
    return [function(*arguments) for function, arguments in calls]


def in_processes(calls: Sequence[Call]) -> list:
    """Their results, by a process per core; calls that take long come first."""
    if len(calls) == 1:
        return one_by_one(calls)
    # Spawned, not forked: torch's threads do not survive a fork.
    with ProcessPoolExecutor(cpu_cores(), mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(function, *arguments) for function, arguments in calls]
        for job in tqdm(as_completed(jobs), "simulating", len(jobs), False, disable=not sys.stderr.isatty()):
            job.result()  # the first error ends it
        return [job.result() for job in jobs]
