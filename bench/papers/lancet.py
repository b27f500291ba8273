"""Lancet's evaluation (MLSys 2024, section 7) by simulation: figures 11 to 16 without 14.

A figure needs the results of some settings; its data are ratios and means of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from bench.papers.report import Chart, Data, Exhibit, Run
from lancet_kernels.graph.program import Instruction, Kind, TensorSpec
from lancet_kernels.predict.simulate import ASSUMPTIONS as OF_THE_SIMULATION
from lancet_kernels.predict.simulate import Setting, Simulated, simulate_setting
from lancet_kernels.schedules.time.simulate import Timeline
from lancet_kernels.schedules.time.simulate import simulate as simulated_order

BASELINES = ("none", "tutel")
COMPARED = (*BASELINES, "lancet-dw", "lancet-partition", "lancet")
"""The strategies that the paper compares."""


@dataclass(frozen=True)
class Decomposition:
    """The parts of an iteration, in milliseconds (figure 13)."""

    iteration_ms: float
    computation_ms: float
    """Not overlapped."""
    overlapped_ms: float
    communication_ms: float
    """Not overlapped: computation idles."""
    peak_memory_gb: float

    @classmethod
    def of(cls, timeline: Timeline) -> Decomposition:
        busy = sum(timeline.times.end[i] - timeline.times.start[i] for i in timeline.times.messages)
        computing = sum(timeline.times.end[i] - timeline.times.start[i] for i in timeline.times.compute)
        overlapped = busy - timeline.exposed_ms
        return cls(
            timeline.iteration_ms,
            computing - overlapped,
            overlapped,
            timeline.exposed_ms,
            timeline.peak_memory_bytes / 1e9,
        )


@dataclass(frozen=True)
class Measured:
    """The simulated results of one setting, by strategy."""

    setting: Setting
    instructions: int
    strategies: Mapping[str, Decomposition]
    unpadded: Decomposition
    """The plan `lancet` with all-to-alls that send only real rows, as Lancet's irregular ones do."""
    planning_seconds: float
    """CPU time of planning `lancet`."""

    def iteration(self, strategy: str) -> float:
        return self.strategies[strategy].iteration_ms

    def fits(self, strategy: str) -> bool:
        return self.strategies[strategy].peak_memory_gb <= self.setting.hardware.memory_gb

    @property
    def speedup(self) -> float:
        """The speedup of `lancet` over the better baseline."""
        return min(map(self.iteration, BASELINES)) / self.iteration("lancet")


def measure(setting: Setting) -> Measured:
    """Plan and simulate one setting."""
    simulated = simulate_setting(setting, strategies=COMPARED)
    return Measured(
        replace(setting),  # without the cached graph, which should not be sent
        len(simulated.program),
        {name: Decomposition.of(timeline) for name, timeline in simulated.timelines.items()},
        Decomposition.of(_with_real_rows(simulated, setting)),
        simulated.cpu_seconds["lancet"],
    )


def _with_real_rows(simulated: Simulated, setting: Setting) -> Timeline:
    """The plan `lancet` with unpadded all-to-alls, of only real rows: 1 / capacity factor of all."""
    share = 1.0 / max(1.0, setting.capacity_factor or 1.0) if setting.padded else 1.0

    def cost(instruction: Instruction, tensors: Mapping[str, TensorSpec]) -> float:
        ms = simulated.cost(instruction, tensors)
        return ms * share if instruction.kind is Kind.ALL_TO_ALL else ms

    plan, program = simulated.plans["lancet"], simulated.timelines["lancet"].program
    return simulated_order(program.reordered(plan.order), cost, blocking=plan.blocking)


TITLE = "Figures of the Lancet paper (MLSys 2024)"
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

CLUSTERS = ("p4de", "p3dn")
"""Clusters of A100 and of V100."""
MODELS = ("gpt2-s-moe", "gpt2-l-moe")
GPUS = (16, 32, 48, 64)
ABLATION_GPUS = 32
"""Figures 13 and 16: four nodes of eight."""
LAYERS = (12, 24, 48)
"""For which figure 15 shows the planning time."""
UNPADDED = "lancet, unpadded"
"""The plan of `lancet` with all-to-alls that send only real rows."""
Results = Mapping[Setting, Measured]


def _setting(cluster: str, model: str, gpus: int, gate: str = "switch") -> Setting:
    # Padded: the paper's cost model prices an all-to-all by its capacity.
    return Setting(model, cluster, gpus, gate, padded=True)


def _grid(gpus: Sequence[int], gate: str = "switch") -> list[Setting]:
    return [_setting(c, m, g, gate) for c in CLUSTERS for m in MODELS for g in gpus]


def _ablated() -> list[Setting]:
    return _grid([ABLATION_GPUS])


def _by_layers() -> list[Setting]:
    # A batch for which all depths fit into memory; otherwise planning would also try fewer parts.
    return [replace(_setting("p4de", "gpt2-l-moe", 16), layers=n, batch=8) for n in LAYERS]


def _names(m: Measured) -> dict[str, Any]:
    s = m.setting
    return {"cluster": s.cluster, "model": s.model, "gpus": s.gpus, "batch": s.sequences}


def _throughput(gate: str, results: Results) -> dict[str, Any]:
    measured = [results[s] for s in _grid(GPUS, gate)]
    speedups = {c: [m.speedup for m in measured if m.setting.cluster == c] for c in CLUSTERS}
    return {
        "gate": gate,
        "rows": [
            _names(m)
            | {
                "iteration_ms": {s: m.iteration(s) for s in COMPARED},
                "out_of_memory": [s for s in COMPARED if not m.fits(s)],
                "speedup": m.speedup,
            }
            for m in measured
        ],
        "speedup": {c: {"mean": fmean(v), "most": max(v)} for c, v in speedups.items()},
    }


def _decomposition(results: Results) -> dict[str, Any]:
    measured = [results[s] for s in _ablated()]

    def most(bar: Callable[[Measured], Decomposition]) -> dict[str, dict[str, float]]:
        def less(m: Measured, than: str) -> float:
            return 1.0 - bar(m).communication_ms / m.strategies[than].communication_ms

        return {
            c: {than: max(less(m, than) for m in measured if m.setting.cluster == c) for than in BASELINES}
            for c in CLUSTERS
        }

    def row(m: Measured) -> dict[str, Any]:
        bars = {**m.strategies, UNPADDED: m.unpadded}
        parts = ("iteration_ms", "computation_ms", "overlapped_ms", "communication_ms")
        return _names(m) | {part: {name: getattr(bar, part) for name, bar in bars.items()} for part in parts}

    return {
        "rows": [row(m) for m in measured],
        "most_less_exposed": most(lambda m: m.strategies["lancet"]),
        "most_less_exposed_unpadded": most(lambda m: m.unpadded),
    }


def _planning(results: Results) -> dict[str, Any]:
    def row(m: Measured) -> dict[str, Any]:
        return {"seconds": m.planning_seconds, "instructions": m.instructions}

    deep = [results[s] for s in _by_layers()]
    return {
        "measured_here": True,
        "rows": [_names(m) | row(m) for m in (results[s] for s in _grid(GPUS))],
        "by_layers": [{"layers": n} | row(m) for n, m in zip(LAYERS, deep, strict=True)],
        "growth": {
            "layers": LAYERS[-1] / LAYERS[0],
            "seconds": deep[-1].planning_seconds / deep[0].planning_seconds,
        },
    }


def _ablation(results: Results) -> dict[str, Any]:
    strategies = ("lancet-dw", "lancet-partition", "lancet")
    rows = [
        _names(m) | {"speedup": {s: m.iteration("none") / m.iteration(s) for s in strategies}}
        for m in (results[s] for s in _ablated())
    ]
    speedups = [r["speedup"] for r in rows]
    return {
        "rows": rows,
        "each_half_helps": all(min(s.values()) > 1.0 for s in speedups),
        "both_help_more": all(s["lancet"] > max(s[half] for half in strategies[:2]) for s in speedups),
    }


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: its settings, and its data as a function of their results."""

    title: str
    settings: Callable[[], list[Setting]]
    data: Callable[[Results], dict[str, Any]]
    how: str = "simulated"


FIGURES = {
    "11": Figure("Iteration time, Switch gate", lambda: _grid(GPUS), partial(_throughput, "switch")),
    "12": Figure(
        "Iteration time, Batch Prioritized gate",
        lambda: _grid(GPUS, "batch-prioritized"),
        partial(_throughput, "batch-prioritized"),
    ),
    "13": Figure("Decomposition of the iteration", _ablated, _decomposition),
    "15": Figure(
        "Planning time",
        lambda: [*_grid(GPUS), *_by_layers()],
        _planning,
        how="measured on this machine, planning for simulated clusters",
    ),
    "16": Figure("Ablation", _ablated, _ablation),
}


def simulate(figures: Sequence[str], run: Run) -> dict[str, Any]:
    """Simulate each setting once. -> title, method ("simulated") and data of figures."""
    settings = dict.fromkeys(s for name in figures for s in FIGURES[name].settings())
    # Deep models first, so that the last simulations are short.
    deep_first = sorted(settings, key=lambda s: -(s.layers or (24 if "-l-" in s.model else 12)))
    results = run([(measure, (setting,)) for setting in deep_first])
    by_setting = dict(zip(deep_first, results, strict=True))
    chosen = {name: FIGURES[name] for name in figures}
    return {"figures": {n: {"title": f.title, "how": f.how, **f.data(by_setting)} for n, f in chosen.items()}}


def quantities(data: Data) -> dict[str, Any]:
    """The quantities of the paper's claims: `figure_11` and so on, `answers` of the ablation."""
    named = {f"figure_{number}": dict(figure) for number, figure in data["figures"].items()}
    if planning := named.get("figure_15"):
        planning["most_seconds"] = max(row["seconds"] for row in planning["rows"])
    if ablation := named.get("figure_16"):
        named["answers"] = {key: "yes" if value is True else "no" for key, value in ablation.items()}
    return named


def exhibits(data: Data) -> Iterator[Exhibit]:
    """One per figure, two of figures 13 and 15."""
    places = ("cluster", "model")
    for number, figure in data["figures"].items():
        title, rows = f"Figure {number}: {figure['title']} ({figure['how']})", figure["rows"]
        if number in ("11", "12"):
            chart = Chart("bars", ("gpus", "speedup"), ("iteration_ms",), places)
            full = "the strategies under `out_of_memory` do not fit into the GPU's memory"
            yield Exhibit(
                number, title, [r | {"speedup": round(r["speedup"], 2)} for r in rows], chart, [full]
            )
        elif number == "13":
            parts = ("computation_ms", "overlapped_ms", "communication_ms")
            bars = [
                {key: r[key] for key in (*places, "gpus")}
                | {"strategy": s}
                | {part: r[part][s] for part in parts}
                for r in rows
                for s in r["iteration_ms"]
            ]
            yield Exhibit(number, title, bars, Chart("stack", ("strategy",), parts, places))
        elif number == "15":
            yield Exhibit(number, title, rows, Chart("lines", ("gpus",), ("seconds",), places))
            growth = "{layers:.0f} times the layers take {seconds:.1f} times as long".format(
                **figure["growth"]
            )
            deep = [{"layers of gpt2-l-moe": r["layers"], **r} for r in figure["by_layers"]]
            chart = Chart("lines", ("layers of gpt2-l-moe",), ("seconds",))
            yield Exhibit(number, "gpt2-l-moe with other depths, p4de, 16 GPUs", deep, chart, [growth])
        else:
            chart = Chart("bars", ("model",), ("speedup",), ("cluster",))
            yield Exhibit(number, title, rows, chart, ["speedup over none (RAF)"])
