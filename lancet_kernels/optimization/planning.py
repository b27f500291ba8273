"""Gets the plans of a costed step: from a file, or from its planner, predicted with measured parts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.garbage import without_garbage_collection
from lancet_kernels.graph.costs.costs import source_of
from lancet_kernels.graph.program.program import Program
from lancet_kernels.optimization.captured_step import CapturedStep
from lancet_kernels.optimization.paired import with_pair
from lancet_kernels.optimization.rank_agreement import plans_of_first_rank
from lancet_kernels.optimization.setting import check_setting
from lancet_kernels.schedules import MICROBATCHES
from lancet_kernels.schedules.partition.ranges import range_names
from lancet_kernels.schedules.plan import Plan, Prediction
from lancet_kernels.schedules.rewrite.walk import PLANNED, Step, walk
from lancet_kernels.schedules.strategies import AUTO, PlanningOptions, fastest_that_fits, ordered
from lancet_kernels.schedules.time.simulate import Timeline, simulate

_log = logging.getLogger(__name__)


def plans_of(
    captured: CapturedStep,
    step: Step,
    strategy: str,
    options: PlanningOptions,
    given: str | Path | None,
    cache: str | Path | None,
    measured: bool,
) -> tuple[list[tuple[Plan, Timeline]], bool]:
    """The plans of rank 0 for a step with their timelines, the best one first; are they new, or from a file?
    Collective.

    Args: options, cache: as of `optimize`; given: its `plan`. measured: the step is measured on this machine.
    """
    if given is not None:
        plans = plans_of_first_rank(captured.groups.world, lambda: [plan_of_file(given, step, strategy)])
    else:
        # Several plans are only compared if they can be measured.
        most = 4 if measured else 1
        # A pair is a schedule of whole instructions.
        base = "lancet-dw" if strategy == MICROBATCHES else strategy
        plans = plans_of_first_rank(
            captured.groups.world, lambda: plans_for(step, base, options, cache, most)
        )
    planned = predicted(captured, step, plans, measured)
    if captured.steps is not None:
        captured.steps.end_rehearsal()
    best, timeline = planned.pop(fastest_that_fits([plan for plan, _ in planned]))
    if best.chosen:
        # The predictions of the compared plans, updated with measurements of their partitioned graphs.
        tried = {plan.chosen: plan.predicted for plan, _ in [(best, timeline), *planned]}
        best = replace(best, compared={**best.compared, **tried})
    best = replace(best, fused=captured.fused)
    if strategy == MICROBATCHES and not best.pair:
        best = with_pair(captured, step, best, must=True)
    # One that was stored has its order.
    return [(best, timeline), *planned], not plans[0].order


def on_device(options: PlanningOptions | None, device: torch.device) -> PlanningOptions:
    """The options, with the free memory of a CUDA device, including torch's unused cache."""
    options = options or PlanningOptions.from_environment()
    if device.type != "cuda":
        return options
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return replace(options, free_memory_gb=(torch.cuda.mem_get_info(device)[0] + unused) / 1e9)


@without_garbage_collection()
def plans_for(
    step: Step,
    strategy: str,
    options: PlanningOptions,
    cache: str | Path | None,
    most: int,
) -> list[Plan]:
    """The plan in `cache`, if it is for this program, strategy and options, with costs from the same source;
    otherwise at most `most` candidates, best prediction first."""
    if cache is not None and not Path(cache).parent.is_dir():
        raise UserError(
            "plan file", got=f"{cache} in a folder that is missing", expected="a folder", do="make the folder"
        )
    if cache is not None and Path(cache).exists():
        try:
            plan = _loaded(cache, step)
            if (plan.strategy, plan.options) == (strategy, options.to_json()):
                if plan.costs == source_of(step.cost):
                    return [plan]
                old, new = plan.costs or "of an older version", source_of(step.cost)
                _log.warning("planning anew: plan file: got costs %s, expected %s", old, new)
        except UserError as error:
            _log.warning("planning anew: %s", error)
    plans = step.planner(options).candidates(strategy, most)
    # With measured parts, another order may be the best.
    return plans if most == 1 else [replace(plan, order=()) for plan in plans]


def _loaded(path: str | Path, step: Step) -> Plan:
    """The plan in a file. Raises: UserError unless it can be applied to this step."""
    plan = Plan.load(path)
    check_setting(plan, step.program, step.setting, f"plan file {path}")
    walk(step, plan, PLANNED)
    return plan


def plan_of_file(path: str | Path, step: Step, strategy: str) -> Plan:
    """The plan in a file. Raises: UserError unless it is for this step, and of this strategy (auto: any)."""
    plan = _loaded(path, step)
    if strategy not in (AUTO, plan.strategy):
        raise UserError(
            "plan file",
            got=f"{path} of strategy {plan.strategy}",
            expected=f"a plan of strategy {strategy}",
            do="name the plan's strategy, or another plan",
        )
    return plan


def buckets_of_file(path: str | Path) -> list[tuple[int, float]]:
    """The size of the buckets of the plan in a file, as of `CapturedStep.bucket_sizes`."""
    size = Plan.load(path).bucket_bytes
    return [(size, 0.0)] if size else []


def predicted(
    captured: CapturedStep, step: Step, plans: Sequence[Plan], measured: bool
) -> list[tuple[Plan, Timeline]]:
    """Each plan with its prediction, and the timeline of the simulated step. A plan without an order gets the
    best one. Collective, if measured.

    Args: measured: measure the instructions of the partitioned graph; otherwise estimate the parts.
    """
    programs: dict[tuple[object, ...], Program] = {}
    result = []
    for plan in plans:
        key = range_names(plan.ranges)
        if key not in programs:
            programs[key] = captured.measured(step, plan) if measured else step.cutter(plan.ranges)
        program = programs[key]
        if plan.order:
            timeline = simulate(program.reordered(plan.order), step.cost, blocking=plan.blocking)
            result.append((replace(plan, predicted=Prediction.of(timeline)), timeline))
        else:
            result.append(ordered(plan, program, step.cost))
    return result
