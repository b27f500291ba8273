"""HiDup's evaluation (SoCC '22, sections 6.2 to 6.12) by simulation: figures 6, 7, 8, 11 and table 4."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from bench.papers.hidup_settings import HIDUP_MODELS, SEQUENCES, HiDupSetting, WholeBatch
from bench.papers.report import Chart, Data, Exhibit, Run, Span
from lancet_kernels.schedules.shard.sharding_strategy import BACKWARD

Row = dict[str, Any]

TITLE = "HiDup (SoCC '22)"
ASSUMPTIONS = (
    "by simulation: computation by a roofline of the V100, collectives by formulas for NCCL's rings and "
    "trees, inside a machine at the rates that the paper's authors measured. Nothing ran on GPUs",
    f"{SEQUENCES} sequences a GPU, of 128 tokens or 64 patches; capacity 1.25 times the even share, counted "
    "for each sequence; float32; attention is one kernel",
    "figure 6: 8 machines with 2 and 8 GPUs each; figure 7: one machine with 8; figures 8, 11 and table 4: "
    "two machines with 4 each (table 4, one machine: 4)",
    f"backward computes {BACKWARD:g} times as much as forward; gradients travel by the adjoint collectives",
    "hidup: both microbatches in turns, psi of equation (5), in the backward as well. Searched as published: "
    "the backward counted without overlap, as in the searcher that the paper's authors published",
    "baselines run the whole batch at once with the same layers: expert parallel (as DeepSpeed and FastMoE "
    "do) overlaps nothing, data parallel (DDP, Horovod) overlaps its all-reduces with the backward",
    "an all-reduce between two machines is NCCL's tree, which the tensor leaves a machine once; all-gather "
    "and reduce-scatter are rings through all GPUs. A 100 Gbit/s link is used at 70 %, as the authors "
    "measured",
)
BANDWIDTHS = (10, 30, 100)
"""Gbit/s between two machines."""
PARTS = ("wall_ms", "computation_ms", "communication_ms", "overlapped")
_TABLE_4 = (
    ("one machine", "hidup", 297.2, 294.8, 29.7, 0.9192),
    ("one machine", "expert parallel", 398.8, 353.1, 28.2, 0.0),
    ("100 Gbit/s", "hidup", 398.5, 308.8, 152.3, 0.4110),
    ("100 Gbit/s", "expert parallel", 499.3, 347.9, 134.7, 0.0),
    ("30 Gbit/s", "hidup", 665.7, 302.1, 443.2, 0.2635),
    ("30 Gbit/s", "expert parallel", 825.1, 346.9, 458.5, 0.0),
)
PAPER_TABLE_4 = {
    (setting, system): dict(zip(PARTS, numbers, strict=True)) for setting, system, *numbers in _TABLE_4
}
"""Expert parallel is DeepSpeed there."""


@lru_cache(maxsize=32)
def two_machines(model: str, gbit_per_s: float, layers: int | None = None) -> HiDupSetting:
    """Two machines of 4 GPUs (sections 6.4 to 6.12)."""
    return HiDupSetting(model, 8, 2, gbit_per_s, layers)


def figure6(layers: int | None) -> list[Row]:
    """8 machines: 16 and 64 GPUs."""
    return [HiDupSetting(m, gpus, 8, layers=layers).row() for m in HIDUP_MODELS for gpus in (16, 64)]


def figure7(layers: int | None) -> list[Row]:
    """One machine of 8 GPUs."""
    return [HiDupSetting(m, 8, layers=layers).row() for m in HIDUP_MODELS]


def figure8(layers: int | None) -> list[Row]:
    """Two machines of 4 GPUs, three bandwidths between them."""
    return [two_machines(m, gbit, layers).row() for m in ("bert-sgmoe", "vit-sgmoe") for gbit in BANDWIDTHS]


def figure11(layers: int | None) -> list[Row]:
    """Parameters of BERT-SGMoE replicated or sharded, by bandwidth: by our search and the published one."""
    rows: list[Row] = []
    for gbit in BANDWIDTHS:
        setting, row = two_machines("bert-sgmoe", gbit, layers), {"gbit_per_s": gbit}
        for suffix, strategy in (("", setting.hidup), ("_published", setting.published)):
            sharded = sum(form.is_cut for form in strategy.parameters.values())
            row |= {f"replicated{suffix}": len(strategy.parameters) - sharded, f"sharded{suffix}": sharded}
        rows.append(row)
    return rows


def table4(layers: int | None) -> list[Row]:
    """An iteration of BERT-SGMoE taken apart: one machine of 4 GPUs, two with 100 and 30 Gbit/s."""
    settings = {
        "one machine": HiDupSetting("bert-sgmoe", 4, layers=layers),
        "100 Gbit/s": two_machines("bert-sgmoe", 100, layers),
        "30 Gbit/s": two_machines("bert-sgmoe", 30, layers),
    }
    rows: list[Row] = []
    for name, setting in settings.items():
        others = WholeBatch.of(setting.expert_parallel, overlaps_gradients=False)
        for system, wall, times, overlapped in (
            ("hidup", setting.hidup.predicted_ms, setting.hidup, setting.hidup.overlapped),
            ("as published", setting.published.predicted_ms, setting.published, setting.published.overlapped),
            ("expert parallel", others.wall_ms, others, 0.0),
        ):
            numbers = wall, times.computation_ms, times.communication_ms, overlapped
            rows.append({"setting": name, "system": system} | dict(zip(PARTS, numbers, strict=True)))
    return rows


SHARED = (("8", "11", "table 4"), ("6", "7"))
"""Figures that share searches, and so a process; the longest first."""


def simulate(figures: Sequence[str], run: Run, layers: int | None = None) -> dict[str, Any]:
    """Args: layers: of the models, an even number (None: 8)."""
    groups = [chosen for group in SHARED if (chosen := [n for n in group if n in figures])]
    results: dict[str, Any] = {}
    for result in run([(_figures_of, (group, layers)) for group in groups]):
        results |= result
    return {"paper": "hidup", "figures": {number: results[number] for number in figures}}


def _figures_of(numbers: Sequence[str], layers: int | None) -> dict[str, Any]:
    return {number: FIGURES[number][0](layers) for number in numbers}


def quantities(data: Data) -> Row:
    """The quantities of the paper's claims, for the simulated figures."""
    named: Row = {}
    for number, rows in data["figures"].items():
        named |= FIGURES[number][1](rows)
    return named


def _speedups(rows: list[Row]) -> Row:
    def most(kind: str) -> float:
        return max(row["speedup"] for row in rows if row["model"].startswith(kind))

    return {"speedup": {kind: most(kind) for kind in ("bert", "vit")}}


def _sharded(rows: list[Row]) -> Row:
    counts = [row["sharded_published"] for row in rows]
    return {"sharded": dict(zip(("low", "middle", "high"), counts, strict=True))}


def _overlapped(rows: list[Row]) -> Row:
    return {"overlapped": {row["setting"]: row["overlapped"] for row in rows if row["system"] == "hidup"}}


FIGURES: dict[str, tuple[Callable[[int | None], Any], Callable[[Any], Row]]] = {
    "6": (figure6, _speedups),
    "7": (figure7, lambda rows: {"in_a_machine": Span.of(row["speedup"] for row in rows)}),
    "8": (figure8, lambda rows: {"between_machines": Span.of(row["speedup"] for row in rows)}),
    "11": (figure11, _sharded),
    "table 4": (table4, _overlapped),
}
"""The simulation of each, and the quantities of claims about it."""


def exhibits(data: Data) -> Iterator[Exhibit]:
    """One per figure and table."""
    for number, rows in data["figures"].items():
        if number in ("6", "7", "8"):
            chart = Chart("bars", ("model", "gpus", "gbit_per_s"), ("hidup_ms", "baselines_ms"))
            yield Exhibit(number, f"Figure {number}: iteration", rows, chart)
        elif number == "11":
            chart = Chart("bars", ("gbit_per_s",), ("replicated", "sharded"))
            yield Exhibit(number, "Figure 11: parameters of BERT-SGMoE", rows, chart)
        else:
            compared = [r | {"paper": PAPER_TABLE_4.get((r["setting"], r["system"]), {})} for r in rows]
            yield Exhibit(number, "Table 4: an iteration of BERT-SGMoE", compared)
