"""Plans for a costed step: fused launches or streams first; then a plan from a file, or from the planner with
measured parts.

A stored plan applies to one graph, which its fingerprint identifies. For another graph, the error names the
first difference in ranks, model, parameters or inputs (`Step.setting`).

`Staleness` tells whether routing has moved so far from that of the first step that another plan would be
faster. The straggler of an expert group, the rank with most rows, determines the time of exchanges and
experts; computation beside them takes as long as before. The candidate plans are simulated with such times;
nothing is measured, captured or planned again.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.graph.costs.clusters import Cluster
from lancet_kernels.graph.costs.costs import source_of, works_on_received_rows
from lancet_kernels.graph.program import Kind, Program, fingerprint
from lancet_kernels.layer.model_layers import RoutingCounts, busiest
from lancet_kernels.ops.comm.groups import group_of, group_size, is_of_processes, over_ranks
from lancet_kernels.optimization.paired import with_pair
from lancet_kernels.optimization.rank_agreement import result_of_first_rank, results_of_ranks
from lancet_kernels.optimization.step import ModelStep, agreed
from lancet_kernels.schedules import MICROBATCHES
from lancet_kernels.schedules.cut.ranges import range_names
from lancet_kernels.schedules.order.best_order import OrderSearch
from lancet_kernels.schedules.plan import EFFICIENCY, FusedGroup, Plan
from lancet_kernels.schedules.rewrite.fused import CHOICES, every_launch
from lancet_kernels.schedules.rewrite.walk import PLANNED, Step, walk
from lancet_kernels.schedules.strategies import (
    AUTO,
    DUPLEX,
    FAMILIES,
    Planner,
    PlanningOptions,
    fastest_that_fits,
    ordered,
)
from lancet_kernels.schedules.time.simulate import Timeline, run, simulate
from lancet_kernels.schedules.time.timeline import Prediction

_log = logging.getLogger(__name__)


Planned = Sequence[tuple[Plan, Timeline]]
STALE_FROM = 1.02
"""A plan is stale if another one is predicted faster by this factor, the noise of trials of equal plans."""
# Strategies that may use fused launches; the others reproduce other systems for comparison.
FUSED_STRATEGIES = (AUTO, "lancet", "lancet-dw", *DUPLEX)


@dataclass(frozen=True)
class FusedChoice:
    """The choice between fused launches and streams.

    stored: a plan file, whose choice is used if it has one for this program. device: of the model.
    here: whether the step is measured on this machine; its launches are then, too, unless interpreted.
    Raises: UserError for a strategy or a device without fused launches.
    """

    strategy: str
    options: PlanningOptions
    lowering: str
    stored: str | Path | None
    device: torch.device
    here: bool = True

    def __post_init__(self) -> None:
        # Imported here, because the kernels need Triton, which is not installed everywhere.
        from lancet_kernels.kernels.runtime import check_runs_on

        check_runs_on("model with backend='fused'", self.device)
        instead = "use backend='torch' for it"
        check_name("strategy with backend='fused'", self.strategy, FUSED_STRATEGIES, do=instead)
        check_name("lowering", self.lowering, CHOICES)

    @property
    def interpreted(self) -> bool:
        """Whether kernels run in the interpreter, whose times mean nothing for a GPU."""
        from lancet_kernels.kernels.runtime import INTERPRETED

        return INTERPRETED

    def groups(self, step: Step) -> tuple[FusedGroup, ...]:
        """The layers to try as fused launches: those of the stored plan, or all that can be."""
        stored = self._stored_groups(step.program)
        groups = stored or every_launch(step.module, step.program, step.cost)
        why = f"{'fused' if self.lowering == 'auto' else self.lowering}: requested"
        measured = self.here and not self.interpreted
        return tuple(
            group if stored or not group.fused else replace(group, fused=self.lowering != "streams", why=why)
            for group in (replace(group, measured=measured) for group in groups)
        )

    def confirmed(
        self, groups: tuple[FusedGroup, ...], streams: Step, fused: Step, world: str
    ) -> tuple[FusedGroup, ...]:
        """The groups, or all of them on streams if the step is predicted faster then. Collective.

        Args: streams, fused: the step without and with these layers fused.
        """
        if self.lowering != "auto" or self.interpreted:
            return groups
        if result_of_first_rank(world, lambda: bool(self._stored_groups(streams.program))):
            return groups

        def milliseconds(step: Step) -> float:
            planner = _planner(step, self.strategy, self.options, self.here, world)
            plan = result_of_first_rank(world, lambda: planner.plan(self.strategy))
            return plan.report.predicted.iteration_ms

        streams_ms, fused_ms = milliseconds(streams), milliseconds(fused)
        is_faster = fused_ms <= streams_ms
        how = "measured here" if groups[0].measured else f"by formula at efficiency {EFFICIENCY:g}"
        why = (
            f"{'fused' if is_faster else 'streams'}: the step is predicted faster ({fused_ms:.3f} ms, "
            f"{streams_ms:.3f} ms on streams; launches {how})"
        )
        return tuple(replace(g, fused=is_faster, why=why) if g.fused else g for g in groups)

    def _stored_groups(self, program: Program) -> tuple[FusedGroup, ...]:
        """The decisions of the plan file; none if it has none for this program."""
        try:
            groups = () if self.stored is None else Plan.load(self.stored).fused
        except UserError:
            return ()  # the error is reported when the plan itself is loaded
        names = {name for group in groups for name in (group.layer, *group.fillers)}
        return groups if names <= set(program.index) else ()


def fuse_layers(
    step: ModelStep, choice: FusedChoice, cluster: str | Path | Cluster | None
) -> tuple[ModelStep, tuple[FusedGroup, ...]]:
    """The step with the layers fused that rank 0 chooses, or `step` itself, and the choice for each group.

    Collective over all ranks. Args: cluster: as in `ModelStep.costed`.
    """
    world = step.groups.world
    groups = result_of_first_rank(world, lambda: choice.groups(step))
    if not any(group.fused for group in groups):
        return step, groups
    fused = agreed(lambda: step.with_fused(groups), world).costed(cluster)
    groups = choice.confirmed(groups, step, fused, world)
    if any(group.fused for group in groups):
        return fused, groups
    step.context.layers.clear()
    return step, groups


def plans_of(
    step: ModelStep,
    fused: tuple[FusedGroup, ...],
    strategy: str,
    options: PlanningOptions,
    file: str | Path | None,
    cache: str | Path | None,
    measured: bool,
) -> tuple[list[tuple[Plan, Timeline]], bool]:
    """The plans of rank 0 with their timelines, the best one first, and whether they are new (not of a file).
    Collective.

    Args: fused: as of `Plan`. options, cache: as of `optimize`; file: its `plan`. measured: the step is
        measured on this machine.
    """
    world = step.groups.world
    if file is not None:
        plans = result_of_first_rank(world, lambda: [plan_of_file(file, step, strategy)])
    else:
        # Only measured plans are compared.
        most = 4 if measured else 1
        # A pair orders uncut instructions.
        base = "lancet-dw" if strategy == MICROBATCHES else strategy
        plans = plans_for(step, base, options, cache, most, world)
    planned = predicted(step, plans, measured)
    best, timeline = planned.pop(fastest_that_fits([plan for plan, _ in planned]))
    if best.report.chosen:
        # The predictions of the compared plans, updated with measurements of their partitioned graphs.
        reports = [plan.report for plan, _ in [(best, timeline), *planned]]
        tried = {report.chosen: report.predicted for report in reports}
        best = best.reported(compared={**best.report.compared, **tried})
    best = replace(best, fused=fused)
    if strategy == MICROBATCHES and not best.pair:
        best = with_pair(step, best, must=True)
    # Stored plans have an order; new ones that will be measured have none yet.
    return [(best, timeline), *planned], not plans[0].order


def on_device(options: PlanningOptions | None, device: torch.device, world: str) -> PlanningOptions:
    """The options, with the least free memory of the ranks' CUDA devices, torch's unused cache included.
    Collective over the ranks `world`."""
    options = options or PlanningOptions.from_environment()
    if device.type != "cuda":
        return options
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free_gb = torch.tensor([(torch.cuda.mem_get_info(device)[0] + unused) / 1e9])
    return replace(options, free_memory_gb=float(over_ranks(free_gb, world, "min", "free memory")[0]))


def plans_for(
    step: Step, strategy: str, options: PlanningOptions, cache: str | Path | None, most: int, world: str = ""
) -> list[Plan]:
    """The plan in `cache`, if it is for this program, strategy and options, with costs from the same source;
    otherwise at most `most` candidates, best prediction first. Collective over the ranks `world`, which share
    the work."""
    stored = result_of_first_rank(world, lambda: _stored(step, strategy, options, cache))
    if stored is not None:
        return [stored]
    planner = _planner(step, strategy, options, most > 1, world)
    plans = result_of_first_rank(world, lambda: planner.candidates(strategy, most))
    # Orders are searched again with measured parts.
    return plans if most == 1 else [replace(plan, order=()) for plan in plans]


def _planner(step: Step, strategy: str, options: PlanningOptions, ordered_again: bool, world: str) -> Planner:
    """The step's planner; for `auto` with the plans of all strategies, planned in parallel. Collective.

    Args: ordered_again: orders are searched later, with measured parts, and not by the planner.
    """
    planner = step.planner(options, search=not ordered_again)
    if strategy == AUTO:
        planner.add_plans(
            results_of_ranks(world, [partial(planner.plans_or_reasons, names) for names in FAMILIES])
        )
    return planner


def _stored(step: Step, strategy: str, options: PlanningOptions, cache: str | Path | None) -> Plan | None:
    """The plan in `cache`, if it is for this program, strategy, options and costs."""
    if cache is not None and not Path(cache).parent.is_dir():
        raise UserError(
            "plan file", got=f"{cache} in a folder that is missing", expected="a folder", do="make the folder"
        )
    if cache is not None and Path(cache).exists():
        try:
            plan = _loaded(cache, step)
            if (plan.strategy, plan.report.options) == (strategy, options.to_json()):
                old, new = plan.report.costs, source_of(step.cost)
                if old == new:
                    return plan
                _log.warning("planning anew: plan file: got costs %s, expected %s", old, new)
        except UserError as error:
            _log.warning("planning anew: %s", error)
    return None


def _loaded(path: str | Path, step: Step) -> Plan:
    """The plan in a file. Raises: UserError unless it can be applied to this step."""
    plan = Plan.load(path)
    own = fingerprint(step.program)
    if own != plan.program_fingerprint:
        planned, present = _difference(plan.report.setting, step.setting)
        raise UserError(
            f"plan file {path}",
            got=f"a plan made for {planned}",
            expected=f"one for this job, which has {present}",
            do=f"plan again (program {plan.program_fingerprint[:12]}, here {own[:12]})",
        )
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


def predicted(step: ModelStep, plans: Sequence[Plan], measured: bool) -> list[tuple[Plan, Timeline]]:
    """Each plan with its prediction and simulated timeline; one without an order gets the best. Collective.

    Args: measured: measure the instructions of the partitioned graph; otherwise estimate the parts.
    """
    keys = [range_names(plan.ranges) for plan in plans]
    programs = {
        key: step.measured(plan) if measured else step.cutter(plan.ranges)
        for key, plan in dict(zip(keys, plans, strict=True)).items()
    }

    def timeline_of(i: int, plan: Plan) -> Timeline:
        return simulate(programs[keys[i]].reordered(plan.order), step.cost, blocking=frozenset(plan.blocking))

    def with_orders(key: tuple[tuple[object, ...], ...]) -> dict[int, Plan]:
        """By position, the plans with the same ranges, whose orders share work."""
        orders = OrderSearch(programs[key], step.cost)
        return {
            i: plan.reported(predicted=Prediction.of(timeline_of(i, plan)))
            if plan.order
            else ordered(plan, orders)[0]
            for i, plan in enumerate(plans)
            if keys[i] == key
        }

    # Every rank must choose by the same predictions.
    shares = results_of_ranks(step.groups.world, [partial(with_orders, key) for key in programs])
    with_order = {i: plan for share in shares for i, plan in share.items()}
    return [(with_order[i], timeline_of(i, with_order[i])) for i in range(len(plans))]


def _difference(planned: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, str]:
    """The first difference: the plan's value, and that of this job."""
    for name, words in (("ranks", "rank"), ("expert_ranks", "rank that shares experts")):
        if name in planned and planned[name] != here.get(name):
            return _count(planned[name], words), _count(here.get(name, 1), words)
    if "model" in planned and planned["model"] != here.get("model"):
        return planned["model"], str(here.get("model"))
    old, new = planned.get("parameters", {}), here.get("parameters", {})
    for name in [*old, *new]:
        if old.get(name) != new.get(name) and old:
            return f"{name} {_text(old.get(name))}", _text(new.get(name))
    if "inputs" in planned and planned["inputs"] != here.get("inputs"):
        return f"inputs {_all(planned['inputs'])}", _all(here.get("inputs", []))
    return "another graph", "other instructions, of the same model"


def _text(kind: list[Any] | None) -> str:
    """Example: `[64, 32] float32`."""
    return "that it does not have" if kind is None else f"{kind[0]} {kind[1]}"


def _all(kinds: list[list[Any]]) -> str:
    return ", ".join(map(_text, kinds)) or "without tensors"


def _count(number: int, what: str) -> str:
    """Example: `1 rank`, `2 ranks`, `4 ranks that share experts`."""
    if number == 1:
        return f"1 {what}"
    return f"{number} {what.replace('rank', 'ranks', 1).replace('shares', 'share')}"


class Staleness:
    """Counts the rows of experts in the first call of a planned step and in each `every`-th one (0: none);
    not in an expert group whose other ranks are only stood in for.

    Args: planned: the candidates with their timelines; first the one that runs.
    """

    def __init__(self, step: ModelStep, planned: Planned, every: int) -> None:
        group = step.groups.expert
        differ = bool(group) and is_of_processes(group_of(group))
        self._step, self._planned, self._every = step, planned, every if differ else 0
        self._calls = 0
        self._last: RoutingCounts | None = None
        self._first_imbalance = 0.0
        self._message = ""

    def counting(self) -> AbstractContextManager[None]:
        """The context of a call. The call after a counted one is collective; a stale plan warns once."""
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if not self._every or len(self._planned) < 2 or is_captured:
            return contextlib.nullcontext()
        if self._last is not None:
            before = self._message
            if self.stale() and not before:
                warnings.warn(self._message, stacklevel=4)
        self._calls += 1
        if self._calls > 1 and self._calls % self._every:
            return contextlib.nullcontext()
        self._last = RoutingCounts(self._step.model, self._step.groups)
        return self._last.counting()

    def stale(self) -> str:
        """A message about a plan that would be faster; "": none. Collective after a counted call."""
        if self._last is not None:
            counts, self._last = self._last.by_layer(), None
            if counts:
                now = busiest(counts, group_size(self._step.groups.expert))
                self._first_imbalance = self._first_imbalance or now
                self._message = faster(self._planned, self._first_imbalance, now)
        return self._message


def faster(planned: Planned, before: float, now: float) -> str:
    """A message about the plan that has become faster than the first one; "": none.

    Args: before, now: rows of the busiest rank relative to the mean, in the first step and now.
    """
    at_first, _ = _gain(planned, 1.0)
    gain, plan = _gain(planned, now / before)
    # A first plan that was predicted slower from the start was chosen by trials, or by the caller.
    gain /= max(1.0, at_first)
    if gain <= STALE_FROM:
        return ""
    return (
        f"the busiest rank gets {now:.2f} times the mean of rows, {before:.2f} times in the first step: "
        f"{plan.report.chosen or plan.strategy} is predicted {1 - 1 / gain:.0%} faster than this plan; "
        "call optimize() again"
    )


def _gain(planned: Planned, longer: float) -> tuple[float, Plan]:
    """The best of the other plans, and how many times as fast as the first plan it is."""
    own, *others = (_milliseconds(plan, timeline, longer) for plan, timeline in planned)
    best = min(range(len(others)), key=others.__getitem__)
    return own / others[best], planned[1 + best][0]


def _milliseconds(plan: Plan, timeline: Timeline, longer: float) -> float:
    program = timeline.program
    ms = [
        t * (longer if i.kind is Kind.ALL_TO_ALL or works_on_received_rows(i) else 1.0)
        for i, t in zip(program.instructions, timeline.durations_ms, strict=True)
    ]
    return run(program, ms, timeline.times.order, blocking=frozenset(plan.blocking)).iteration_ms
