"""Measures a training step on the ranks of this job, in one run: unplanned, in DistributedDataParallel, and
with the plan of each strategy.

All have the same model, seeds and data. Rounds interleave them, so that other load of the machine affects all
equally; means are over the middle half of the rounds, by time, without warm-up rounds. An iteration is
forward, backward and the sums of gradients. `slow_link` emulates a link on which all-to-all takes a given
share of the blocking iteration (the paper: up to 40 %).
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lancet_kernels.errors import UserError
from lancet_kernels.layer.data_parallel import ddp
from lancet_kernels.layer.model_layers import groups_of
from lancet_kernels.layer.summed_gradients import SummedModule
from lancet_kernels.ops.comm.groups import group_name, group_size, over_ranks, values_of_ranks
from lancet_kernels.ops.comm.link import emulate_link, link, seconds_without_core
from lancet_kernels.ops.comm.waiting import waiting
from lancet_kernels.optimization.optimized_module import OptimizedModule
from lancet_kernels.optimization.paired import loss_of
from lancet_kernels.schedules.plan import PLAIN, Plan
from lancet_kernels.schedules.time.timeline import Prediction, save_picture
from lancet_kernels.timing import in_turn, peak_memory_gb

Inputs = Sequence | Mapping[str, object]
"""The inputs of one step, by position or by name."""
DDP, DDP_LIKE = "ddp", "ddp-like"
BASELINES = ("none", "tutel")
COUNTS = "exchange_counts"
_FIGURES, _UNCUT = "figures of all ranks", "uncut graph"
TIMES = ("iteration_ms", "exposed_ms", "all_to_all_ms", "cpu_ms", "late_ms", "no_core_ms")
"""The numbers of `Iteration` of which `Measured` has the means."""


@dataclass(frozen=True)
class Iteration:
    """One forward and backward on this rank, in milliseconds.

    exposed_ms: the part of `all_to_all_ms` for which computation waited. cpu_ms: CPU time of the computing
    thread; on a GPU the time in which its stream does not wait. waited_ms: time that computation waited, by
    collective of this library, the exchange of counts included. late_ms: the part of `exposed_ms` that waits
    for stragglers (0 without an emulated link, which alone can tell). no_core_ms: time in which the thread
    was ready and had no core. `no_core_ms` and `cpu_ms` are without its waits.
    """

    iteration_ms: float
    exposed_ms: float
    all_to_all_ms: float
    cpu_ms: float
    waited_ms: Mapping[str, float]
    late_ms: float = 0.0
    no_core_ms: float = 0.0
    bytes_on_wire: float = 0.0


@dataclass(frozen=True)
class Measured(Iteration):
    """Means of one contender over the middle half of its rounds and over the ranks.

    peak_memory_gb: parameters, buffers, inputs, and the most that an iteration holds beside them. predicted:
    for a plan.
    """

    peak_memory_gb: float = 0.0
    predicted: Prediction | None = None

    def account(self, uncut_ms: float) -> dict[str, float]:
        """The parts of `iteration_ms`, all measured but `other`, the remainder. Waits for the exchange of
        counts, a few bytes, count as waits for stragglers.

        Args: uncut_ms: CPU time of the same step with nothing cut.
        """
        waited = dict(self.waited_ms)
        late_ms = self.late_ms + waited.pop(COUNTS, 0.0)
        parts = {"computation": uncut_ms, "cutting": self.cpu_ms - uncut_ms}
        parts |= {f"exposed {collective}": ms for collective, ms in waited.items()}
        if "all_to_all" in waited:
            parts["exposed all_to_all"] -= self.late_ms
        parts |= {"late rank": late_ms, "no core": self.no_core_ms}
        return {**parts, "other": self.iteration_ms - sum(parts.values())}


def baselines(step: nn.Module, inputs: Inputs) -> dict[str, nn.Module]:
    """The plain step, whose gradients are not summed; on several ranks also a copy that sums them, in
    DistributedDataParallel, or, because that cannot use an emulated link, in `SummedModule`. Collective."""
    if not dist.is_initialized():
        return {PLAIN: step}
    if link.gbps is not None:
        groups = groups_of(step)
        return {PLAIN: step, DDP_LIKE: SummedModule(step, groups, group_size(groups.data))}
    iteration(step, inputs)
    unused = [p for p in step.parameters() if p.requires_grad and p.grad is None]
    (ranks_with_unused,) = _mean_over_ranks([float(bool(unused))])
    wrapped = ddp(copy.deepcopy(step), find_unused_parameters=ranks_with_unused > 0)
    return {PLAIN: step, DDP: wrapped}


def measure(
    contenders: Mapping[str, nn.Module],
    inputs: Inputs,
    rounds: int,
    warmup: int = 2,
    accumulate: int = 1,
) -> dict[str, Measured]:
    """Run all contenders in turn, `rounds` times after `warmup` rounds. Collective.

    The rounds also run the uncut graph of the step, and plans are predicted anew with the speed that it had:
    a change of the machine's speed is then no error of the prediction.
    Args: accumulate: microbatches of an iteration.
    """
    plans = [m for m in contenders.values() if isinstance(m, OptimizedModule) and m.is_measured]
    runs: dict[str, Callable[[], Any]] = {
        name: partial(iteration, module, inputs, accumulate) for name, module in contenders.items()
    }
    if plans:
        runs[_UNCUT] = partial(_at_once, plans[0].run_as_a_whole())
    results = in_turn(runs, lambda name: runs[name](), rounds, warmup)
    if plans:
        times = sorted(results.pop(_UNCUT))
        (uncut_ms,) = _mean_over_ranks([statistics.fmean(_middle_half(times))])
        for module in plans:
            module.at_speed(uncut_ms)
    return {name: _measured(module, inputs, results[name], accumulate) for name, module in contenders.items()}


def _at_once(run: Callable[[], float]) -> float:
    _barrier()
    return run()


def _middle_half(ordered: list[Any]) -> list[Any]:
    return ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]


def _measured(module: nn.Module, inputs: Inputs, iterations: list[Iteration], accumulate: int) -> Measured:
    # The union over the ranks, because the means are collective, and a rank may have waited for nothing.
    by_rank = values_of_ranks([*iterations[-1].waited_ms], group_name(None), _FIGURES)
    waits = sorted({what for own in by_rank for what in own})
    middle = _middle_half(sorted(iterations, key=lambda one: one.iteration_ms))
    # Means, because medians of the parts do not add up to that of the whole.
    own = {name: statistics.fmean(getattr(one, name) for one in middle) for name in TIMES}
    waited = [statistics.fmean(one.waited_ms.get(what, 0.0) for one in middle) for what in waits]
    held = peak_memory_gb(module, inputs, lambda: iteration(module, inputs, accumulate))
    memory, *means = _mean_over_ranks([held, *own.values(), *waited])
    return Measured(
        **dict(zip(TIMES, means, strict=False)),
        waited_ms=dict(zip(waits, means[len(TIMES) :], strict=True)),
        peak_memory_gb=memory,
        predicted=_predicted(module, accumulate) if isinstance(module, OptimizedModule) else None,
    )


def _predicted(module: OptimizedModule, accumulate: int) -> Prediction:
    """The plan's prediction for an iteration of several microbatches."""
    one, pair_ms = module.plan.report.predicted, module.plan.report.pair_ms
    several = one.iteration_ms * accumulate
    if module.plan.pair:
        several = module.timeline.times.last_ms + pair_ms * (accumulate - 1)
    return replace(one, iteration_ms=several, exposed_ms=one.exposed_ms * accumulate)


def iteration(module: nn.Module, inputs: Inputs, accumulate: int = 1) -> Iteration:
    """Run one forward and backward, or those of several microbatches whose gradients are summed once; each
    backward starts at `loss_of` the output. Collective.

    Raises: UserError for a module without a differentiable output.
    """
    module.zero_grad(set_to_none=True)
    _barrier()
    link.read()
    begin, cpu, without = time.perf_counter(), time.thread_time(), seconds_without_core()
    link.times_cores = True
    try:
        _run(module, inputs, accumulate)
    finally:
        link.times_cores = False
    elapsed_ms, cpu_ms = (time.perf_counter() - begin) * 1e3, (time.thread_time() - cpu) * 1e3
    no_core_ms, traffic = (seconds_without_core() - without) * 1e3, link.read()
    computing_ms, no_core_ms = cpu_ms - traffic.waiting_cpu_ms, no_core_ms - traffic.waiting_for_core_ms
    if any(parameter.is_cuda for parameter in module.parameters()):
        computing_ms, no_core_ms = elapsed_ms - sum(traffic.waited_ms.values()), 0.0
    return Iteration(
        elapsed_ms,
        traffic.exposed_ms,
        traffic.all_to_all_ms,
        computing_ms,
        traffic.waited_ms,
        traffic.exposed_ms - traffic.wire_exposed_ms if link.gbps is not None else 0.0,
        no_core_ms,
        traffic.bytes_on_wire,
    )


def iteration_ms(module: nn.Module, inputs: Inputs) -> float:
    """Milliseconds of an `iteration`, without timing its parts. Collective."""
    module.zero_grad(set_to_none=True)
    _barrier()
    begin = time.perf_counter()
    _run(module, inputs, 1)
    return (time.perf_counter() - begin) * 1e3


def _barrier() -> None:
    if dist.is_initialized():
        with waiting("barrier before an iteration"):
            dist.barrier()


def _run(module: nn.Module, inputs: Inputs, accumulate: int) -> None:
    if isinstance(module, OptimizedModule) and accumulate > 1:
        module.microbatches([inputs] * accumulate)
    else:
        no_sync = getattr(module, "no_sync", contextlib.nullcontext)
        for number in range(accumulate):
            with no_sync() if number < accumulate - 1 else contextlib.nullcontext():
                result = module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)
                loss_of(result, "the step").backward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def slow_link(step: nn.Module, inputs: Inputs, share: float) -> float:
    """Emulate a link on which all-to-all takes `share` of the blocking iteration. -> its Gbit/s. Collective.

    The blocking iteration is the plain step, whose all-to-alls block.
    Raises: UserError for a step without all-to-alls.
    """
    emulate_link(None)
    iterations = [iteration(step, inputs) for _ in range(6)][1:]
    # CPU time, because other load of the machine does not belong to the iteration.
    compute_ms, size = _mean_over_ranks(
        [statistics.median(t.cpu_ms for t in iterations), iterations[-1].bytes_on_wire]
    )
    if not size:
        raise UserError(
            "share of all-to-all",
            got="a step without all-to-alls",
            expected="an MoELayer whose experts are on several ranks",
            do="leave --share out, or use --link-gbps",
        )
    target_ms = compute_ms * share / (1 - share)
    gbps = size * 8 / (target_ms * 1e-3) / 1e9
    emulate_link(gbps)
    return gbps


def chosen(plan: Plan) -> str:
    """The strategy that a plan runs; "plain": none."""
    return PLAIN if plan.plain else plan.report.chosen or plan.strategy


def report(measured: Mapping[str, Measured], best: str, link_name: str) -> dict[str, object]:
    """The figures of all contenders, and of strategy `best` compared with the measured baselines."""
    own = measured[best]
    blocking = {name: measured[name] for name in BASELINES if name in measured}
    predicted = {name: m.predicted for name, m in measured.items() if m.predicted is not None}
    uncut_ms = measured["none" if "none" in measured else best].cpu_ms
    errors = {name: abs(p.iteration_ms / measured[name].iteration_ms - 1) for name, p in predicted.items()}
    figures: dict[str, object] = {
        "link": link_name,
        "best": best,
        "iteration_ms": {name: m.iteration_ms for name, m in measured.items()},
        "exposed_ms": {name: m.exposed_ms for name, m in measured.items()},
        "waited_ms": {name: dict(m.waited_ms) for name, m in measured.items()},
        "all_to_all_ms": {name: m.all_to_all_ms for name, m in measured.items()},
        "account_ms": {name: m.account(uncut_ms) for name, m in measured.items()},
        "cpu_ms": {name: m.cpu_ms for name, m in measured.items()},
        "peak_memory_gb": {name: m.peak_memory_gb for name, m in measured.items()},
        "predicted_ms": {name: p.iteration_ms for name, p in predicted.items()},
        "predicted_exposed_ms": {name: p.exposed_ms for name, p in predicted.items()},
        "predicted_peak_memory_gb": {name: p.peak_memory_gb for name, p in predicted.items()},
        "prediction_error": statistics.fmean(errors.values()),
        "prediction_errors": errors,
    }
    if blocking:
        fastest = min(m.iteration_ms for m in blocking.values())
        figures["speedup_vs_best_baseline"] = fastest / own.iteration_ms
    for name, m in blocking.items():
        figures[f"exposed_reduction_vs_{name}"] = 1 - own.exposed_ms / m.exposed_ms if m.exposed_ms else 0.0
    return figures


def save_timeline(module: OptimizedModule, inputs: Inputs, path: str | Path, write: bool) -> None:
    """Draw one iteration, predicted and measured on this rank. Collective; `write` on one rank only."""
    with module.recorded() as events:
        iteration(module, inputs)
    if write:
        save_picture({"predicted": module.timeline.events, "measured": events}, path)


def _mean_over_ranks(values: Iterable[float]) -> list[float]:
    own = torch.tensor([*values], dtype=torch.float64)
    return over_ranks(own, group_name(None), "mean", _FIGURES).tolist()
