"""Applies a Plan to a graph: partitions its ranges, reorders the instructions, starts collectives early.

A Planner simulates and orders the Program of the partitioned graph (`GraphCutter`), in which the slices,
counts and rows of parts and the reassembly are instructions like all others. The order is checked twice: when
the plan is applied, and after torch has split forward from backward. A graph that cannot follow the plan is
an error.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from torch import fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.capture import split_joint
from lancet_kernels.graph.capture.captured_graph import copy_of_graph
from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.program.from_fx import program_from_graph
from lancet_kernels.graph.program.phases import forward_first
from lancet_kernels.graph.program.program import Program
from lancet_kernels.graph.rules.part_instruction import is_cut, part_instruction, part_name
from lancet_kernels.schedules.fuse.copy_fillers import add_fillers, choose_fillers
from lancet_kernels.schedules.fuse.fused import WORK
from lancet_kernels.schedules.partition.ranges import PartitionRange, pipeline_order, positions, range_names
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.rewrite.apply import instruction_order, reorder, start_early_wait_late
from lancet_kernels.schedules.rewrite.cut import RangeToCut, Values, cut_range
from lancet_kernels.schedules.rewrite.cut_wholes import JOIN_STEP
from lancet_kernels.schedules.rewrite.in_place import write_in_place


def cut_ranges(
    graph: fx.Graph,
    program: Program,
    ranges: Sequence[PartitionRange],
    values: Values | None = None,
    *,
    empty_parts: bool = False,
) -> None:
    """Partition ranges of a joint graph, in pipeline order.

    Args: program: the Program of the graph. values: as in `cut_range`. empty_parts: as in `RangeToCut`.
    Raises: UserError (a range is not in the program), CutError.
    """
    for planned in ranges:
        first, last = positions(program, planned)
        names = tuple(i.name for i in program.instructions[first : last + 1])
        order = [
            (program.instructions[i].name, part)
            for i, part in pipeline_order(program, first, last, planned.forms, planned.parts)
        ]
        cut_range(graph, RangeToCut(names, planned.parts, planned.forms, empty_parts), order, values)
        add_fillers(graph, planned.fillers)
    if ranges:
        forward_first(graph)


class GraphCutter:
    """Gives the Program of a joint graph with ranges cut, and with the times of its parts. The graph itself
    is not changed.

    Uncut instructions keep their times; the cost model gives those of parts (`graph.rules.part_instruction`).
    """

    def __init__(self, module: fx.GraphModule, program: Program, cost: Cost) -> None:
        self.module, self.program, self.cost = module, program, cost
        self._values: Values = {}
        self._graphs: dict[tuple[object, ...], fx.Graph] = {}
        in_graph = set(instruction_order(module.graph))
        self._behind = tuple(i for i in program.instructions if i.name not in in_graph)

    def graph(self, ranges: Sequence[PartitionRange]) -> fx.Graph:
        """The graph with these ranges cut, to be measured: it shares fake results, so it cannot be compiled.

        Raises: as `cut_ranges`.
        """
        key = range_names(ranges)
        if key not in self._graphs:
            graph = copy_of_graph(self.module)
            cut_ranges(graph, self.program, ranges, self._values)
            self._graphs[key] = graph
        return self._graphs[key]

    def __call__(self, ranges: Sequence[PartitionRange]) -> Program:
        """The Program with these ranges cut. Instructions outside the graph (the optimizer's step) come last.

        Raises: as `cut_ranges`.
        """
        priced = {name: part for planned in ranges for name, part in self._priced(planned).items()}
        filled = {fillers.launch: fillers.milliseconds for planned in ranges for fillers in planned.fillers}
        times = {name: (filled.get(name, ms), parts) for name, (ms, parts) in priced.items()}
        cut = program_from_graph(self.graph(ranges), self.program.name, unchanged=self.program, parts=times)
        if not self._behind:
            return cut
        return replace(
            cut,
            instructions=(*cut.instructions, *self._behind),
            tensors={**self.program.tensors, **cut.tensors},
            inputs=self.program.inputs,
            outputs=self.program.outputs,
        )

    def with_fillers(self, planned: PartitionRange, cut: Program) -> PartitionRange:
        """The range with the gradients that its fused launches hide as fillers, if there are any.

        Args: cut: the Program with the range cut, without fillers.
        """
        launches = {node.name: node.meta[WORK] for node in self.module.graph.nodes if WORK in node.meta}
        if not launches:
            return planned
        return replace(planned, fillers=choose_fillers(cut, self.cost, launches, planned.parts))

    def _priced(self, planned: PartitionRange) -> dict[str, tuple[float, int]]:
        """By name of a part: its milliseconds, and the number of parts."""
        first, last = positions(self.program, planned)
        times: dict[str, tuple[float, int]] = {}
        for instruction in self.program.instructions[first : last + 1]:
            if is_cut(instruction, planned.forms):
                tensors, forms, parts = self.program.tensors, planned.forms, planned.parts
                ms = self.cost(*part_instruction(instruction, tensors, forms, 0, parts))
                times.update((part_name(instruction.name, part), (ms, parts)) for part in range(parts))
        return times


def realize(module: fx.GraphModule, program: Program, plan: Plan, *, other_sizes: bool = False) -> None:
    """Apply a plan to a joint graph, in place.

    Args: program: the Program of the graph. other_sizes: its tensors have other sizes than those that were
        planned (`Plan.for_program`): the last parts may be empty, and steps that join parts in another layout
        than that in which they lie may be more or fewer.
    Raises: UserError (the plan is for another program, or its order is invalid for this graph), CutError.
    """
    plan.check(program)
    cut_ranges(module.graph, program, plan.ranges, empty_parts=other_sizes)
    order = _with_joins(plan.order, instruction_order(module.graph)) if other_sizes else plan.order
    reorder(module.graph, order)
    module.recompile()


def _with_joins(order: Sequence[str], present: Sequence[str]) -> list[str]:
    """The order without what is not present; steps of a join that are new stand before their last one."""
    in_order, in_graph = set(order), set(present)
    new = defaultdict(list)
    for name in present:
        if name not in in_order:
            new[JOIN_STEP.sub("", name)].append(name)
    return [step for name in order if name in in_graph for step in (*new[name], name)]


def split_as_planned(
    joint: fx.GraphModule,
    forward_outputs: int,
    plan: Plan,
    number_of: Callable[[tuple[object, ...]], int] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward graph of a joint graph to which a plan was applied; collectives are started early.

    Args: number_of: as of `start_early_wait_late`.

    Raises: UserError if one of them does not run its instructions in the order of the plan.
    """
    halves = split_joint(joint, forward_outputs)
    check_halves(instruction_order(joint.graph), [instruction_order(half.graph) for half in halves])
    for half in halves:
        start_early_wait_late(half, plan.blocking, number_of)
        write_in_place(half)
    return halves


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
