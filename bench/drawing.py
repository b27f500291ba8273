"""Charts of rows: one way to draw numbers that a table shows as well."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

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
