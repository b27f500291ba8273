"""Cuts the ranges of a plan: the graph that is simulated, measured and run, and its Program.

A Planner simulates and orders the Program of the partitioned graph (`GraphCutter`), in which the slices,
counts and rows of parts and the reassembly are instructions like all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from lancet_kernels.graph.capture.captured_graph import copy_of_graph
from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.costs.part_instruction import is_cut, part_instruction, part_name
from lancet_kernels.graph.from_fx import program_from_graph
from lancet_kernels.graph.meta import WORK
from lancet_kernels.graph.program.phases import forward_first
from lancet_kernels.graph.program.program import Program
from lancet_kernels.schedules.cut.ranges import PartitionRange, pipeline_order, positions, range_names
from lancet_kernels.schedules.rewrite.apply import instruction_order
from lancet_kernels.schedules.rewrite.cut import JOIN_STEP, Values, cut_range
from lancet_kernels.schedules.rewrite.fused import add_fillers, choose_fillers


def cut_ranges(
    graph: fx.Graph,
    program: Program,
    ranges: Sequence[PartitionRange],
    values: Values | None = None,
    *,
    empty_parts: bool = False,
) -> None:
    """Partition ranges of a joint graph, in pipeline order.

    Args: program: the Program of the graph. values: empty_parts: as in `cut_range`.
    Raises: UserError (a range is not in the program), CutError.
    """
    for planned in ranges:
        first, last = positions(program, planned)
        order = [
            (program.instructions[i].name, part)
            for i, part in pipeline_order(program, first, last, planned.forms, planned.parts)
        ]
        cut_range(graph, order, planned.parts, planned.forms, values, empty_parts=empty_parts)
        add_fillers(graph, planned.fillers)
    if ranges:
        forward_first(graph)


class GraphCutter:
    """Gives the Program of a joint graph with ranges cut, and with the times of its parts. The graph itself
    is not changed.

    Uncut instructions keep their times; the cost model gives those of parts (`graph.costs.part_instruction`).
    """

    def __init__(self, module: fx.GraphModule, program: Program, cost: Cost) -> None:
        self.module, self.program, self.cost = module, program, cost
        self._values: Values = {}
        self._graphs: dict[tuple[object, ...], fx.Graph] = {}
        in_graph = set(instruction_order(module.graph))
        self._behind = tuple(i for i in program.instructions if i.name not in in_graph)

    def graph(self, ranges: Sequence[PartitionRange]) -> fx.Graph:
        """The graph with these ranges cut, not to be changed. Equal parts share their fake results.

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
        launches = {node.name: WORK.of(node) for node in self.module.graph.nodes if WORK.on(node)}
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


def with_joins(order: Sequence[str], present: Sequence[str]) -> list[str]:
    """The order without what is not present; steps of a join that are new stand before their last one."""
    in_order, in_graph = set(order), set(present)
    new = defaultdict(list)
    for name in present:
        if name not in in_order:
            new[JOIN_STEP.sub("", name)].append(name)
    return [step for name in order if name in in_graph for step in (*new[name], name)]
