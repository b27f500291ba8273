"""PrimePar's evaluation as text and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from lancet_kernels.paper import primepar
from lancet_kernels.paper.drawing import grouped_bars, legend_below, picture, stacked_bars
from lancet_kernels.paper.hidup_report import CLAIM
from lancet_kernels.paper.primepar import ASSUMPTIONS, timelines
from lancet_kernels.paper.text_table import table
from lancet_kernels.schedules.timeline import save_picture

BARS = {"megatron": "#9d9d9d", "spatial": "#4c78a8", "primepar": "#e45756"}
MLP_PARTS = {
    "computation_ms": ("computation", "#4c78a8"),
    "collective_ms": ("all-reduces", "#e45756"),
    "redistribution_ms": ("redistribution", "#f2b25c"),
    "exposed_ring_ms": ("ring, not hidden", "#54a24b"),
}
WHERE = {"model": "{model}", "GPUs": "{gpus}"}
GAIN = {
    "speedup": "{speedup:.2f}x",
    "over best": "{speedup_over_best_megatron:.2f}x",
    "memory": "{memory:.0%}",
}
PIPELINES = {
    "megatron": "best Megatron",
    "primepar": "primepar",
    "computation": "best Megatron's computation",
}


def simulate(_figures: Sequence[str], _layers: int | None, progress: Callable) -> dict[str, Any]:
    """Everything; there are no figures to choose from."""
    return primepar.reproduce(progress=progress)


def as_json(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of `--json`."""
    return data


def text(data: Mapping[str, Any]) -> str:
    """All tables, what the slides claim beside it, and the assumptions."""
    lines = ["PrimePar (ASPLOS '24, slides) by simulation: nothing here was run on a GPU.", ""]
    lines += ["Throughput and peak memory of a GPU, one forward and backward"]
    lines += _settings(data["rows"])
    lines += ["", "MLP blocks of one layer, Megatron's partition and PrimePar's"]
    lines += _mlp_blocks(data["rows"])
    lines += ["", "What the speedup depends on"]
    lines += table(WHERE | {"change": "{change}"} | GAIN, data["sensitivity"])
    lines += ["", "3D parallelism: iteration in ms by pipeline stages"]
    lines += _pipelines(data["pipelines"])
    lines += ["", "Claims of the slides"]
    lines += table(CLAIM, [c | {"holds": "yes" if c["holds"] else "no"} for c in data["claims"]])
    lines += ["", "Why the others do not hold"]
    lines += [f"  - {c['name']}: {c['why']}" for c in data["claims"] if not c["holds"]] or ["  all hold"]
    return "\n".join([*lines, "", "Assumptions", *(f"  - {a}" for a in ASSUMPTIONS)])


def _settings(rows: list[Mapping[str, Any]]) -> list[str]:
    times = {f"{name} ms": f"{{iteration_ms[{name}]:.0f}}" for name in rows[0]["iteration_ms"]}
    partitions = {operator: f"{{partition[{operator}]}}" for operator in ("qkv", "fc1", "fc2")}
    return table(WHERE | times | GAIN | partitions, rows)


def _mlp_blocks(rows: list[Mapping[str, Any]]) -> list[str]:
    parts = {name: f"{{{part}:.2f}}" for part, (name, _) in MLP_PARTS.items()}
    blocks = [{**r, "of": name, **block} for r in rows for name, block in r["mlp"].items()]
    return table(WHERE | {"partition": "{of}"} | parts | {"ring, all": "{ring_ms:.2f}"}, blocks)


def _pipelines(models: Mapping[str, Any]) -> list[str]:
    if not models:
        return ["  none"]
    stages = list(next(iter(models.values()))["primepar"])
    columns = {"model": "{model}", "tensors": "{of}"} | {f"{s} stages": f"{{ms[{s}]:.0f}}" for s in stages}
    rows = (
        {"model": model, "of": PIPELINES[name], "ms": ms}
        for model, iteration in models.items()
        for name, ms in iteration.items()
    )
    return table(columns, rows)


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


def _save_throughput(rows: list[Mapping[str, Any]], path: str) -> None:
    models = list(dict.fromkeys(r["model"] for r in rows))
    title = "Throughput and peak memory relative to Megatron's (simulated)"
    with picture(path, 5 * len(models), 7.2, title, dpi=80) as figure:
        panels = figure.subplots(2, len(models), squeeze=False)
        for column, model in enumerate(models):
            own = [r for r in rows if r["model"] == model]
            groups = [f"{r['gpus']} GPUs" for r in own]
            top, bottom = panels[:, column]
            throughput = {
                name: [r["iteration_ms"]["megatron"] / r["iteration_ms"][name] for r in own] for name in BARS
            }
            grouped_bars(top, groups, throughput, BARS)
            grouped_bars(bottom, groups, {"primepar": [r["memory"] for r in own]}, BARS)
            top.set_title(model, fontsize=10)
            for panel in (top, bottom):
                panel.axhline(1.0, color="black", linewidth=0.6)
        panels[0, 0].set_ylabel("throughput")
        panels[1, 0].set_ylabel("memory")
        legend_below(figure)


def _save_mlp_blocks(rows: list[Mapping[str, Any]], path: str) -> None:
    models = list(dict.fromkeys(r["model"] for r in rows))
    title = "MLP blocks of one layer: Megatron left, PrimePar right (simulated)"
    with picture(path, 5 * len(models), 3.6, title, dpi=80) as figure:
        panels = figure.subplots(1, len(models), squeeze=False)[0]
        for panel, model in zip(panels, models, strict=True):
            own = [r for r in rows if r["model"] == model]
            for side, name in ((-0.2, "megatron"), (0.2, "primepar")):
                heights = {part: [r["mlp"][name][part] for r in own] for part in MLP_PARTS}
                stacked_bars(panel, [n + side for n in range(len(own))], heights, MLP_PARTS, width=0.36)
            panel.set_title(model, fontsize=10)
            panel.set_xticks(range(len(own)), [f"{r['gpus']} GPUs" for r in own], fontsize=8)
        panels[0].set_ylabel("ms")
        legend_below(figure)
