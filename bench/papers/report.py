"""What a reproduction shows, as text, as JSON and as pictures.

A paper is a module with TITLE, ASSUMPTIONS and FIGURES (what can be chosen), and functions

    simulate(figures, run) -> data     a JSON object; `run` works out calls, here or in other processes
    claims(data)                       what the paper says beside what came out (`claim`)
    exhibits(data)                     rows that are shown as a table, and drawn

and, if it has such, `timelines(path)`, a picture of another sort.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from bench.drawing import Chart, Row, draw, flat
from lancet_kernels.cli import aligned
from lancet_kernels.cli.environment import cpu_cores

Call = tuple[Callable[..., Any], tuple]
Run = Callable[[Sequence[Call]], list]
Data = Mapping[str, Any]
Claim = dict[str, Any]


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


def claim(name: str, paper: str, ours: str, holds: bool, why: str = "") -> Claim:
    """What a paper claims beside what came out. Args: why: it does not hold, if it does not."""
    entry = {"name": name, "paper": paper, "ours": ours, "holds": bool(holds)}
    return entry | {"why": why} if why and not holds else entry


def span(values: Iterable[float], form: str = "{:.2f}") -> str:
    """Example: `1.02 to 1.20`."""
    values = list(values)
    return f"{form.format(min(values))} to {form.format(max(values))}"


def text(paper: ModuleType, data: Data) -> str:
    """Everything but the pictures."""
    claims = paper.claims(data)
    shown = [{key: c[key] for key in ("name", "paper", "ours", "holds")} for c in claims]
    why = [f"{c['name']}: {c['why']}" for c in claims if "why" in c]
    exhibits = [*paper.exhibits(data), Exhibit("", "Claims of the paper", shown, notes=why)]
    lines = [f"{paper.TITLE} by simulation: nothing here was run on a GPU."]
    lines += [line for exhibit in exhibits for line in exhibit.lines()]
    return "\n".join([*lines, "", "Assumptions", *(f"  - {a}" for a in paper.ASSUMPTIONS)])


def as_json(paper: ModuleType, data: Data, files: Mapping[str, str]) -> dict[str, Any]:
    """The values of `--json`. Args: files: of the pictures."""
    facts = {"simulated": True, "assumptions": paper.ASSUMPTIONS, **data}
    return facts | {"claims": paper.claims(data), "pictures": files}


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
