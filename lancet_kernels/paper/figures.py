"""The figures of the Lancet paper: the settings that each needs, and its data; not tables and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import fmean
from typing import Any

from lancet_kernels.environment import cpu_cores
from lancet_kernels.paper import claims
from lancet_kernels.paper.measured_figures import STRATEGIES, Decomposition, Measured, measure
from lancet_kernels.simulation import Setting

CLUSTERS = tuple(claims.DEVICE)
LAYERS = (12, 24, 48)
"""Numbers of layers for which figure 15 shows the planning time."""
UNPADDED = "lancet, unpadded"
"""The plan of `lancet` with all-to-alls that send only real rows."""

Results = Mapping[Setting, Measured]
Progress = Callable[[int, int], None]
"""Called with (number that is done, of all)."""


def _setting(cluster: str, model: str, gpus: int, gate: str = "switch") -> Setting:
    # Padded: the paper's cost model prices an all-to-all by its capacity.
    return Setting(model, cluster, gpus, gate, padded=True)


def _grid(gpus: Iterable[int], gate: str = "switch") -> list[Setting]:
    sizes = tuple(gpus)
    return [_setting(c, m, g, gate) for c in CLUSTERS for m in claims.MODELS for g in sizes]


def _by_layers() -> list[Setting]:
    # A batch for which all depths fit into memory; otherwise planning would also try fewer parts.
    return [replace(_setting("p4de", "gpt2-l-moe", 16), layers=n, batch=8) for n in LAYERS]


def _throughput(gate: str, results: Results) -> dict[str, Any]:
    measured = [results[s] for s in _grid(claims.GPUS, gate)]
    speedups = {c: [m.speedup for m in measured if m.setting.cluster == c] for c in CLUSTERS}
    return {
        "gate": gate,
        "rows": [
            _names(m)
            | {
                "iteration_ms": {s: m.iteration(s) for s in STRATEGIES},
                "out_of_memory": [s for s in STRATEGIES if not m.fits(s)],
                "speedup": m.speedup,
            }
            for m in measured
        ],
        "speedup": {c: {"mean": fmean(v), "most": max(v)} for c, v in speedups.items()},
        "paper": {"speedup": {c: claims.SPEEDUP[gate, c] for c in CLUSTERS}},
    }


def _decomposition(results: Results) -> dict[str, Any]:
    measurements = [results[s] for s in _grid([claims.ABLATION_GPUS])]
    baselines = ("none", "tutel")

    def less(m: Measured, than: str, lancet: Decomposition) -> float:
        return 1.0 - lancet.communication_ms / m.strategies[than].communication_ms

    def most(unpadded: bool) -> dict[str, dict[str, float]]:
        return {
            c: {
                than: max(
                    less(m, than, m.unpadded if unpadded else m.strategies["lancet"])
                    for m in measurements
                    if m.setting.cluster == c
                )
                for than in baselines
            }
            for c in CLUSTERS
        }

    def row(m: Measured) -> dict[str, Any]:
        bars = {**m.strategies, UNPADDED: m.unpadded}
        parts = ("iteration_ms", "computation_ms", "overlapped_ms", "communication_ms")
        return _names(m) | {part: {name: getattr(bar, part) for name, bar in bars.items()} for part in parts}

    return {
        "rows": [row(m) for m in measurements],
        "most_less_exposed": most(unpadded=False),
        "most_less_exposed_unpadded": most(unpadded=True),
        "paper": {"most_less_exposed": claims.LESS_EXPOSED},
    }


def _accuracy(results: Results) -> dict[str, Any]:
    """No accuracy: a prediction cannot be checked against itself. What wrong costs would do, instead."""
    measurements = [results[s] for s in _grid([claims.ABLATION_GPUS])]
    return {
        "prediction_error": None,
        "why": "the simulation is the prediction; only a measured iteration can show its error "
        "(`lancet bench overlap` measures one, on this machine)",
        "rows": [
            _names(m)
            | {
                "what_if": what,
                "planned_ms": m.iteration("lancet"),
                "iteration_ms": times["lancet"],
                "speedup": min(times["none"], times["tutel"]) / times["lancet"],
                "planned_speedup": m.speedup,
            }
            for m in measurements
            for what, times in m.what_if.items()
        ],
        "paper": {"prediction_error": claims.PREDICTION_ERROR},
    }


def _planning(results: Results) -> dict[str, Any]:
    measurements = [results[s] for s in _grid(claims.GPUS)]
    deep = [results[s] for s in _by_layers()]
    ends = deep[0].planning_seconds, deep[-1].planning_seconds
    return {
        "measured_here": True,
        "rows": [
            _names(m) | {"seconds": m.planning_seconds, "instructions": m.instructions} for m in measurements
        ],
        "by_layers": [
            {"layers": n, "seconds": m.planning_seconds, "instructions": m.instructions}
            for n, m in zip(LAYERS, deep, strict=True)
        ],
        "growth": {"layers": LAYERS[-1] / LAYERS[0], "seconds": ends[1] / ends[0]},
        "paper": {"minutes": claims.PLANNING_MINUTES},
    }


def _ablation(results: Results) -> dict[str, Any]:
    measured = [results[s] for s in _grid([claims.ABLATION_GPUS])]
    halves = ("lancet-dw", "lancet-partition", "lancet")
    rows = [
        _names(m) | {"speedup": {s: m.iteration("none") / m.iteration(s) for s in halves}} for m in measured
    ]
    return {
        "rows": rows,
        "each_half_helps": all(min(r["speedup"].values()) > 1.0 for r in rows),
        "both_help_more": all(
            r["speedup"]["lancet"] > max(r["speedup"][s] for s in halves[:2]) for r in rows
        ),
        "paper": {"each_half_helps": True, "both_help_more": True},
    }


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: its title, its settings, and its data as a function of their results."""

    title: str
    settings: Callable[[], list[Setting]]
    data: Callable[[Results], dict[str, Any]]
    what_if: bool = False
    how: str = "simulated"

    def of(self, results: Results) -> dict[str, Any]:
        """Title, method ("simulated"), and data, as JSON values."""
        return {"title": self.title, "how": self.how, **self.data(results)}


FIGURES = {
    "11": Figure(
        "Iteration time, Switch gate",
        lambda: _grid(claims.GPUS),
        lambda results: _throughput("switch", results),
    ),
    "12": Figure(
        "Iteration time, Batch Prioritized gate",
        lambda: _grid(claims.GPUS, "batch-prioritized"),
        lambda results: _throughput("batch-prioritized", results),
    ),
    "13": Figure("Decomposition of the iteration", lambda: _grid([claims.ABLATION_GPUS]), _decomposition),
    "14": Figure(
        "Accuracy of the cost model", lambda: _grid([claims.ABLATION_GPUS]), _accuracy, what_if=True
    ),
    "15": Figure(
        "Planning time",
        lambda: [*_grid(claims.GPUS), *_by_layers()],
        _planning,
        how="measured on this machine, planning for simulated clusters",
    ),
    "16": Figure("Ablation", lambda: _grid([claims.ABLATION_GPUS]), _ablation),
}


def run_figures(numbers: Sequence[str], progress: Progress) -> dict[str, dict[str, Any]]:
    """The data of the figures; each setting is simulated once, on all cores."""
    what_if_of: dict[Setting, bool] = {}
    for number in numbers:
        for setting in FIGURES[number].settings():
            what_if_of[setting] = what_if_of.get(setting, False) or FIGURES[number].what_if
    results = _measure_all(what_if_of, progress)
    return {number: FIGURES[number].of(results) for number in numbers}


def _measure_all(what_if_of: Mapping[Setting, bool], progress: Progress) -> Results:
    # Deep models first, so that the last simulations are short.
    order = sorted(what_if_of, key=lambda s: -(s.layers or (24 if "-l-" in s.model else 12)))
    results: dict[Setting, Measured] = {}
    # Spawned, not forked: torch's threads do not survive a fork.
    with ProcessPoolExecutor(cpu_cores(), mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(measure, setting, what_if_of[setting]): setting for setting in order}
        progress(0, len(jobs))
        for job in as_completed(jobs):
            results[jobs[job]] = job.result()
            progress(len(results), len(jobs))
    return results


def _names(m: Measured) -> dict[str, Any]:
    s = m.setting
    return {"cluster": s.cluster, "model": s.model, "gpus": s.gpus, "batch": m.batch}
