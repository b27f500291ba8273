"""The figures as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lancet_kernels.paper import claims
from lancet_kernels.simulation import ASSUMPTIONS, Setting

FURTHER_ASSUMPTIONS = (
    *Setting.assumptions,
    "all-to-alls and experts are priced by their capacity, 1.25 (padding), as in the paper's cost model; "
    "`lancet, unpadded` in figure 13 sends real rows only, as Lancet's irregular all-to-all does, while the "
    "baselines stay padded (as the paper measured them; this library pads none)",
    "batch, experts per GPU (2), sequence (512) and clusters as in the paper; float32 (TF32 on A100), "
    "capacity factor and top-1 are ours, because the paper does not name them",
    "RAF and DeepSpeed are both `none`; their kernels and their extra memory are not told apart, so the "
    "paper's out-of-memory of DeepSpeed does not show",
    "`lancet` does more than the paper: list scheduling, and experts pipelined in the backward, too",
)


def text(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """All figures and their assumptions, as text."""
    lines = [
        "Figures of the Lancet paper (MLSys 2024) by simulation: nothing here was run on a GPU.",
        "",
    ]
    for number, data in figures.items():
        lines += [f"Figure {number}: {data['title']} ({data['how']})", *_TABLES[number](data), ""]
    lines.append("Assumptions")
    lines += [f"  - {a}" for a in (*ASSUMPTIONS, *FURTHER_ASSUMPTIONS)]
    return "\n".join(lines)


def _throughput(data: Mapping[str, Any]) -> list[str]:
    strategies = list(data["rows"][0]["iteration_ms"])
    rows = [
        (
            *_where(r),
            *(f"{r['iteration_ms'][s]:.0f}{'!' if s in r['out_of_memory'] else ''}" for s in strategies),
            f"{r['speedup']:.2f}x",
        )
        for r in data["rows"]
    ]
    lines = table((*_WHERE, *(f"{s} ms" for s in strategies), "speedup"), rows)
    if any(r["out_of_memory"] for r in data["rows"]):
        lines.append("  ! does not fit into the GPU's memory")
    for cluster, simulated in data["speedup"].items():
        paper = data["paper"]["speedup"][cluster]
        lines.append(
            f"  speedup over the better of none and tutel, {claims.DEVICE[cluster]}: "
            f"{simulated['mean']:.2f}x mean, {simulated['most']:.2f}x most, simulated; "
            f"paper {paper['mean']:.2f}x mean, {paper['most']:.2f}x most"
        )
    return lines


def _decomposition(data: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            *_where(r),
            name,
            f"{r['computation_ms'][name]:.0f}",
            f"{r['overlapped_ms'][name]:.0f}",
            f"{r['communication_ms'][name]:.0f}",
        )
        for r in data["rows"]
        for name in r["computation_ms"]
    ]
    header = (*_WHERE, "strategy", "computation ms", "overlapped ms", "exposed communication ms")
    lines = table(header, rows)
    for cluster, paper in data["paper"]["most_less_exposed"].items():
        simulated, unpadded = data["most_less_exposed"][cluster], data["most_less_exposed_unpadded"][cluster]
        for than, name in (("none", "RAF (none)"), ("tutel", "Tutel")):
            lines.append(
                f"  exposed communication against {name}, {claims.DEVICE[cluster]}: up to "
                f"{simulated[than]:.0%} less ({unpadded[than]:.0%} unpadded), simulated; "
                f"paper {paper[than]:.0%}"
            )
    return lines


def _accuracy(data: Mapping[str, Any]) -> list[str]:
    lines = [
        f"  The paper measures an error of {data['paper']['prediction_error']:.2%}. There is no number here:",
        *(f"  {sentence}." for sentence in data["why"].split("; ")),
        "  Instead: the same plans, simulated with times that differ from those that they assume.",
    ]
    rows = [
        (
            *_where(r),
            r["what_if"],
            f"{r['planned_ms']:.0f}",
            f"{r['iteration_ms']:.0f}",
            f"{r['planned_speedup']:.2f}x",
            f"{r['speedup']:.2f}x",
        )
        for r in data["rows"]
    ]
    header = (*_WHERE, "what if", "planned ms", "then ms", "planned speedup", "then speedup")
    return lines + table(header, rows)


def _planning(data: Mapping[str, Any]) -> list[str]:
    rows = [(*_where(r), str(r["instructions"]), f"{r['seconds']:.2f}") for r in data["rows"]]
    lines = table((*_WHERE, "instructions", "CPU seconds"), rows)
    lines.append("  gpt2-l-moe with other depths, p4de, 16 GPUs:")
    lines += table(
        ("layers", "instructions", "CPU seconds"),
        [(str(r["layers"]), str(r["instructions"]), f"{r['seconds']:.2f}") for r in data["by_layers"]],
    )
    growth = data["growth"]
    lines.append(
        f"  {growth['layers']:.0f} times the layers take {growth['seconds']:.1f} times as long; measured "
        f"here. Paper: below {data['paper']['minutes']} minutes for most models, with measuring on a GPU"
    )
    return lines


def _ablation(data: Mapping[str, Any]) -> list[str]:
    strategies = list(data["rows"][0]["speedup"])
    rows = [(*_where(r), *(f"{r['speedup'][s]:.2f}x" for s in strategies)) for r in data["rows"]]
    lines = table((*_WHERE, *strategies), rows)
    lines.append("  speedup over none (RAF)")
    for key, claim in (("each_half_helps", "each half helps"), ("both_help_more", "both help more than one")):
        lines.append(f"  {claim}: {'yes' if data[key] else 'no'}, simulated; paper yes")
    return lines


_TABLES = {
    "11": _throughput,
    "12": _throughput,
    "13": _decomposition,
    "14": _accuracy,
    "15": _planning,
    "16": _ablation,
}

_WHERE = ("cluster", "model", "GPUs")


def _where(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["cluster"], row["model"], str(row["gpus"])


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; names to the left, numbers to the right."""
    cells = [tuple(header), *map(tuple, rows)]
    widths = [max(len(row[c]) for row in cells) for c in range(len(header))]
    left = [all(not row[c][:1].isdigit() for row in cells[1:]) for c in range(len(header))]
    return [
        "  "
        + "  ".join(
            cell.ljust(w) if to_left else cell.rjust(w)
            for cell, w, to_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in cells
    ]
