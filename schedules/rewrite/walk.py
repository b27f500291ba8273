"""The walk of a training step: every rewriting of its graph, in the order in which it happens.

    capture -> CAPTURED -> costs -> Plan -> PLANNED -> RUNNING -> run

To add a pass, write a function `(step, plan) -> step` and put it where it belongs in one of the three lists.

Contract of every pass; what each promises beyond that is numbered in its docstring, and so is its body.

1. The graph computes what it computed, sums over parts in another order.
2. It is a valid graph, in which an instruction keeps its name and its `meta`; a part is named after its whole
   (`graph.costs.part_instruction`).
3. A pass that cannot do what the plan says raises a UserError, and never does something else.
4. All ranks get the same graph: a pass depends on the step and the plan alone.
5. A step that was planned stays as it is: the first pass of a list that changes its graph starts from a copy,
   and the others change that. What a pass changes besides the graph is in the step that it returns.

To debug the walk, set the logger of this module to DEBUG: each pass logs a diff of the graph's text.
`LANCET_WITHOUT_PASSES=write_in_place` leaves passes out, by name.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar, cast

from torch import fx

from lancet_kernels.errors import check_name
from lancet_kernels.graph.capture.capture import split_joint
from lancet_kernels.graph.capture.captured_graph import copy_of, module_of
from lancet_kernels.graph.capture.trace import layers_of
from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.from_fx import program_from_fx
from lancet_kernels.graph.program import Instruction, Program
from lancet_kernels.schedules.order.ordering import sink_statistics as order_without_statistics
from lancet_kernels.schedules.order.ordering import weight_gradients
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.rewrite import apply, buckets
from lancet_kernels.schedules.rewrite.apply import instruction_order, issued_order, place, reorder
from lancet_kernels.schedules.rewrite.cut import GraphCutter, cut_ranges, with_joins
from lancet_kernels.schedules.rewrite.fused import MatchedLayer, lower
from lancet_kernels.schedules.rewrite.gathers import Shards, insert_gathers
from lancet_kernels.schedules.strategies import Planner, PlanningOptions
from lancet_kernels.schedules.time.simulate import Timeline
from lancet_kernels.schedules.time.timeline import what_hides

_log = logging.getLogger(__name__)
WITHOUT_PASSES = "LANCET_WITHOUT_PASSES"
"""Environment variable with comma-separated names of passes to leave out, the same on all ranks, to find the
cause of a problem. Later passes may depend on one."""
UNPLANNED = Plan("", "", "")
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
        setting: what a plan of it is for, in the user's words, as JSON values; {}: not said.
        forward_outputs: how many outputs of the joint graph are those of the forward; None: the graph is not
            split, and its phases may mix.
        sums: how gradients are summed; None: not at all.
        other_sizes: its tensors have other sizes than those that were planned: the last parts may be empty,
            and steps that join parts in another layout may be more or fewer.
    """

    module: fx.GraphModule
    timed: Program | None = None
    cost: Cost = unpriced
    setting: Mapping[str, Any] = field(default_factory=dict)
    forward_outputs: int | None = None
    halves: tuple[fx.GraphModule, ...] = ()
    sums: GradientSums | None = None
    other_sizes: bool = False

    @cached_property
    def program(self) -> Program:
        """The Program that is planned."""
        return self.timed if self.timed is not None else program_from_fx(self.module)

    def context_of_layer(self, layer: MatchedLayer) -> int:
        """The number of the context (`ops.base`) that has the exchange of a layer to be fused."""
        raise AssertionError(f"{layer.name} is fused without a model")

    def context_of_sum(self, _key: tuple[object, ...]) -> int | None:
        """The number of the context that has a sum of gradients, which may then be left to a later backward;
        None: it may not."""
        return None

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        """The graphs to run: the halves, or the one graph that is not split."""
        return self.halves or (self.module,)

    @cached_property
    def cutter(self) -> GraphCutter:
        """Gives the graph and the Program with ranges cut."""
        return GraphCutter(self.module, self.program, self.cost)

    @cached_property
    def _planners(self) -> dict[tuple[PlanningOptions | None, bool], Planner]:
        return {}

    def planner(self, options: PlanningOptions | None = None, *, search: bool = True) -> Planner:
        """The planner for this step; one for each options. Args: search: as of `Planner`."""
        key = options, search
        if key not in self._planners:
            self._planners[key] = Planner(self.program, self.cost, options, self.cutter, search=search)
        return self._planners[key]

    def figures(self, timeline: Timeline) -> dict[str, Any]:
        """Fields of a plan's report from its simulated iteration: what computes while messages travel, and
        the setting."""
        gradients = {self.program.instructions[i].name for i in weight_gradients(self.program)}
        hidings = what_hides(timeline, layers_of(self.module.graph), gradients)
        return {"hidings": hidings, "setting": self.setting}


Pass = Callable[[Step, Plan], Step]
AnyStep = TypeVar("AnyStep", bound=Step)


def walk(step: AnyStep, plan: Plan, passes: Sequence[Pass]) -> AnyStep:
    """The step after these passes, but for those that `LANCET_WITHOUT_PASSES` names.

    Raises: UserError, from a pass that cannot follow the plan, or for the name of no pass; CutError.
    """
    left_out = set(filter(None, os.environ.get(WITHOUT_PASSES, "").split(",")))
    for name in left_out:
        check_name(f"pass in {WITHOUT_PASSES}", name, PASSES)
    for rewrite in (one for one in passes if one.__name__ not in left_out):
        before = _text(step)
        step = cast("AnyStep", rewrite(step, plan))
        if _log.isEnabledFor(logging.DEBUG):
            changes = difflib.unified_diff(before, _text(step), n=0, lineterm="")
            _log.debug("%s:\n%s", rewrite.__name__, "\n".join(changes) or "no change")
    return step


def _text(step: Step) -> list[str]:
    """The lines of the step's graphs, where they are logged."""
    if not _log.isEnabledFor(logging.DEBUG):
        return []
    return [line for module in step.graphs for line in str(module.graph).splitlines()]


# Before costs are known.


def shard_parameters(step: Step, _plan: Plan) -> Step:
    """What FSDP shards is gathered and reduce-scattered (`gathers`); without shards nothing changes."""
    if step.sums is None or (shards := step.sums.shards) is None:
        return step
    insert_gathers(step.module, shards, step.sums.parameter_of_output)
    return replace(step)


def sum_gradients(step: Step, _plan: Plan) -> Step:
    """Gradients are those of the loss of all ranks (`buckets`); without `sums` nothing changes.

    1. Gradients of parameters are divided, those of inputs are not.
    2. Those that are summed over a group are so in buckets, in the order in which the backward computes them.
    """
    if (sums := step.sums) is None:
        return step
    buckets.divide_gradients(step.module, sums.divide_by)  # 1
    if groups := sums.group_of_parameter:  # 2
        buckets.insert_all_reduces(step.module, sums.parameter_of_output, groups, sums.replica_group)
    return replace(step)


def sink_statistics(step: Step, _plan: Plan) -> Step:
    """What no later all-to-all depends on is out of the way of ranges (`order.ordering.sink_statistics`)."""
    reorder(step.module.graph, order_without_statistics(program_from_fx(step.module)))
    return replace(step)


def fuse(step: Step, plan: Plan) -> Step:
    """The layers that are to be fused are persistent launches (`rewrite.fused`): a forward and a backward one
    stand in a copy of the graph, which has no costs yet. Without such a layer nothing changes."""
    if not any(group.fused for group in plan.fused):
        return step
    module = copy_of(step.module)
    lower(module, plan.fused, step.context_of_layer)
    return replace(step, module=module, timed=None)


# What the plan says.


def cut(step: Step, plan: Plan) -> Step:
    """The ranges are cut into parts (`rewrite.cut`).

    1. The graph is a copy of the very one that was simulated, or measured.
    2. Of other sizes there was none: it is cut here, with parts that may be empty.
    """
    plan.check(step.program)
    if plan.ranges and not step.other_sizes:
        return replace(step, module=copy_of(module_of(step.module, step.cutter.graph(plan.ranges))))  # 1
    module = copy_of(step.module)
    cut_ranges(module.graph, step.program, plan.ranges, empty_parts=step.other_sizes)  # 2
    return replace(step, module=module)


def order(step: Step, plan: Plan) -> Step:
    """The instructions are in the order of the plan (`apply`). Of other sizes, steps of joins that are new
    stand before their last one, missing ones nowhere."""
    graph, names = step.module.graph, plan.order
    if step.other_sizes:
        names = tuple(with_joins(names, instruction_order(graph)))
    (place if step.forward_outputs is None else reorder)(graph, names)
    step.module.recompile()
    return replace(step)


# From the graph in its order to what runs.


def split(step: Step, _plan: Plan) -> Step:
    """Forward and backward are graphs of their own, each in the order of the joint graph."""
    assert step.forward_outputs is not None, "a graph that is not to be split"
    return replace(step, halves=split_joint(step.module, step.forward_outputs))


def start_early_wait_late(step: Step, plan: Plan) -> Step:
    """Collectives start at their places, and are waited for right before their first readers (`apply`), or at
    once if the plan lets them block; a sum of gradients may be left to a later backward."""
    for graph in step.graphs:
        apply.start_early_wait_late(graph, plan.blocking, step.context_of_sum)
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
        apply.write_in_place(graph)
    return step


def check(step: Step, _plan: Plan) -> Step:
    """The halves run the instructions of the joint graph in its order."""
    check_halves(instruction_order(step.module.graph), [issued_order(half.graph) for half in step.graphs])
    return step


CAPTURED: tuple[Pass, ...] = (shard_parameters, sum_gradients, sink_statistics)
PLANNED: tuple[Pass, ...] = (cut, order)
RUNNING: tuple[Pass, ...] = (split, start_early_wait_late, write_in_place, check)
PASSES = tuple(one.__name__ for one in (*CAPTURED, fuse, *PLANNED, *RUNNING, wait_late))
"""Their names, in order."""


def check_halves(planned: Sequence[str], halves: Sequence[Sequence[str]]) -> None:
    """Forward, then backward run the planned instructions in the planned order, perhaps without those whose
    results nothing reads: torch drops them."""
    ran = [name for half in halves for name in half]
    place = {name: i for i, name in enumerate(planned)}
    for name, times in Counter(ran).items():
        assert name in place, f"{name} is in no plan"
        assert times == 1, f"{name} runs {times} times"
    for early, late in pairwise(ran):
        assert place[early] < place[late], f"torch changed the order: {early} before {late}"
