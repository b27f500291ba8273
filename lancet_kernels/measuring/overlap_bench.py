"""Measures how much all-to-all time each strategy hides, on ranks of this machine, in one run.

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

from lancet_kernels.ops.comm.link import emulate_link, link
from lancet_kernels.ops.comm.waiting import waiting
from lancet_kernels.optimization.optimize import optimize
from lancet_kernels.optimization.optimized_module import OptimizedModule
from lancet_kernels.schedules.strategies import AUTO, PlanningOptions
from lancet_kernels.schedules.time.timeline import save_picture

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


def prepare(
    step: nn.Module,
    inputs: Sequence[object],
    strategies: Iterable[str],
    times: str | Path | None = None,
    options: PlanningOptions | None = None,
) -> dict[str, OptimizedModule]:
    """The step optimized with each strategy, without those that are impossible. Collective.

    Args: times: file of measured op times. options: of the planner.
    """
    names = list(strategies)
    optimized: dict[str, OptimizedModule] = {}
    # `auto` first, because its plan lists the impossible strategies.
    for name in sorted(names, key=lambda name: name != AUTO):
        if not any(name in module.plan.impossible for module in optimized.values()):
            optimized[name] = optimize(step, inputs, strategy=name, times=times, options=options)
    return {name: optimized[name] for name in names if name in optimized}


def measure(
    optimized: dict[str, OptimizedModule], inputs: Sequence[object], rounds: int, warmup: int = 2
) -> dict[str, Measured]:
    """Run all strategies in turn, `rounds` times after `warmup` rounds. Collective."""
    iterations: dict[str, list[Iteration]] = {name: [] for name in optimized}
    for round_number in range(warmup + rounds):
        for name, module in optimized.items():
            one = iteration(module, inputs)
            if round_number >= warmup:
                iterations[name].append(one)
    result = {}
    for name, module in optimized.items():
        medians = [statistics.median(column) for column in zip(*iterations[name], strict=True)][:4]
        iteration_ms, exposed_ms, all_to_all_ms, cpu_ms = _mean_over_ranks(medians)
        predicted = module.plan.predicted
        result[name] = Measured(
            iteration_ms,
            exposed_ms,
            all_to_all_ms,
            cpu_ms,
            predicted.iteration_ms,
            predicted.exposed_ms,
        )
    return result


class Iteration(NamedTuple):
    """One forward and backward on this rank."""

    iteration_ms: float
    exposed_ms: float
    all_to_all_ms: float
    cpu_ms: float
    """CPU time of the computing thread, which is the iteration time without waiting."""
    bytes_on_wire: int


def iteration(module: nn.Module, inputs: Sequence[object]) -> Iteration:
    """Run one forward and backward; the backward starts at the module's first output. Collective."""
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
    """Emulate a link on which all-to-all takes `share` of the blocking iteration. -> its Gbit/s. Collective.

    The blocking iteration is the plain step, whose all-to-alls block.
    """
    emulate_link(None)
    iterations = [iteration(step, inputs) for _ in range(rounds + 1)][1:]
    # CPU time, because other load of the machine does not belong to the iteration.
    compute_ms, size = _mean_over_ranks(
        [statistics.median(t.cpu_ms for t in iterations), iterations[-1].bytes_on_wire]
    )
    target_ms = compute_ms * share / (1 - share)
    gbps = size * 8 / (target_ms * 1e-3) / 1e9
    emulate_link(gbps)
    return gbps


def report(measured: dict[str, Measured], best: str, link_name: str) -> dict[str, object]:
    """The figures of strategy `best`, compared with the measured baselines."""
    own = measured[best]
    baselines = {name: measured[name] for name in BASELINES if name in measured}
    errors = {name: abs(m.predicted_ms / m.iteration_ms - 1) for name, m in measured.items()}
    figures: dict[str, object] = {
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
        figures[f"exposed_reduction_vs_{name}"] = 1 - own.exposed_ms / m.exposed_ms if m.exposed_ms else 0.0
    return figures


def _mean_over_ranks(values: Sequence[float]) -> list[float]:
    numbers = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        with waiting("mean of the times over the ranks"):
            dist.all_reduce(numbers)
        numbers /= dist.get_world_size()
    return numbers.tolist()


def save_timeline(module: OptimizedModule, inputs: Sequence[object], path: str | Path, write: bool) -> None:
    """Draw one iteration, predicted and measured on this rank. Collective; `write` on one rank only."""
    with module.recorded() as events:
        iteration(module, inputs)
    if write:
        save_picture({"predicted": module.timeline.events, "measured": events}, path)


def table(figures: dict) -> str:
    """The figures of `report` as a table for people."""
    rows = [f"{'strategy':<18}{'iteration ms':>14}{'exposed ms':>12}{'predicted ms':>14}{'error':>8}"]
    for name, iteration_ms in figures["iteration_ms"].items():
        rows.append(
            f"{name:<18}{iteration_ms:>14.1f}{figures['exposed_ms'][name]:>12.1f}"
            f"{figures['predicted_ms'][name]:>14.1f}{figures['prediction_errors'][name]:>8.1%}"
        )
    speedup = figures["speedup_vs_best_baseline"]
    rows.append(
        f"link {figures['link']}; {figures['best']} against the better baseline {speedup:.2f}x, "
        + ", ".join(
            f"exposed {-figures[f'exposed_reduction_vs_{name}']:+.0%} against {name}"
            for name in BASELINES
            if f"exposed_reduction_vs_{name}" in figures
        )
    )
    return "\n".join(rows)
