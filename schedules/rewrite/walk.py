"""The walk of a training step: every rewriting of its graph, in the order in which it happens.

    capture -> CAPTURED -> costs -> Plan -> PLANNED -> RUNNING -> run

To add a pass, write a function `(step, plan) -> step` and put it where it belongs in one of the three lists.
A pass may change the graph that it is handed in place, unless others still need it: `fuse` and `cut` start
from a copy, so a step that was planned stays as it is. It returns a new `Step` for a graph that changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch import fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.capture import split_joint
from lancet_kernels.graph.capture.captured_graph import copy_of, module_of
from lancet_kernels.graph.capture.layer_names import layers_of
from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.program.from_fx import program_from_fx
from lancet_kernels.graph.program.program import Instruction, Program
from lancet_kernels.schedules.order.sink import sink_statistics as order_without_statistics
from lancet_kernels.schedules.order.weight_gradients import weight_gradients
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.rewrite import apply, buckets, in_place
from lancet_kernels.schedules.rewrite.apply import instruction_order, issued_order, place, reorder
from lancet_kernels.schedules.rewrite.fused import lower
from lancet_kernels.schedules.rewrite.fused_layers import MatchedLayer
from lancet_kernels.schedules.rewrite.gathers import Shards, insert_gathers
from lancet_kernels.schedules.rewrite.realize import GraphCutter, cut_ranges, with_joins
from lancet_kernels.schedules.strategies import Planner, PlanningOptions
from lancet_kernels.schedules.time.hiding import Prediction, exposed_bounds, what_hides
from lancet_kernels.schedules.time.simulate import Timeline

NumberOf = Callable[[tuple[object, ...]], int]
"""Gives the number of a sum of gradients (`ops.comm.all_reduce`)."""
UNPLANNED = Plan("", "", "", (), (), Prediction(0.0, 0.0, 0.0))
"""The plan of the passes before costs are known; with `fused`, the layers to try as fused launches."""


@dataclass(frozen=True)
class GradientSums:
    """Over which ranks a step sums its gradients.

    parameter_of_output: position among the outputs -> parameter. divide_by: what the sum of all ranks' losses
    is divided by. group_of_parameter, replica_group: as of `buckets.insert_all_reduces`;
    without groups, nothing is summed. shards: of a model after `fully_shard`.
    """

    parameter_of_output: Mapping[int, str]
    divide_by: int = 1
    group_of_parameter: Mapping[str, str] = field(default_factory=dict)
    replica_group: str = ""
    shards: Shards | None = None


def unpriced(instruction: Instruction, _tensors: object) -> float:
    """The cost model of a step before its costs are known."""
    raise AssertionError(f"{instruction.name} has no costs yet")


@dataclass(frozen=True, eq=False)
class Step:
    """A training step, handed from pass to pass.

    Attributes:
        module: the joint graph, of which forward and backward are `halves` once it is split.
        timed: the Program of the graph that is planned, once its costs are known; it may have more
            instructions (the optimizer's). cost: the cost model.
        inputs: example values of its placeholders, if it is to be measured.
        setting: what a plan of it is for (`optimization.planning`).
        forward_outputs: how many outputs of the joint graph are those of the forward; None: the graph is not
            split, and its phases may mix.
        sums: how gradients are summed; None: not at all.
        register: registers a fused layer, and returns its number.
        number_of: for sums that may be left to a later backward; None: they are not.
        other_sizes: its tensors have other sizes than those that were planned: the last parts may be empty,
            and steps that join parts in another layout may be more or fewer.
    """

    module: fx.GraphModule
    timed: Program | None = None
    cost: Cost = unpriced
    inputs: Sequence[object] = ()
    setting: Mapping[str, Any] = field(default_factory=dict)
    forward_outputs: int | None = None
    halves: tuple[fx.GraphModule, ...] = ()
    sums: GradientSums | None = None
    register: Callable[[MatchedLayer], int] | None = None
    number_of: NumberOf | None = None
    other_sizes: bool = False

    @cached_property
    def program(self) -> Program:
        """The Program that is planned."""
        return self.timed if self.timed is not None else program_from_fx(self.module)

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        """The graphs to run: the halves, or the one graph that is not split."""
        return self.halves or (self.module,)

    @cached_property
    def cutter(self) -> GraphCutter:
        """Gives the graph and the Program with ranges cut."""
        return GraphCutter(self.module, self.program, self.cost)

    @cached_property
    def _planners(self) -> dict[PlanningOptions | None, Planner]:
        return {}

    def planner(self, options: PlanningOptions | None = None) -> Planner:
        """The planner for this step; one for each options."""
        if options not in self._planners:
            fill = self.cutter.with_fillers
            self._planners[options] = Planner(self.program, self.cost, options, self.cutter, fill)
        return self._planners[options]

    def described(self, plan: Plan, timeline: Timeline) -> Plan:
        """The plan, with what computes while messages travel in its simulated iteration, what no order hides,
        and what it is for."""
        gradients = {self.program.instructions[i].name for i in weight_gradients(self.program)}
        hidings = what_hides(timeline, layers_of(self.module.graph), gradients)
        bounds = exposed_bounds(timeline.program, timeline.durations_ms)
        return replace(plan, hidings=hidings, setting=self.setting, exposed_bounds=bounds)


Pass = Callable[[Step, Plan], Step]


def walk(step: Step, plan: Plan, passes: Sequence[Pass]) -> Step:
    """The step after these passes.

    Raises: UserError, from a pass that cannot follow the plan; CutError.
    """
    for rewrite in passes:
        step = rewrite(step, plan)
    return step


# Before costs are known.


def shard_parameters(step: Step, _plan: Plan) -> Step:
    """Shards are gathered before they are read, and their gradients reduce-scattered."""
    if step.sums is None or (shards := step.sums.shards) is None:
        return step
    insert_gathers(step.module, shards, step.sums.parameter_of_output)
    return replace(step)


def sum_gradients(step: Step, _plan: Plan) -> Step:
    """Gradients are divided, and summed over the ranks in buckets."""
    if step.sums is None:
        return step
    buckets.divide_gradients(step.module, step.sums.divide_by)
    if step.sums.group_of_parameter:
        buckets.insert_all_reduces(
            step.module,
            step.sums.parameter_of_output,
            step.sums.group_of_parameter,
            step.sums.replica_group,
        )
    return replace(step)


def sink_statistics(step: Step, _plan: Plan) -> Step:
    """What no later all-to-all depends on is out of the way of ranges (`order.sink`)."""
    reorder(step.module.graph, order_without_statistics(program_from_fx(step.module)))
    return replace(step)


def fuse(step: Step, plan: Plan) -> Step:
    """The layers that are to be fused are persistent launches. Of a copy."""
    if not any(group.fused for group in plan.fused):
        return step
    assert step.register is not None, "fused layers without a place to register them"
    module = copy_of(step.module)
    lower(module, plan.fused, step.register)
    return replace(step, module=module, timed=None)


# What the plan says.


def cut(step: Step, plan: Plan) -> Step:
    """The ranges are cut into parts: the very graph that was simulated, or measured. Of a copy."""
    plan.check(step.program)
    if step.other_sizes:
        module = copy_of(step.module)
        cut_ranges(module.graph, step.program, plan.ranges, empty_parts=True)
    elif plan.ranges:
        module = copy_of(module_of(step.module, step.cutter.graph(plan.ranges)))
    else:
        module = copy_of(step.module)
    return replace(step, module=module)


def order(step: Step, plan: Plan) -> Step:
    """The instructions are in the order of the plan."""
    graph, names = step.module.graph, plan.order
    if step.other_sizes:
        names = tuple(with_joins(names, instruction_order(graph)))
    (place if step.forward_outputs is None else reorder)(graph, names)
    step.module.recompile()
    return replace(step)


# From the graph in its order to what runs.


def split(step: Step, _plan: Plan) -> Step:
    """Forward and backward are graphs of their own."""
    assert step.forward_outputs is not None, "a graph that is not to be split"
    return replace(step, halves=split_joint(step.module, step.forward_outputs))


def start_early_wait_late(step: Step, plan: Plan) -> Step:
    """Collectives start at their places; who reads their results waits for them."""
    for graph in step.graphs:
        apply.start_early_wait_late(graph, plan.blocking, step.number_of)
    return step


def wait_late(step: Step, plan: Plan) -> Step:
    """The same in a graph of another tracer, in which nothing may be added: only waits move."""
    for graph in step.graphs:
        apply.wait_late(graph.graph, plan.blocking)
        graph.recompile()
    return step


def write_in_place(step: Step, _plan: Plan) -> Step:
    """Parts are written where their whole lies."""
    for graph in step.graphs:
        in_place.write_in_place(graph)
    return step


def check(step: Step, _plan: Plan) -> Step:
    """Raises: UserError unless the halves run the instructions of the joint graph in its order."""
    check_halves(instruction_order(step.module.graph), [issued_order(half.graph) for half in step.graphs])
    return step


CAPTURED: tuple[Pass, ...] = (shard_parameters, sum_gradients, sink_statistics)
PLANNED: tuple[Pass, ...] = (cut, order)
RUNNING: tuple[Pass, ...] = (split, start_early_wait_late, write_in_place, check)


def check_halves(planned: Sequence[str], halves: Sequence[Sequence[str]]) -> None:
    """Raise UserError unless forward, then backward run the planned instructions in the planned order.

    Instructions whose results nothing reads may be missing: torch drops them.
    """
    ran = [name for half in halves for name in half]
    place = {name: i for i, name in enumerate(planned)}
    for name, times in Counter(ran).items():
        if name not in place or times > 1:
            got = f"{name}, which is in no plan" if name not in place else f"{name} {times} times"
            raise _not_as_planned(got, "each planned instruction once")
    for early, late in pairwise(ran):
        if place[early] > place[late]:
            raise _not_as_planned(f"{early} before {late}", f"{late} first")


def _not_as_planned(got: str, expected: str) -> UserError:
    return UserError(
        "forward and backward graph", got=got, expected=expected, do="report this: torch changed the order"
    )
