"""What would each system do with this Program? Strategies as functions from Program and costs to a Plan.

none              nothing overlaps an all-to-all (DeepSpeed, RAF without Lancet)
tutel             all-to-all and experts pipelined along the capacity, forward and backward; best degree
of 1, 2, 4, 8 lancet-dw         weight gradients (and other ready work) behind all-to-alls (section 4)
lancet-partition  ranges of the forward pass cut and pipelined (section 5), the order otherwise as it was
lancet            both; where backward all-to-alls stay exposed, their experts are pipelined too
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs import Cost
from lancet_kernels.graph.cut import can_be_cut
from lancet_kernels.graph.program import Kind, Phase, Program
from lancet_kernels.graph.program_json import fingerprint
from lancet_kernels.graph.rules import rule_for
from lancet_kernels.schedules.axes import AxisInference
from lancet_kernels.schedules.list_schedule import best_order
from lancet_kernels.schedules.partition_range import PartitionOptions, choose_ranges, forward_length
from lancet_kernels.schedules.plan import Plan, Prediction
from lancet_kernels.schedules.ranges import PartitionRange, expand
from lancet_kernels.schedules.simulate import simulate

TUTEL_DEGREES = (1, 2, 4, 8)
BACKWARD_DEGREES = (2, 4)


@dataclass(frozen=True)
class PlanningOptions:
    """partition: the paper's hyper-parameters. memory_limit_gb: no plan is predicted to need more, unless the
    program in its original order already does."""

    partition: PartitionOptions = PartitionOptions()
    memory_limit_gb: float | None = None

    @property
    def limit_bytes(self) -> float | None:
        return None if self.memory_limit_gb is None else self.memory_limit_gb * 1e9


def plan_none(program: Program, cost: Cost, options: PlanningOptions = PlanningOptions()) -> Plan:
    """The original order; computation waits for each all-to-all."""
    return _plan(program, cost, "none", (), blocking=_waited_for(program, ()))


def plan_tutel(program: Program, cost: Cost, options: PlanningOptions = PlanningOptions()) -> Plan:
    """The best pipelining degree; computation waits for the all-to-alls outside the pipelines."""
    plans = []
    pairs = expert_ranges(program)
    for degree in TUTEL_DEGREES:
        ranges = _cut(program, pairs, degree)
        plan = _plan(program, cost, "tutel", ranges, blocking=_waited_for(program, ranges))
        plans.append(replace(plan, method=f"original order, degree {degree}"))
    return _best(plans, options)


def plan_lancet_dw(program: Program, cost: Cost, options: PlanningOptions = PlanningOptions()) -> Plan:
    """The best order without partitioning."""
    plans = [plan_none(program, cost), _scheduled(program, cost, "lancet-dw", (), options)]
    return replace(_best(plans, options), strategy="lancet-dw")


def plan_lancet_partition(program: Program, cost: Cost, options: PlanningOptions = PlanningOptions()) -> Plan:
    """The best partition of the forward pass, in pipeline order."""
    plans = [plan_none(program, cost), _plan(program, cost, "lancet-partition", ())]
    for ranges in _partitions(program, cost, options):
        plans.append(_plan(program, cost, "lancet-partition", ranges))
        if _fits(plans[-1], options):
            break
    return replace(_best(plans, options), strategy="lancet-partition")


def plan_lancet(program: Program, cost: Cost, options: PlanningOptions = PlanningOptions()) -> Plan:
    """Partition and schedule. Never predicted slower than `none`, `lancet-dw` or `lancet-partition`."""
    plans = [plan_lancet_dw(program, cost, options), plan_lancet_partition(program, cost, options)]
    backward = [p for p in expert_ranges(program) if _phase(program, p[0]) is Phase.BACKWARD]
    for ranges in _partitions(program, cost, options):
        plans.append(_scheduled(program, cost, "lancet", ranges, options))
        for degree in BACKWARD_DEGREES:
            more = _cut(program, backward, degree)
            if more:
                plans.append(_scheduled(program, cost, "lancet", (*ranges, *more), options))
        if _fits(plans[-1], options):
            break
    return replace(_best(plans, options), strategy="lancet")


Strategy = Callable[[Program, Cost, PlanningOptions], Plan]
STRATEGIES: dict[str, Strategy] = {
    "none": plan_none,
    "tutel": plan_tutel,
    "lancet-dw": plan_lancet_dw,
    "lancet-partition": plan_lancet_partition,
    "lancet": plan_lancet,
}


def make_plan(
    program: Program, cost: Cost, strategy: str = "lancet", options: PlanningOptions = PlanningOptions()
) -> Plan:
    """The plan of one strategy.

    Raises:
        UserError: no such strategy.
    """
    if strategy not in STRATEGIES:
        raise UserError("strategy", got=strategy, expected=f"one of {', '.join(STRATEGIES)}", do="name one")
    return STRATEGIES[strategy](program, cost, options)


def compare(
    program: Program,
    cost: Cost,
    strategies: Iterable[str] = tuple(STRATEGIES),
    options: PlanningOptions = PlanningOptions(),
) -> dict[str, Plan]:
    """A plan per strategy, each with the predictions of all others in `compared`."""
    plans = {name: make_plan(program, cost, name, options) for name in strategies}
    predictions = {name: plan.predicted for name, plan in plans.items()}
    return {
        name: plan.with_comparison({n: p for n, p in predictions.items() if n != name})
        for name, plan in plans.items()
    }


def expert_ranges(program: Program) -> list[tuple[int, int]]:
    """(first, last) from one all-to-all to the next with nothing but experts in between: what Tutel
    pipelines."""
    inference = AxisInference(program)
    found: list[tuple[int, int]] = []
    positions = program.positions(Kind.ALL_TO_ALL)
    for first, last in zip(positions, positions[1:], strict=False):
        taken = bool(found) and found[-1][1] == first
        rules = [rule_for(i) for i in program.instructions[first : last + 1]]
        only_experts = all(rule is not None and rule.in_experts for rule in rules)
        if only_experts and not taken and inference.axes(first, last) is not None:
            found.append((first, last))
    return found


def _cut(program: Program, pairs: Sequence[tuple[int, int]], parts: int) -> tuple[PartitionRange, ...]:
    """The ranges cut along the capacity, those that can be."""
    if parts == 1:
        return ()
    inference = AxisInference(program)
    names = [i.name for i in program.instructions]
    found = []
    for first, last in pairs:
        axes = inference.axes(first, last)
        if axes and can_be_cut(program.tensors, axes, parts):
            found.append(PartitionRange(names[first], names[last], parts, dict(axes)))
    return tuple(found)


def _partitions(
    program: Program, cost: Cost, options: PlanningOptions
) -> Iterable[tuple[PartitionRange, ...]]:
    """Ranges for rho, then, where that does not fit into memory, for at most 4 and 2 parts (section 7)."""
    most = options.partition.most_parts
    for parts in sorted({most, *(p for p in (4, 2) if p < most)}, reverse=True):
        yield choose_ranges(program, cost, replace(options.partition, most_parts=parts)).ranges


def _waited_for(program: Program, ranges: Sequence[PartitionRange]) -> tuple[str, ...]:
    """All-to-alls outside the ranges, and other communication."""
    inside = set()
    for r in ranges:
        inside |= set(range(program.index[r.first], program.index[r.last] + 1))
    return tuple(
        x.name
        for i, x in enumerate(program.instructions)
        if x.kind in (Kind.ALL_TO_ALL, Kind.OTHER_COMMUNICATION) and i not in inside
    )


def _scheduled(
    program: Program, cost: Cost, strategy: str, ranges: tuple[PartitionRange, ...], options: PlanningOptions
) -> Plan:
    expanded = expand(program, ranges)
    found = best_order(expanded, cost, memory_limit_bytes=options.limit_bytes)
    return _plan(
        program, cost, strategy, ranges, expanded=expanded.reordered(found.order), method=found.method
    )


def _plan(
    program: Program,
    cost: Cost,
    strategy: str,
    ranges: tuple[PartitionRange, ...],
    *,
    blocking: tuple[str, ...] = (),
    expanded: Program | None = None,
    method: str = "original order",
) -> Plan:
    expanded = expanded or expand(program, ranges)
    forward = program.instructions[: forward_length(program)]
    return Plan(
        program=program.name,
        program_fingerprint=fingerprint(program),
        strategy=strategy,
        order=tuple(i.name for i in expanded.instructions),
        ranges=ranges,
        predicted=Prediction.of(simulate(expanded, cost, blocking=frozenset(blocking))),
        blocking=blocking,
        method=method,
        without_rule=tuple(sorted({i.op for i in forward if rule_for(i) is None})),
    )


def _fits(plan: Plan, options: PlanningOptions) -> bool:
    return options.memory_limit_gb is None or plan.predicted.peak_memory_gb <= options.memory_limit_gb


def _best(plans: Sequence[Plan], options: PlanningOptions) -> Plan:
    """The fastest plan that fits into memory; where none does, the one that needs least."""
    fitting = [p for p in plans if _fits(p, options)]
    if fitting:
        return min(fitting, key=lambda p: p.predicted.iteration_ms)
    return min(plans, key=lambda p: p.predicted.peak_memory_gb)


def _phase(program: Program, i: int) -> Phase:
    return program.instructions[i].phase
