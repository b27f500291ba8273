"""The figures of the Lancet paper: simulated, as text and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lancet_kernels.paper import claims, figures
from lancet_kernels.paper.pictures import save_pictures
from lancet_kernels.paper.text_table import table
from lancet_kernels.simulation import ASSUMPTIONS as OF_THE_SIMULATION
from lancet_kernels.simulation import Setting

__all__ = ["ASSUMPTIONS", "as_json", "save_pictures", "simulate", "text"]

ASSUMPTIONS = (
    *OF_THE_SIMULATION,
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


def simulate(numbers: Sequence[str], layers: int | None, progress: figures.Progress) -> dict[str, Any]:
    """The figures of these numbers. Args: layers: of no effect here."""
    return figures.run_figures(numbers, progress)


def as_json(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `--json`."""
    return {"figures": figures}


def text(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """All figures and their assumptions, as text."""
    lines = [
        "Figures of the Lancet paper (MLSys 2024) by simulation: nothing here was run on a GPU.",
        "",
    ]
    for number, data in figures.items():
        lines += [f"Figure {number}: {data['title']} ({data['how']})", *_TABLES[number](data), ""]
    lines.append("Assumptions")
    return "\n".join([*lines, *(f"  - {a}" for a in ASSUMPTIONS)])


def _throughput(data: Mapping[str, Any]) -> list[str]:
    strategies = list(data["rows"][0]["iteration_ms"])
    rows = [
        r | {"full": {s: "!" if s in r["out_of_memory"] else "" for s in strategies}} for r in data["rows"]
    ]
    times = {f"{s} ms": f"{{iteration_ms[{s}]:.0f}}{{full[{s}]}}" for s in strategies}
    lines = table(_WHERE | times | {"speedup": "{speedup:.2f}x"}, rows)
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
    parts = ("computation_ms", "overlapped_ms", "communication_ms")
    columns = {
        "strategy": "{strategy}",
        "computation ms": "{computation_ms:.0f}",
        "overlapped ms": "{overlapped_ms:.0f}",
        "exposed communication ms": "{communication_ms:.0f}",
    }
    rows = (
        r | {"strategy": name} | {part: r[part][name] for part in parts}
        for r in data["rows"]
        for name in r["computation_ms"]
    )
    lines = table(_WHERE | columns, rows)
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
    columns = {
        "what if": "{what_if}",
        "planned ms": "{planned_ms:.0f}",
        "then ms": "{iteration_ms:.0f}",
        "planned speedup": "{planned_speedup:.2f}x",
        "then speedup": "{speedup:.2f}x",
    }
    return lines + table(_WHERE | columns, data["rows"])


def _planning(data: Mapping[str, Any]) -> list[str]:
    columns = {"instructions": "{instructions}", "CPU seconds": "{seconds:.2f}"}
    lines = table(_WHERE | columns, data["rows"])
    lines.append("  gpt2-l-moe with other depths, p4de, 16 GPUs:")
    lines += table({"layers": "{layers}"} | columns, data["by_layers"])
    growth = data["growth"]
    lines.append(
        f"  {growth['layers']:.0f} times the layers take {growth['seconds']:.1f} times as long; measured "
        f"here. Paper: below {data['paper']['minutes']} minutes for most models, with measuring on a GPU"
    )
    return lines


def _ablation(data: Mapping[str, Any]) -> list[str]:
    strategies = list(data["rows"][0]["speedup"])
    lines = table(_WHERE | {s: f"{{speedup[{s}]:.2f}}x" for s in strategies}, data["rows"])
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

_WHERE = {"cluster": "{cluster}", "model": "{model}", "GPUs": "{gpus}"}
