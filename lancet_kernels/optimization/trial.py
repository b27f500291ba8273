"""Chooses the fastest plan by real steps on all ranks, a few of each candidate, in turn.

A trial is a forward and a `backward()`, hooks on gradients included. It has no side effects: `.grad`, buffers
and other tensors that the forward reads, inputs and random generators are restored, and hooks that update
parameters when gradients are accumulated do not run. A candidate that refuses the step on any rank (the plain
module with reentrant checkpointing, whose gradients only a plan sums) is left out.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.captured_graph import garbage_collection
from lancet_kernels.ops.comm.groups import group_of, values_of_ranks
from lancet_kernels.ops.comm.link import link
from lancet_kernels.ops.comm.waiting import waiting
from lancet_kernels.optimization.optimized_module import OptimizedModule
from lancet_kernels.optimization.paired import with_pair
from lancet_kernels.optimization.step import ModelStep
from lancet_kernels.schedules.plan import IN_PAIRS, ONE_BY_ONE, PLAIN, WORTH, Plan
from lancet_kernels.schedules.time.simulate import Timeline
from lancet_kernels.timing import in_turn

_log = logging.getLogger(__name__)
WARMUP = 1
MOST_TRIED = 2
"""How many of the plans that are predicted fastest are measured, beside the blocking one."""
Build = Callable[[Plan, Timeline], OptimizedModule]


def fastest(
    step: ModelStep, build: Build, planned: Sequence[tuple[Plan, Timeline]], trials: int
) -> OptimizedModule:
    """The module with the plan that is fastest in `trials` real steps, plain if no plan is worth it. Its
    microbatches run in pairs if that is faster. Collective.

    Args: planned: with timelines; first the plan that is predicted fastest.
    """
    best, timeline = planned[0]
    figures = {"compared": best.report.compared, "pair_ms": best.report.pair_ms}
    fits = [
        (replace(plan, fused=best.fused, pair=best.pair).reported(**figures), line)
        for plan, line in planned
        if plan.report.fits() and plan.report.chosen != best.report.chosen
    ]
    others = sorted(fits, key=lambda one: one[0].report.predicted.iteration_ms)
    blocking = [one for one in others[MOST_TRIED - 1 :] if one[0].report.chosen == "none"]
    tried = [planned[0], *others[: MOST_TRIED - 1], *blocking]
    modules = {plan.report.chosen: build(plan, line) for plan, line in tried}
    ways = modules | {PLAIN: build(replace(best, plain=True), timeline)}
    runs = {name: partial(_one_step, module.bare_step(step.arguments)) for name, module in ways.items()}
    measured = milliseconds_of(step, runs, trials)
    # If every plan refuses the step, the plain module may still run it.
    name = min(measured.keys() & modules, key=measured.__getitem__, default=best.report.chosen)
    chosen = modules[name]
    if measured.get(name, math.inf) > (1 - WORTH) * measured.get(PLAIN, math.inf):
        chosen = build(replace(chosen.plan, plain=True), chosen.timeline)
    chosen.report(measured=measured)
    return _in_pairs_if_faster(step, build, chosen, trials) if step.accumulate > 1 else chosen


def _in_pairs_if_faster(
    step: ModelStep, build: Build, optimized: OptimizedModule, trials: int
) -> OptimizedModule:
    """A module whose microbatches run in pairs, if that is measured faster. Collective."""
    plan = with_pair(step, replace(optimized.plan, plain=False), must=False)
    if not plan.pair or plan.report.pair_ms >= plan.report.predicted.iteration_ms:
        return optimized
    paired = build(plan, optimized.timeline)
    modules = {ONE_BY_ONE: optimized, IN_PAIRS: paired}
    several = [step.arguments] * step.accumulate
    runs = {name: partial(module.run_microbatches, several) for name, module in modules.items()}
    total = milliseconds_of(step, runs, trials)
    if len(total) < len(runs):
        return optimized
    measured = {name: ms / len(several) for name, ms in total.items()}
    chosen = paired if measured[IN_PAIRS] < (1 - WORTH) * measured[ONE_BY_ONE] else optimized
    chosen.report(measured_microbatches=measured)
    return chosen


def milliseconds_of(
    step: ModelStep, runs: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, float]:
    """The `typical` time by name, in each round that of the slowest rank; the same on all ranks. Collective.

    Args: runs: of forward and backward, by name.
    Raises: UserError if all runs refuse the step; the errors of some runs alone are logged.
    """
    refusals: dict[str, UserError] = {}

    def timed(name: str) -> float:
        try:
            return _timed(step, runs[name])
        except UserError as error:
            refusals[name] = error
            return math.inf

    # Steps of a user's model may leave tensors in reference cycles.
    with _restoring_state(step), garbage_collection(on=True):
        own = in_turn(runs, timed, rounds, WARMUP, first_changes=True)
    by_rank = values_of_ranks(own, step.groups.world, "comparison of measured steps")
    slowest = {name: [*map(max, zip(*(times[name] for times in by_rank), strict=True))] for name in runs}
    ended = {name: times for name, times in slowest.items() if math.inf not in times}
    if not ended:
        elsewhere = UserError(
            "a measured step",
            got="one that other ranks refuse, whatever the plan",
            expected="a step that every rank can run",
            do="look at their error",
        )
        raise next(iter(refusals.values()), elsewhere)
    for name, error in refusals.items():
        _log.info("%s was not tried: %s", name, error)
    return typical(ended)


def typical(rounds_ms: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The time by name from that of each round: the median share of a round times the median round.

    Drift of a machine's speed affects a whole round, and so not the shares in it; medians of times would mix
    rounds of different speeds.
    """
    mean_ms = [statistics.fmean(times) for times in zip(*rounds_ms.values(), strict=True)]
    middle_ms = statistics.median(mean_ms)
    return {
        name: middle_ms * statistics.median(ms / mean for ms, mean in zip(times, mean_ms, strict=True))
        for name, times in rounds_ms.items()
    }


def _timed(step: ModelStep, run: Callable[[], object]) -> float:
    if step.groups.world:
        world = group_of(step.groups.world)
        with waiting("barrier before a measured step", world):
            dist.barrier(world)
    _finish(step.device)
    with _gradients_aside(step):
        begin = time.perf_counter()
        run()
        _finish(step.device)
        return (time.perf_counter() - begin) * 1e3


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _one_step(forward: Callable[[], object]) -> None:
    results = [result for result in _tensors(forward()) if result.requires_grad]
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])


@contextlib.contextmanager
def _gradients_aside(step: ModelStep) -> Iterator[None]:
    """A context in which parameters and inputs have neither gradients nor hooks on accumulated gradients (an
    optimizer in the backward, say); both are restored."""
    tensors = (*step.model.parameters(), *_tensors(step.arguments))
    before = {t: (t.grad, t._post_accumulate_grad_hooks) for t in tensors if t.is_leaf}
    for tensor, (_, hooks) in before.items():
        tensor.grad = None
        if hooks:  # None would leave them in place
            tensor._post_accumulate_grad_hooks = OrderedDict()
    try:
        yield
    finally:
        for tensor, (gradient, hooks) in before.items():
            tensor.grad, tensor._post_accumulate_grad_hooks = gradient, hooks


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _restoring_state(step: ModelStep) -> Iterator[None]:
    plain = step.captured.plain.values()
    changing = [*step.model.buffers(), *plain.values(), *_tensors(step.arguments)]
    before = [(tensor.detach().clone(), tensor.is_inference() or tensor._version) for tensor in changing]
    with torch.random.fork_rng([step.device] if step.device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, (value, version) in zip(changing, before, strict=True):
                    if tensor.is_inference() or tensor._version != version:  # an expanded one takes no copy
                        tensor.detach().copy_(value)
            link.read()
