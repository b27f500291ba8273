"""What the pictures of all papers share: a file, bars, a legend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def picture(path: str, width: float, height: float, title: str, dpi: int = 100) -> Iterator[Any]:
    """A matplotlib figure of so many inches, which is saved to `path` (.png) at the end."""
    # Not pyplot: it looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    yield figure
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=dpi)


def grouped_bars(
    panel: Any,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    colours: Mapping[str, str] | None = None,
) -> None:
    """Groups of bars beside each other, one colour per name (without any, matplotlib's); NaN leaves a gap."""
    width = 0.8 / len(series)
    for n, (name, heights) in enumerate(series.items()):
        places = [g + (n - (len(series) - 1) / 2) * width for g in range(len(groups))]
        panel.bar(places, heights, width, color=colours and colours[name], label=name)
    panel.set_xticks(range(len(groups)), groups, fontsize=8)


def stacked_bars(
    panel: Any,
    places: Sequence[float],
    heights: Mapping[str, Sequence[float]],
    parts: Mapping[str, tuple[str, str]],
    width: float = 0.7,
) -> None:
    """Bars of parts on top of each other. Args: parts: key of `heights` -> (label, colour)."""
    bottom = [0.0] * len(places)
    for part, (label, colour) in parts.items():
        panel.bar(places, heights[part], width, bottom=bottom, color=colour, label=label)
        bottom = [a + b for a, b in zip(bottom, heights[part], strict=True)]


def legend_below(figure: Any) -> None:
    """One legend for all panels: what the first one shows, each label once."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    figure.legend(once.values(), once, loc="outside lower center", ncols=len(once), frameon=False)
