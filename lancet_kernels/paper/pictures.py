"""One picture per figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lancet_kernels.paper import claims
from lancet_kernels.paper.drawing import grouped_bars, legend_below, picture, stacked_bars

COLOURS = {
    "none": "#9d9d9d",
    "tutel": "#f2b25c",
    "lancet-dw": "#72b7b2",
    "lancet-partition": "#4c78a8",
    "lancet": "#e45756",
}
DECOMPOSITION = {
    "computation_ms": ("computation, not overlapped", "#4c78a8"),
    "overlapped_ms": ("overlapped", "#54a24b"),
    "communication_ms": ("communication, not overlapped", "#e45756"),
}


def save_pictures(figures: Mapping[str, Mapping[str, Any]], folder: Path) -> dict[str, str]:
    """One picture per figure. -> their paths. Raises: OSError."""
    files = {number: str(folder / f"figure{number}.png") for number in figures}
    for number, data in figures.items():
        heading = f"Figure {number} of the Lancet paper: {data['title']} ({data['how']})"
        with picture(files[number], 11, 8, heading) as figure:
            if note := _DRAW[number](figure, data):
                figure.suptitle(f"{heading}\n{note}", fontsize=11)
    return files


def _panels(figure, data: Mapping[str, Any]):
    """One panel per cluster and model. -> (axes, rows of that panel)."""
    axes = iter(figure.subplots(len(claims.DEVICE), len(claims.MODELS)).flat)
    for cluster, device in claims.DEVICE.items():
        for model in claims.MODELS:
            panel = next(axes)
            panel.set_title(f"{model}, {device} ({cluster})", fontsize=10)
            yield panel, [r for r in data["rows"] if (r["cluster"], r["model"]) == (cluster, model)]


def _throughput(figure, data: Mapping[str, Any]) -> str:
    for panel, rows in _panels(figure, data):
        series = {s: [r["iteration_ms"][s] for r in rows] for s in rows[0]["iteration_ms"]}
        grouped_bars(panel, [f"{r['gpus']}\n{r['speedup']:.2f}x" for r in rows], series, COLOURS)
        for group, r in enumerate(rows):
            for n, name in enumerate(series):
                if name in r["out_of_memory"]:
                    panel.text(group + (n - 2) * 0.16, 0, "x", color="red", ha="center", va="bottom")
        panel.set_ylabel("iteration, ms")
    legend_below(figure)
    paper = (
        f"{claims.DEVICE[c]} {p['mean']:.2f}x mean, {p['most']:.2f}x most"
        for c, p in data["paper"]["speedup"].items()
    )
    return (
        "Below each group: GPUs, and speedup of lancet over the better of none and tutel.\n"
        f"The paper reports {'; '.join(paper)}."
    )


def stack(panel, names: list[str], parts: Mapping[str, Mapping[str, float]]) -> None:
    """Bars of what an iteration consists of, one for each name; parts: see DECOMPOSITION."""
    heights = {part: [parts[part][n] for n in names] for part in DECOMPOSITION}
    stacked_bars(panel, range(len(names)), heights, DECOMPOSITION)
    panel.set_xticks(range(len(names)), [n.replace("-", "-\n").replace(", ", ",\n") for n in names])
    panel.tick_params(axis="x", labelsize=8)
    panel.set_ylabel("ms")


def _decomposition(figure, data: Mapping[str, Any]) -> None:
    for panel, rows in _panels(figure, data):
        (row,) = rows
        stack(panel, list(row["iteration_ms"]), row)
    legend_below(figure)


def _accuracy(figure, data: Mapping[str, Any]) -> str:
    for panel, rows in _panels(figure, data):
        names = ["as planned", *(r["what_if"] for r in rows)]
        values = [rows[0]["planned_speedup"], *(r["speedup"] for r in rows)]
        panel.barh(names, values, color=["#9d9d9d", *["#4c78a8"] * len(rows)])
        panel.set_xlim(0, max(values) * 1.15)
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.invert_yaxis()
        for place, value in enumerate(values):
            panel.text(value, place, f" {value:.2f}x", va="center", fontsize=8)
    return (
        "Speedup of the unchanged plan where times differ from those it was made with. NOT a prediction "
        f"error:\na simulation cannot measure one (paper: {data['paper']['prediction_error']:.2%})."
    )


def _planning(figure, data: Mapping[str, Any]) -> None:
    by_gpus, by_layers = figure.subplots(1, 2)
    for cluster, device in claims.DEVICE.items():
        for model in claims.MODELS:
            rows = [r for r in data["rows"] if (r["cluster"], r["model"]) == (cluster, model)]
            x, y = [r["gpus"] for r in rows], [r["seconds"] for r in rows]
            by_gpus.plot(x, y, "o-", label=f"{model}, {device}")
    by_gpus.set_xlabel("GPUs")
    by_gpus.legend(frameon=False)
    rows = data["by_layers"]
    by_layers.plot([r["layers"] for r in rows], [r["seconds"] for r in rows], "o-", color="#e45756")
    by_layers.set_xlabel("layers of gpt2-l-moe")
    for panel in (by_gpus, by_layers):
        panel.set_ylim(bottom=0)
        panel.set_ylabel("planning, CPU seconds (measured here)")


def _ablation(figure, data: Mapping[str, Any]) -> None:
    axes = figure.subplots(1, len(claims.DEVICE), sharey=True)
    for panel, (cluster, device) in zip(axes, claims.DEVICE.items(), strict=True):
        rows = [r for r in data["rows"] if r["cluster"] == cluster]
        series = {s: [r["speedup"][s] for r in rows] for s in rows[0]["speedup"]}
        grouped_bars(panel, [r["model"] for r in rows], series, COLOURS)
        for container in panel.containers:
            panel.bar_label(container, fmt="%.2fx", fontsize=8)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_title(f"{device} ({cluster}), {claims.ABLATION_GPUS} GPUs", fontsize=10)
        panel.set_ylabel("speedup over none (RAF)")
    legend_below(figure)


_DRAW = {
    "11": _throughput,
    "12": _throughput,
    "13": _decomposition,
    "14": _accuracy,
    "15": _planning,
    "16": _ablation,
}
