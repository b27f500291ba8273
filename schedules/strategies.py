"""Strategies: how each system would run a Program. Each gives a Plan for the Program and its costs.

none              nothing overlaps an all-to-all (DeepSpeed, RAF without Lancet)
tutel             all-to-alls and experts pipelined along the capacity in the best of 1, 2, 4, 8 parts,
                  forward and backward
lancet-dw         weight gradients (and other ready work) behind all-to-alls (section 4)
lancet-partition  ranges of the forward pass cut and pipelined (section 5), the order otherwise as it was
lancet            both; backward experts are pipelined too if that hides more of their all-to-alls
duplex            the step as two copies on halves of the batch that alternate by stages (HiDup, section 3);
                  fused launches of one copy may compute weight gradients of the other
lancet+duplex     two or three such copies in the best order, with weight gradients as filler
auto              the fastest of all these within the memory limit
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.graph.costs.costs import Cost, source_of
from lancet_kernels.graph.costs.part_instruction import can_be_cut
from lancet_kernels.graph.from_fx import GATHERS
from lancet_kernels.graph.ops import rule_for
from lancet_kernels.graph.program import Kind, Phase, Program, fingerprint
from lancet_kernels.schedules import STRATEGY_NAMES
from lancet_kernels.schedules.cut.duplex import duplex
from lancet_kernels.schedules.cut.partition_range import (
    PartitionOptions,
    PipelineCosts,
    choose_ranges,
    forward_length,
    whole_forward,
)
from lancet_kernels.schedules.cut.ranges import PartitionRange, range_names
from lancet_kernels.schedules.order.best_order import SEARCHED, OrderSearch
from lancet_kernels.schedules.order.ordering import issue_early, sums_gradients
from lancet_kernels.schedules.plan import Plan, Report
from lancet_kernels.schedules.time.peak_memory import Recomputation, Storages, peak_memory
from lancet_kernels.schedules.time.simulate import Timeline, simulate
from lancet_kernels.schedules.time.timeline import Prediction

TUTEL_DEGREES = (1, 2, 4, 8)
BACKWARD_DEGREES = (2, 4)
MORE_COPIES = 3
DUPLEX = ("duplex", "lancet+duplex")
AUTO = "auto"
FAMILIES = (tuple(name for name in STRATEGY_NAMES if name not in (AUTO, *DUPLEX)), DUPLEX)
"""Strategies but `auto`; those of one family share most of their work, those of several next to nothing."""
ORIGINAL_ORDER = "original order"
"""The method of plans that do not change the order."""
MORE_MEMORY = 1.1
"""The default memory limit without a given limit or a device, in peaks of the original order."""


@dataclass(frozen=True)
class PlanningOptions:
    """partition: the paper's hyper-parameters.
    memory_limit_gb: the limit on a plan's predicted peak memory, or the original order's peak if that exceeds
    it. None: the program's inputs plus `free_memory_gb`, or 1.1 times the original peak if that is None too.
    free_memory_gb: the free memory of the device."""

    partition: PartitionOptions = field(default_factory=PartitionOptions)
    memory_limit_gb: float | None = None
    free_memory_gb: float | None = None

    def __post_init__(self) -> None:
        limit = self.memory_limit_gb
        if limit is not None and not limit > 0:
            raise UserError(
                "memory_limit_gb", got=limit, expected="more than 0", do="give gigabytes, or None"
            )

    def limit_gb(self, program: Program) -> float:
        """The memory limit for plans of a program."""
        if self.memory_limit_gb is not None:
            return self.memory_limit_gb
        if self.free_memory_gb is not None:
            return Storages(program).resident_bytes / 1e9 + self.free_memory_gb
        return MORE_MEMORY * peak_memory(program) / 1e9

    def to_json(self) -> dict[str, Any]:
        """The options as JSON values, without the device's free memory, which varies."""
        return {"partition": asdict(self.partition), "memory_limit_gb": self.memory_limit_gb}

    @classmethod
    def from_environment(cls) -> PlanningOptions:
        """The hyper-parameters from environment variables. Raises: UserError."""
        return cls(PartitionOptions.from_environment())


def ordered(plan: Plan, orders: OrderSearch, search: bool = True) -> tuple[Plan, Timeline]:
    """The plan with its order and prediction.

    A plan with the method "original order" keeps that order, but starts collectives early; any other gets the
    best order. Args: orders: of the program with the plan's ranges cut. search: improve it by local search.
    """
    program, cost = orders.program, orders.cost
    figures: dict[str, Any] = {}
    if plan.report.method.startswith(ORIGINAL_ORDER):
        if plan.ranges:
            early = issue_early(program, range(len(program)), fixed=frozenset(plan.blocking))
            program = program.reordered(early)
        timeline = simulate(program, cost, blocking=frozenset(plan.blocking))
        order = list(range(len(program)))
    else:
        limit_gb = plan.report.memory_limit_gb
        best = orders.best(None if limit_gb is None else limit_gb * 1e9, search=search)
        timeline, order = Timeline(program, best.times, best.storages), best.order
        figures = {"method": best.method, "without_limit_ms": best.without_limit_ms}
    names = tuple(program.instructions[i].name for i in order)
    return replace(plan, order=names).reported(predicted=Prediction.of(timeline), **figures), timeline


def fastest_that_fits(plans: Sequence[Plan]) -> int:
    """Index of the plan with the fastest prediction within its memory limit; if all exceed their limits, of
    the one that needs least memory."""

    def rank(i: int) -> tuple[float, float]:
        beyond = 0.0 if plans[i].report.fits() else plans[i].report.predicted.peak_memory_gb
        return beyond, _predicted_ms(plans[i])

    return min(range(len(plans)), key=rank)


def _predicted_ms(plan: Plan) -> float:
    return plan.report.predicted.iteration_ms


def _while_faster(plans: Iterable[Plan]) -> list[Plan]:
    """The plans up to the first that is predicted slower than the one before it."""
    tried: list[Plan] = []
    for plan in plans:
        tried.append(plan)
        if len(tried) > 1 and _predicted_ms(plan) > _predicted_ms(tried[-2]):
            break
    return tried


class Planner:
    """Plans for one Program and its costs; work that several strategies share is done once.

    Args: cut: gives the Program with ranges cut (`GraphCutter`). None: strategies cannot cut ranges. search:
        improve the orders of the best plans by local search.
    """

    def __init__(
        self,
        program: Program,
        cost: Cost,
        options: PlanningOptions | None = None,
        cut: Callable[[tuple[PartitionRange, ...]], Program] | None = None,
        *,
        search: bool = True,
    ):
        self.program, self.cost, self._cut_program, self._search = program, cost, cut, search
        self.options = options or PlanningOptions()
        self.limit_gb = self.options.limit_gb(program)
        self._costs = PipelineCosts(program, cost)
        self._plans: dict[str, Plan | UserError] = {}
        self._partitions: dict[int, list[tuple[PartitionRange, ...]]] = {}
        self._ordered: dict[tuple[object, ...], Plan] = {}
        self._timelines: dict[tuple[tuple[str, ...], tuple[str, ...]], Timeline] = {}
        """By the order of a plan, and what it waits for."""
        self._orders: dict[tuple[tuple[object, ...], ...], OrderSearch] = {(): OrderSearch(program, cost)}
        """Searches of the Program with ranges cut, by these ranges."""
        self._strategies: dict[str, Callable[[], Plan]] = {
            # The original order; computation waits for every all-to-all.
            "none": lambda: self._in_order((), blocking=self._waited_for(())),
            "tutel": lambda: self._best(self._tutel_degrees()),
            "lancet-dw": self._lancet_dw,
            "lancet-partition": self._lancet_partition,
            "lancet": self._lancet,
            "duplex": self._duplex,
            "lancet+duplex": self._lancet_duplex,
            AUTO: lambda: self._chosen(self._best(self._strategy_plans)),
        }
        self._cutting = {"lancet-partition": self._partition_plans, "lancet": self._lancet_plans}

    def plan(self, strategy: str) -> Plan:
        """The plan of one strategy. Raises: UserError: no such strategy, or an impossible one."""
        check_name("strategy", strategy, STRATEGY_NAMES)
        plan = self._plan_or_reason(strategy)
        if isinstance(plan, UserError):
            raise plan
        return plan

    def _plan_or_reason(self, strategy: str) -> Plan | UserError:
        if strategy not in self._plans:
            try:
                self._plans[strategy] = replace(self._strategies[strategy](), strategy=strategy)
            except UserError as error:
                self._plans[strategy] = error
        return self._plans[strategy]

    def plans_or_reasons(self, strategies: Sequence[str]) -> dict[str, Plan | UserError]:
        """The plan of each of these strategies, or why it is impossible: one rank's share of the planning."""
        return {name: self._plan_or_reason(name) for name in strategies}

    def add_plans(self, families: Iterable[Mapping[str, Plan | UserError]]) -> None:
        """The plans of other ranks for the same step (`plans_or_reasons`), which are not planned again."""
        for plans in families:
            self._plans.update(plans)

    def plans(self, strategies: Sequence[str] = STRATEGY_NAMES) -> dict[str, Plan]:
        """The plans of the possible strategies; `compared` of each has the predictions of the others."""
        plans = {name: self.plan(name) for name in strategies if name not in self.impossible}
        predicted = {name: plan.report.predicted for name, plan in plans.items()}
        return {
            name: plan.reported(compared={n: p for n, p in predicted.items() if n != name})
            for name, plan in plans.items()
        }

    @property
    def impossible(self) -> dict[str, UserError]:
        """The strategies that are impossible for this program, with the reasons."""
        reason = self._plan_or_reason("duplex")
        return dict.fromkeys(DUPLEX, reason) if isinstance(reason, UserError) else {}

    def candidates(self, strategy: str, most: int = 4) -> list[Plan]:
        """At most `most` plans: that of the strategy and those predicted nearly as fast, best prediction
        first. Of `auto` the blocking plan comes last if it is not among them.

        For a caller that measures them, because the times of parts are estimates. most=1: only the plan.
        """
        plans, always = [self.plan(strategy)], list[Plan]()
        if most == 1:
            return plans
        if strategy == "tutel":
            plans += self._tutel_degrees()
        elif strategy == AUTO:
            plans += map(self._chosen, self._strategy_plans)
            always = [self._chosen(self.plan("none"))]
        elif strategy == "lancet+duplex":
            plans.append(self.plan("duplex"))
        elif strategy in self._cutting:
            plans.append(self.plan("lancet-dw" if strategy == "lancet" else "none"))
            plans += [self._best(cut) for cut in map(self._cutting[strategy], self._part_limits()) if cut]
        distinct = {p.fingerprint: p for p in (replace(plan, strategy=strategy) for plan in plans)}
        best = sorted(distinct.values(), key=_predicted_ms)[:most]
        chosen = {plan.report.chosen for plan in best}
        return best + [replace(p, strategy=strategy) for p in always if p.report.chosen not in chosen]

    def _tutel_degrees(self) -> list[Plan]:
        """One plan per degree, as long as more parts are faster; computation waits for the all-to-alls
        outside the pipelines."""

        def of(degree: int) -> Plan:
            ranges = self._cut(self.expert_ranges, degree)
            plan = self._in_order(ranges, blocking=self._waited_for(ranges))
            return plan.reported(method=f"{ORIGINAL_ORDER}, degree {degree}")

        return _while_faster(map(of, TUTEL_DEGREES))

    def _lancet_dw(self) -> Plan:
        """The best order without partitioning."""
        return self._best([self.plan("none"), self._searched(self._scheduled(()))])

    def _lancet_partition(self) -> Plan:
        """The best partition of the forward pass, in pipeline order."""
        plans = [self.plan("none"), self._in_order(()), *self._within_memory(self._partition_plans)]
        return self._best(plans)

    def _partition_plans(self, most_parts: int) -> list[Plan]:
        return [self._in_order(ranges) for ranges in self._partitions_of(most_parts)]

    def _lancet(self) -> Plan:
        """Partition and schedule. Never predicted slower than `none`, `lancet-dw` or `lancet-partition`."""
        plans = [self.plan("lancet-dw"), self.plan("lancet-partition")]
        plans.append(self._searched(self._best(self._within_memory(self._lancet_plans) or plans)))
        return self._best(plans)

    def _lancet_plans(self, most_parts: int) -> list[Plan]:
        instructions = self.program.instructions
        backward = [r for r in self.expert_ranges if instructions[r[0]].phase is Phase.BACKWARD]
        more = [(), *filter(None, (self._cut(backward, degree) for degree in BACKWARD_DEGREES))]
        return [
            plan
            for ranges in self._partitions_of(most_parts)
            for plan in _while_faster(self._scheduled((*ranges, *cut)) for cut in more)
        ]

    @cached_property
    def _copies(self) -> PartitionRange:
        """The whole step as two copies. Raises: UserError if that is impossible."""
        if self._cut_program is None:
            raise UserError(DUPLEX[0], got="a Program alone", expected="its graph", do="capture the step")
        return duplex(self.program)

    def _duplex(self) -> Plan:
        """The paper's schedule: in each stage, one copy computes while the other communicates."""
        plan = self._in_order((self._copies,))
        return plan.reported(method=f"{ORIGINAL_ORDER} of copies in turns, stage by stage")

    def _lancet_duplex(self) -> Plan:
        """The best order of two copies, or of three. Never predicted slower than `duplex`."""
        plans = [self.plan("duplex"), self._scheduled((self._copies,))]
        with contextlib.suppress(UserError):  # a batch of two
            plans.append(self._scheduled((replace(self._copies, parts=MORE_COPIES),)))
        return self._best([self._searched(plan) for plan in plans])

    @cached_property
    def _strategy_plans(self) -> list[Plan]:
        """The plans of all strategies but `auto`."""
        return [self.plan(name) for name in STRATEGY_NAMES if name != AUTO and name not in self.impossible]

    def _chosen(self, plan: Plan) -> Plan:
        """The plan of another strategy, as the plan of `auto`."""
        compared = {other.strategy: other.report.predicted for other in self._strategy_plans}
        impossible = {name: str(error) for name, error in self.impossible.items()}
        return plan.reported(chosen=plan.strategy, compared=compared, impossible=impossible)

    def _within_memory(self, plans_of: Callable[[int], list[Plan]]) -> list[Plan]:
        """Plans with at most rho parts; while none of them fits into memory, also plans with fewer parts."""
        plans = []
        for most_parts in self._part_limits():
            candidates = plans_of(most_parts)
            plans += candidates
            if any(plan.report.fits() for plan in candidates):
                break
        return plans

    @cached_property
    def expert_ranges(self) -> list[tuple[int, int]]:
        """(first, last) from an all-to-all to the next one, with only experts in between: what Tutel
        pipelines."""
        ranges: list[tuple[int, int]] = []
        positions = self.program.positions(Kind.ALL_TO_ALL)
        for first, last in pairwise(positions):
            overlaps = bool(ranges) and ranges[-1][1] == first
            rules = [rule_for(i) for i in self.program.instructions[first : last + 1]]
            only_experts = all(rule is not None and rule.in_experts for rule in rules)
            if only_experts and not overlaps and self._costs.inference.forms(first, last) is not None:
                ranges.append((first, last))
        return ranges

    @cached_property
    def _draft(self) -> Plan:
        """The fields that all plans for this program and its costs share."""
        forward = self.program.instructions[: forward_length(self.program)]
        report = Report(
            without_rule=tuple(sorted({i.op for i in forward if rule_for(i) is None})),
            options=self.options.to_json(),
            costs=source_of(self.cost),
            memory_limit_gb=self.limit_gb,
            recomputation=Recomputation.of(self.program, self.cost),
        )
        return Plan(self.program.name, fingerprint(self.program), strategy="", report=report)

    def _cut(self, pairs: Sequence[tuple[int, int]], parts: int) -> tuple[PartitionRange, ...]:
        """The ranges cut along the capacity, without those that cannot be cut."""
        if parts == 1 or self._cut_program is None:
            return ()
        cuts = (self._costs.cut(first, last, parts) for first, last in pairs)
        return tuple(cut for cut in cuts if can_be_cut(self.program.tensors, cut.forms, parts))

    def _part_limits(self) -> list[int]:
        """The maximal numbers of parts to try: rho, then 4 and 2 if memory is short (section 7)."""
        most_parts = self.options.partition.most_parts
        return [most_parts, *(p for p in (4, 2) if p < most_parts)]

    def _partitions_of(self, most_parts: int) -> list[tuple[PartitionRange, ...]]:
        """The partition that the dynamic program chose, and one range over all layers if that is possible."""
        if self._cut_program is None:
            return []
        if most_parts not in self._partitions:
            options = replace(self.options.partition, most_parts=most_parts)
            whole = whole_forward(self._costs, most_parts, options.longest_range_ms)
            chosen, _ = choose_ranges(self._costs, options)
            self._partitions[most_parts] = [chosen, *([(whole,)] if whole else [])]
        return self._partitions[most_parts]

    def _waited_for(self, ranges: Sequence[PartitionRange]) -> tuple[str, ...]:
        """The collectives outside the ranges, for which computation waits; not sums of gradients, nor gathers
        of parameters, which DistributedDataParallel and FSDP overlap, too."""
        index = self.program.index
        inside = {i for r in ranges for i in range(index[r.first], index[r.last] + 1)}
        return tuple(
            x.name
            for i, x in enumerate(self.program.instructions)
            if x.kind in (Kind.ALL_TO_ALL, Kind.OTHER_COMMUNICATION)
            and i not in inside
            and not (sums_gradients(x) or GATHERS in x.attributes)
        )

    def _with_cut(self, ranges: tuple[PartitionRange, ...]) -> OrderSearch:
        """Orders of the program with these ranges cut; cached."""
        key = range_names(ranges)
        if key not in self._orders:
            assert self._cut_program is not None, "ranges without a graph to cut"
            self._orders[key] = OrderSearch(self._cut_program(ranges), self.cost)
        return self._orders[key]

    def _in_order(self, ranges: tuple[PartitionRange, ...], blocking: tuple[str, ...] = ()) -> Plan:
        """The ranges as pipelines; everything else in its original order."""
        return self._plan(ranges, ORIGINAL_ORDER, blocking)

    def _scheduled(self, ranges: tuple[PartitionRange, ...]) -> Plan:
        """The best order of the program with these ranges cut."""
        return self._plan(ranges, "")

    def timeline(self, plan: Plan) -> Timeline:
        """The simulated iteration of one of this planner's plans."""
        return self._timelines[plan.order, plan.blocking]

    def _plan(self, ranges: tuple[PartitionRange, ...], method: str, blocking: tuple[str, ...] = ()) -> Plan:
        key = range_names(ranges), method, blocking
        if key not in self._ordered:
            draft = replace(self._draft, ranges=ranges, blocking=blocking).reported(method=method)
            self._ordered[key] = self._with_order(draft, search=False)
        return self._ordered[key]

    def _with_order(self, plan: Plan, search: bool) -> Plan:
        plan, timeline = ordered(plan, self._with_cut(plan.ranges), search)
        self._timelines[plan.order, plan.blocking] = timeline
        return plan

    def _searched(self, plan: Plan) -> Plan:
        """The plan with its best order improved by local search, which is done for the plans of strategies
        only: a search takes half a second."""
        method = plan.report.method
        if method.startswith(ORIGINAL_ORDER) or method.endswith(SEARCHED) or not self._search:
            return plan
        return self._with_order(plan, search=True)

    def _best(self, plans: Sequence[Plan]) -> Plan:
        """The fastest plan that fits into memory; if none does, the one that needs least."""
        best = plans[fastest_that_fits(plans)]
        free = [_predicted_ms(p) if (ms := p.report.without_limit_ms) is None else ms for p in plans]
        return best.reported(without_limit_ms=min(free))
