"""PrimePar's evaluation as text and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from lancet_kernels.paper.primepar import ASSUMPTIONS, timelines
from lancet_kernels.paper.tables import table
from lancet_kernels.schedules.timeline import save_picture

BARS = {"megatron": "#9d9d9d", "spatial": "#4c78a8", "primepar": "#e45756"}
MLP_PARTS = {
    "computation_ms": ("computation", "#4c78a8"),
    "collective_ms": ("all-reduces", "#e45756"),
    "redistribution_ms": ("redistribution", "#f2b25c"),
    "exposed_ring_ms": ("ring, not hidden", "#54a24b"),
}


PIPELINES = {
    "megatron": "best Megatron",
    "primepar": "primepar",
    "computation": "best Megatron's computation",
}


def text(data: Mapping[str, Any]) -> str:
    """All tables, what the slides claim beside it, and the assumptions."""
    lines = ["PrimePar (ASPLOS '24, slides) by simulation: nothing here was run on a GPU.", ""]
    lines += ["Throughput and peak memory of a GPU, one forward and backward"]
    lines += _settings(data["rows"])
    lines += ["", "MLP blocks of one layer, Megatron's partition and PrimePar's"]
    lines += _mlp_blocks(data["rows"])
    lines += ["", "What the speedup depends on"]
    lines += _sensitivity(data["sensitivity"])
    lines += ["", "3D parallelism: iteration in ms by pipeline stages"]
    lines += _pipelines(data["pipelines"])
    lines += ["", "Claims of the slides"]
    rows = [(c["name"], c["paper"], c["ours"], "yes" if c["holds"] else "no") for c in data["claims"]]
    lines += table(("claim", "paper", "simulated", "holds"), rows)
    lines += ["", "Why the others do not hold"]
    lines += [f"  - {c['name']}: {c['why']}" for c in data["claims"] if not c["holds"]] or ["  all hold"]
    return "\n".join([*lines, "", "Assumptions", *(f"  - {a}" for a in ASSUMPTIONS)])


def _settings(rows: list[Mapping[str, Any]]) -> list[str]:
    names = list(rows[0]["iteration_ms"])
    return table(
        ("model", "GPUs", *(f"{n} ms" for n in names), "speedup", "over best", "memory", "qkv", "fc1", "fc2"),
        [
            (
                r["model"],
                str(r["gpus"]),
                *(f"{r['iteration_ms'][n]:.0f}" for n in names),
                f"{r['speedup']:.2f}x",
                f"{r['speedup_over_best_megatron']:.2f}x",
                f"{r['memory']:.0%}",
                *(r["partition"][operator] for operator in ("qkv", "fc1", "fc2")),
            )
            for r in rows
        ],
    )


def _mlp_blocks(rows: list[Mapping[str, Any]]) -> list[str]:
    return table(
        ("model", "GPUs", "partition", *(name for name, _ in MLP_PARTS.values()), "ring, all"),
        [
            (
                r["model"],
                str(r["gpus"]),
                name,
                *(f"{parts[part]:.2f}" for part in MLP_PARTS),
                f"{parts['ring_ms']:.2f}",
            )
            for r in rows
            for name, parts in r["mlp"].items()
        ],
    )


def _sensitivity(rows: list[Mapping[str, Any]]) -> list[str]:
    return table(
        ("model", "GPUs", "change", "speedup", "over best", "memory"),
        [
            (
                r["model"],
                str(r["gpus"]),
                r["change"],
                f"{r['speedup']:.2f}x",
                f"{r['speedup_over_best_megatron']:.2f}x",
                f"{r['memory']:.0%}",
            )
            for r in rows
        ],
    )


def _pipelines(models: Mapping[str, Any]) -> list[str]:
    if not models:
        return ["  none"]
    stages = list(next(iter(models.values()))["primepar"])
    return table(
        ("model", "tensors", *(f"{s} stages" for s in stages)),
        [
            (model, PIPELINES[name], *(f"{ms[s]:.0f}" for s in stages))
            for model, iteration in models.items()
            for name, ms in iteration.items()
        ],
    )


def save_pictures(data: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Draw throughput, memory, MLP blocks and the two timelines. -> file of each."""
    files = {name: str(folder / f"primepar-{name}.png") for name in ("throughput", "mlp", "timelines")}
    _save_throughput(data["rows"], files["throughput"])
    _save_mlp_blocks(data["rows"], files["mlp"])
    save_timelines(files["timelines"])
    return files


def save_timelines(path: str | Path) -> None:
    """The slides' MLP block under Megatron's partition, and under PrimePar's."""
    events = {name: timeline.events for name, timeline in timelines().items()}
    save_picture(
        events,
        path,
        weight_gradients=[e.name for e in chain(*events.values()) if " gradient" in e.name],
        title="MLP block of OPT 6.7B on 2 nodes of 4 V100s, forward and backward (simulated)",
    )


def _figure(rows: int, columns: int, title: str):
    # Not pyplot: it looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * columns, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title} (simulated)", fontsize=11)
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _save_throughput(rows: list[Mapping[str, Any]], path: str) -> None:
    models = list(dict.fromkeys(r["model"] for r in rows))
    figure, panels = _figure(2, len(models), "Throughput and peak memory relative to Megatron's")
    for column, model in enumerate(models):
        own = [r for r in rows if r["model"] == model]
        places = range(len(own))
        top, bottom = panels[:, column]
        for n, (name, colour) in enumerate(BARS.items()):
            heights = [r["iteration_ms"]["megatron"] / r["iteration_ms"][name] for r in own]
            top.bar([p + (n - 1) * 0.27 for p in places], heights, 0.25, color=colour, label=name)
        bottom.bar(places, [r["memory"] for r in own], 0.5, color=BARS["primepar"])
        top.set_title(model, fontsize=10)
        for panel in (top, bottom):
            panel.axhline(1.0, color="black", linewidth=0.6)
            panel.set_xticks(places, [f"{r['gpus']} GPUs" for r in own], fontsize=8)
    panels[0, 0].set_ylabel("throughput")
    panels[1, 0].set_ylabel("memory")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=80)


def _save_mlp_blocks(rows: list[Mapping[str, Any]], path: str) -> None:
    models = list(dict.fromkeys(r["model"] for r in rows))
    figure, panels = _figure(1, len(models), "MLP blocks of one layer: Megatron left, PrimePar right")
    for panel, model in zip(panels[0], models, strict=True):
        own = [r for r in rows if r["model"] == model]
        for side, name in ((-0.2, "megatron"), (0.2, "primepar")):
            places, bottom = [n + side for n in range(len(own))], [0.0] * len(own)
            for part, (label, colour) in MLP_PARTS.items():
                heights = [r["mlp"][name][part] for r in own]
                panel.bar(places, heights, 0.36, bottom=bottom, color=colour, label=label)
                bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        panel.set_title(model, fontsize=10)
        panel.set_xticks(range(len(own)), [f"{r['gpus']} GPUs" for r in own], fontsize=8)
    panels[0, 0].set_ylabel("ms")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    handles, labels = handles[: len(MLP_PARTS)], labels[: len(MLP_PARTS)]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=80)
