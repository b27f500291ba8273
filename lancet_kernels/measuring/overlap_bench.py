"""How much all-to-all time do the strategies hide? Measured on ranks of this machine, in one run.

The same model, seeds and data for every strategy; rounds interleave them, so that other load of the machine
affects all of them equally; medians over rounds, without warm-up rounds. The link is slow enough that
all-to-all takes a given share of the blocking iteration (the paper: up to 40 %). An iteration is forward,
backward and gradient all-reduce.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lancet_kernels.ops.link import emulate_link, link
from lancet_kernels.ops.waiting import waiting
from lancet_kernels.optimization import optimize
from lancet_kernels.optimized_module import OptimizedModule
from lancet_kernels.schedules.strategies import AUTO, PlanningOptions
from lancet_kernels.schedules.timeline import save_picture

BASELINES = ("none", "tutel")


@dataclass(frozen=True)
class Measured:
    """Medians of one strategy, means over the ranks, in milliseconds per iteration."""

    iteration_ms: float
    exposed_ms: float
    all_to_all_ms: float
    cpu_ms: float
    predicted_ms: float
    predicted_exposed_ms: float
    rounds_ms: tuple[float, ...]
    """The iteration of each round, for ratios of what ran side by side."""


def prepare(
    step: nn.Module,
    inputs: Sequence[object],
    strategies: Iterable[str],
    times: str | Path | None = None,
    options: PlanningOptions | None = None,
) -> dict[str, OptimizedModule]:
    """The step under each strategy that it can have. Collective.

    Args: times: file of measured op times. options: of plans.
    """
    names = list(strategies)
    optimized: dict[str, OptimizedModule] = {}
    # First the one that knows which others cannot be.
    for name in sorted(names, key=lambda name: name != AUTO):
        if not any(name in module.plan.impossible for module in optimized.values()):
            optimized[name] = optimize(step, inputs, strategy=name, times=times, options=options)
    return {name: optimized[name] for name in names if name in optimized}


def measure(
    optimized: dict[str, OptimizedModule], inputs: Sequence[object], rounds: int, warmup: int = 2
) -> dict[str, Measured]:
    """Run all strategies in turn, `rounds` times after `warmup` rounds. Collective."""
    taken: dict[str, list[Iteration]] = {name: [] for name in optimized}
    for round_number in range(warmup + rounds):
        for name, module in optimized.items():
            one = iteration(module, inputs)
            if round_number >= warmup:
                taken[name].append(one)
    found = {}
    for name, module in optimized.items():
        medians = [statistics.median(column) for column in zip(*taken[name], strict=True)][:4]
        iteration_ms, exposed_ms, all_to_all_ms, cpu_ms = _mean_over_ranks(medians)
        predicted = module.plan.predicted
        rounds_ms = tuple(_mean_over_ranks([one.iteration_ms for one in taken[name]]))
        found[name] = Measured(
            iteration_ms,
            exposed_ms,
            all_to_all_ms,
            cpu_ms,
            predicted.iteration_ms,
            predicted.exposed_ms,
            rounds_ms,
        )
    return found


class Iteration(NamedTuple):
    """One forward and backward on this rank."""

    iteration_ms: float
    exposed_ms: float
    all_to_all_ms: float
    cpu_ms: float
    """CPU time of the computing thread: what an iteration takes where nothing is waited for."""
    bytes_on_wire: int


def iteration(module: nn.Module, inputs: Sequence[object]) -> Iteration:
    """Run one; the first output of the module is differentiated. Collective."""
    module.zero_grad(set_to_none=True)
    if dist.is_initialized():
        with waiting("barrier before an iteration"):
            dist.barrier()
    link.read()
    begin, cpu = time.perf_counter(), time.thread_time()
    outputs = module(*inputs)
    (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).backward()
    elapsed_ms, cpu_ms = (time.perf_counter() - begin) * 1e3, (time.thread_time() - cpu) * 1e3
    traffic = link.read()
    return Iteration(elapsed_ms, traffic.exposed_ms, traffic.all_to_all_ms, cpu_ms, traffic.bytes_on_wire)


def slow_link(step: nn.Module, inputs: Sequence[object], share: float = 0.4, rounds: int = 5) -> float:
    """Gbit/s of an emulated link on which all-to-all takes `share` of the blocking iteration. Collective.

    Sets that link. The blocking iteration is the plain step, whose all-to-alls block.
    """
    emulate_link(None)
    taken = [iteration(step, inputs) for _ in range(rounds + 1)][1:]
    # CPU time: what else the machine does is no computation of ours that a link could take a share of.
    compute_ms, size = _mean_over_ranks([statistics.median(t.cpu_ms for t in taken), taken[-1].bytes_on_wire])
    target_ms = compute_ms * share / (1 - share)
    gbps = size * 8 / (target_ms * 1e-3) / 1e9
    emulate_link(gbps)
    return gbps


def report(measured: dict[str, Measured], best: str, link_name: str) -> dict[str, object]:
    """The figures of strategy `best` against the baselines that were run."""
    own = measured[best]
    baselines = {name: measured[name] for name in BASELINES if name in measured}
    errors = {name: abs(m.predicted_ms / m.iteration_ms - 1) for name, m in measured.items()}
    found: dict[str, object] = {
        "link": link_name,
        "best": best,
        "iteration_ms": {name: m.iteration_ms for name, m in measured.items()},
        "exposed_ms": {name: m.exposed_ms for name, m in measured.items()},
        "all_to_all_ms": {name: m.all_to_all_ms for name, m in measured.items()},
        "cpu_ms": {name: m.cpu_ms for name, m in measured.items()},
        "predicted_ms": {name: m.predicted_ms for name, m in measured.items()},
        "predicted_exposed_ms": {name: m.predicted_exposed_ms for name, m in measured.items()},
        "prediction_error": statistics.fmean(errors.values()),
        "prediction_errors": errors,
        "speedup_vs_best_baseline": min(m.iteration_ms for m in baselines.values()) / own.iteration_ms,
    }
    for name, m in baselines.items():
        found[f"exposed_reduction_vs_{name}"] = 1 - own.exposed_ms / m.exposed_ms if m.exposed_ms else 0.0
    return found


def speedups(baseline: Measured, planned: Measured) -> tuple[float, float, float]:
    """How many times as fast as the baseline, over rounds: lower quartile, median, upper quartile.

    Each round compares two iterations that ran within seconds of each other, so a machine that becomes slower
    or faster meanwhile affects both.
    """
    ratios = [a / b for a, b in zip(baseline.rounds_ms, planned.rounds_ms, strict=True)]
    if len(ratios) == 1:
        return ratios[0], ratios[0], ratios[0]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high


def _mean_over_ranks(values: Sequence[float]) -> list[float]:
    numbers = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        with waiting("mean of the times over the ranks"):
            dist.all_reduce(numbers)
        numbers /= dist.get_world_size()
    return numbers.tolist()


def save_timeline(module: OptimizedModule, inputs: Sequence[object], path: str | Path, write: bool) -> None:
    """A picture of one iteration, predicted and as it ran on this rank. Collective; `write` on one rank
    only."""
    with module.recorded() as events:
        iteration(module, inputs)
    if write:
        save_picture({"predicted": module.timeline.events, "measured": events}, path)


def table(found: dict) -> str:
    """The figures of `report` for people."""
    rows = [f"{'strategy':<18}{'iteration ms':>14}{'exposed ms':>12}{'predicted ms':>14}{'error':>8}"]
    for name, iteration_ms in found["iteration_ms"].items():
        rows.append(
            f"{name:<18}{iteration_ms:>14.1f}{found['exposed_ms'][name]:>12.1f}"
            f"{found['predicted_ms'][name]:>14.1f}{found['prediction_errors'][name]:>8.1%}"
        )
    speedup = found["speedup_vs_best_baseline"]
    rows.append(
        f"link {found['link']}; {found['best']} against the better baseline {speedup:.2f}x, "
        + ", ".join(
            f"exposed {-found[f'exposed_reduction_vs_{name}']:+.0%} against {name}"
            for name in BASELINES
            if f"exposed_reduction_vs_{name}" in found
        )
    )
    return "\n".join(rows)
