"""From a Plan to graphs that run: ranges cut, everything in the planned order, collectives started early.

What a Planner simulates and orders is the Program of the cut graph (`GraphCutter`): slices, counts and rows
of parts, and whole tensors again, are instructions in it like all others. A plan is followed to the letter,
or refused: when it is put into a graph, and again when torch has split forward from backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torch import fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture import copy_of_graph, split_joint
from lancet_kernels.graph.costs import Cost
from lancet_kernels.graph.from_fx import forward_first, program_from_graph
from lancet_kernels.graph.part_instruction import is_cut, part_instruction, part_name
from lancet_kernels.graph.program import Program
from lancet_kernels.schedules.apply import instruction_order, reorder, start_early_wait_late
from lancet_kernels.schedules.cut import Cut, Values, cut_range
from lancet_kernels.schedules.in_place import write_in_place
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.ranges import PartitionRange, pipeline_order, positions


def cut_ranges(
    graph: fx.Graph,
    program: Program,
    ranges: Sequence[PartitionRange],
    values: Values | None = None,
) -> None:
    """Cut ranges of a joint graph, of which `program` is the Program, into parts in pipeline order.

    Args: values: as of `cut_range`.
    Raises: UserError (a range is not in the program), CutError.
    """
    for planned in ranges:
        first, last = positions(program, planned)
        names = tuple(i.name for i in program.instructions[first : last + 1])
        order = [
            (program.instructions[i].name, part)
            for i, part in pipeline_order(program, first, last, planned.forms, planned.parts)
        ]
        cut_range(graph, Cut(names, planned.parts, planned.forms), order, values)
    if ranges:
        forward_first(graph)


class GraphCutter:
    """Gives the Program of a joint graph with ranges cut, priced; the graph stays as it is.

    Instructions that stay whole keep their times. A part costs what the cost model says of it
    (`graph.part_instruction`); the graph shows what else cutting adds.
    """

    def __init__(self, module: fx.GraphModule, program: Program, cost: Cost) -> None:
        self.module, self.program, self.cost = module, program, cost
        self._values: Values = {}
        in_graph = set(instruction_order(module.graph))
        self._behind = tuple(i for i in program.instructions if i.name not in in_graph)

    def __call__(self, ranges: Sequence[PartitionRange]) -> Program:
        """The Program with these ranges cut; what is no part of the graph (the optimizer's step) comes last.

        Raises: as `cut_ranges`.
        """
        graph = copy_of_graph(self.module)
        cut_ranges(graph, self.program, ranges, self._values)
        priced = {name: part for planned in ranges for name, part in self._priced(planned).items()}
        for node in graph.nodes:
            if node.name in priced:
                node.meta["milliseconds"], node.meta["parts"] = priced[node.name]
        cut = program_from_graph(graph, self.program.name, unchanged=self.program)
        if not self._behind:
            return cut
        return replace(
            cut,
            instructions=(*cut.instructions, *self._behind),
            tensors={**self.program.tensors, **cut.tensors},
            inputs=self.program.inputs,
            outputs=self.program.outputs,
        )

    def _priced(self, planned: PartitionRange) -> dict[str, tuple[float, int]]:
        """By name, what the parts of a range take in milliseconds, and how many they are."""
        first, last = positions(self.program, planned)
        found: dict[str, tuple[float, int]] = {}
        for instruction in self.program.instructions[first : last + 1]:
            if is_cut(instruction, planned.forms):
                tensors, forms, parts = self.program.tensors, planned.forms, planned.parts
                ms = self.cost(*part_instruction(instruction, tensors, forms, 0, parts))
                found.update((part_name(instruction.name, part), (ms, parts)) for part in range(parts))
        return found


def realize(module: fx.GraphModule, program: Program, plan: Plan) -> None:
    """Put a plan into a joint graph, of which `program` is the Program.

    Raises: UserError (the plan is for another program, or its order is not that of this graph), CutError.
    """
    plan.check(program)
    cut_ranges(module.graph, program, plan.ranges)
    reorder(module.graph, plan.order)
    module.recompile()


def split_as_planned(
    joint: fx.GraphModule, forward_outputs: int, plan: Plan
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a realized joint graph, with collectives under way while others compute.

    Raises: UserError if a half does not run its instructions in the order of the plan.
    """
    halves = split_joint(joint, forward_outputs)
    check_halves(instruction_order(joint.graph), [instruction_order(half.graph) for half in halves])
    for half in halves:
        start_early_wait_late(half, plan.blocking)
        write_in_place(half)
    return halves


def check_halves(planned: Sequence[str], halves: Sequence[Sequence[str]]) -> None:
    """Raise UserError unless forward, then backward run what was planned in the planned order.

    What nobody reads may be missing: torch drops it.
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
