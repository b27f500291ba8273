"""Partitions a range of an fx graph: replaces its instructions by those of the parts.

Lancet, section 5 and figures 5(c) and 8. The range [dispatch, all_to_all, ..., next layer's attention], cut
into k = 2 parts, becomes

    dispatch_0 dispatch_1 all_to_all_0 ...  (in the requested order), and one node that reassembles the parts
    of a tensor wherever an instruction outside the parts reads it.

The form of a tensor (`graph.rules.rules`) says which slice of it a part has; the rule of an op
(`graph.rules.rules`) says which of its arguments differ between parts. After the gate, rows are irregular:
each part has its own counts, its own exchange of counts and its own rows.

Contract:

1. The order has every instruction of the range once per part, and once if it is not cut.
2. The parts stand in that order behind the range; what is not cut moves between them.
3. The summands of a partial tensor are added right behind the last one: their memory is freed early.
4. Readers outside the parts read one node that reassembles the tensor; joins are marked (`apply`).
5. The original instructions are gone.
6. If a range cannot be cut, CutError says why; the graph is then invalid.

A `GraphCutter` cuts all ranges of a plan: the graph that is simulated, measured and run, and its Program, in
which the slices, counts and rows of parts and the reassembly are instructions like all others.
"""

from __future__ import annotations

import operator
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from lancet_kernels.graph.capture.captured_graph import copy_of_graph, set_value
from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.costs.part_instruction import is_cut, part_instruction, part_name
from lancet_kernels.graph.from_fx import is_view, program_from_graph, tensor_names, with_elements
from lancet_kernels.graph.meta import STANDS_FOR, forward_first
from lancet_kernels.graph.ops import argument
from lancet_kernels.graph.program import Program
from lancet_kernels.graph.rules.rules import (
    CARRIED,
    IRREGULAR,
    MEAN,
    PARTIAL,
    WINDOW,
    Forms,
    any_made_in_parts,
)
from lancet_kernels.schedules.cut.ranges import PartitionRange, pipeline_order, positions, range_names
from lancet_kernels.schedules.rewrite.apply import instruction_order, mark_join
from lancet_kernels.schedules.rewrite.cut_parts import (
    CutError,
    Parts,
    Routing,
    Values,
    are_by_expert,
    element_of,
    refuse,
    rule_of,
)

Order = Sequence[tuple[str, int | None]]
"""(instruction, part) in execution order; part None for an instruction that is not cut."""


def cut_range(
    graph: fx.Graph,
    order: Order,
    parts: int,
    forms: Forms,
    values: Values | None = None,
    *,
    empty_parts: bool = False,
) -> None:
    """Replace the instructions of a range by those of its parts.

    Args:
        order: of the parts of all its instructions.
        forms: of all their tensors that are not whole.
        values: cache of fake results. Nodes then share their `meta["val"]`, from which passes of torch would
            conclude that they share storage. None: each node gets its own.
        empty_parts: the last parts may have no elements: a batch smaller than the one that was planned is cut
            into as many parts, because its collectives must be those of the plan.
    Raises: CutError.
    """
    _Cutter(graph, {name for name, _ in order}, parts, forms, values, empty_parts).run(order)


class _Cutter:
    """Cuts one range.

    Attributes: inside: the nodes of the range. in_parts: those that run part by part. routing_nodes: counts
        and rows of the whole batch, which each part computes for itself.
    """

    def __init__(
        self,
        graph: fx.Graph,
        names: Collection[str],
        parts: int,
        forms: Forms,
        values: Values | None,
        empty_parts: bool,
    ) -> None:
        self.graph = graph
        self.inside = [node for node in graph.nodes if node.name in names]
        if len(self.inside) != len(names) or not names:
            raise refuse(f"{len(names) - len(self.inside)} unknown instructions", "instructions of the graph")
        routings = [Routing.of(node) for node in self.inside if rule_of(node).row_argument]
        self.routing_nodes = [node for node in self.inside if rule_of(node).routing]
        self.in_parts = [
            node
            for node in self.inside
            if node not in self.routing_nodes and any_made_in_parts(forms, tensor_names(node))
        ]
        self.parts = Parts(
            graph,
            self.in_parts,
            forms,
            parts,
            routings,
            values,
            lambda node: self.reassembly.whole(node),
            empty_parts,
        )
        self.reassembly = Reassembly(self.parts)

    def run(self, order: Order) -> None:
        """Insert the parts in order, redirect the readers of cut tensors, erase the original nodes."""
        nodes = {node.name: node for node in self.inside if node not in self.routing_nodes}
        in_parts, count = set(self.in_parts), self.parts.count
        ordered = [(nodes[name], part) for name, part in order if name in nodes]
        expected = [(n, p) for n in nodes.values() for p in (range(count) if n in in_parts else (None,))]
        if Counter(ordered) != Counter(expected):  # 1
            raise refuse("an order that is not every instruction once per part", "all of them")
        end = with_elements(self.inside[-1])[-1].next
        try:
            with self.graph.inserting_before(end):
                for node, part in ordered:  # 2
                    if part is None:
                        self._move(node, end)
                        continue
                    self.parts.copy(node, part)
                    if part + 1 < count:
                        continue
                    for element in with_elements(node):
                        if self.parts.form(element) == PARTIAL and element.users and tensor_names(element):
                            self.reassembly.whole(element)  # 3
                rows = {routing.row: routing for routing in self.parts.routings}.values()
                replacements = [r for routing in rows for r in self.reassembly.merged_rows(routing)]
                replacements += [r for node in self.in_parts for r in self.reassembly.replacements(node)]
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, CutError):
                raise
            reason = str(error).splitlines()[0]
            raise refuse(f"parts that do not fit together: {reason}", "axes that the rules allow") from error
        for reader, old, new in replacements:  # 4
            reader.replace_input_with(old, new)
        for node in reversed(self.in_parts):  # 5
            for element in reversed(with_elements(node)):
                self.graph.erase_node(element)
        for node in self.routing_nodes:
            end.prepend(node)
        for node in (*reversed(self.routing_nodes), *reversed(self.reassembly.wholes.values())):
            if not node.users:
                self.graph.erase_node(node)
        for whole in self.reassembly.wholes.values():
            if whole.users:
                mark_join(whole)  # 4

    def _move(self, node: fx.Node, end: fx.Node) -> None:
        """Move an instruction that is not cut behind the parts so far and the whole tensors that it reads."""
        for source in node.all_input_nodes:
            if source in self.parts.partitioned:
                self.reassembly.whole(source)
            if source in self.routing_nodes:
                raise refuse(f"{node.name}, which is not cut but reads {source.name}", "parts of it")
        for element in with_elements(node):
            end.prepend(element)


aten, lancet = torch.ops.aten, torch.ops.lancet

JOIN_STEP = re.compile(r"_(laid_out(_\d+)?|joined)$")
"""The end of the names of steps that join parts in the layout of the whole; the last step has none."""

Replacement = tuple[fx.Node, fx.Node, fx.Node]
"""(reader, its old input, its new input)"""


class Reassembly:
    """The whole tensors of a partitioned range. `wholes[element]` is the reassembled tensor."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.wholes: dict[fx.Node, fx.Node] = {}

    def replacements(self, node: fx.Node) -> list[Replacement]:
        """For the results of a cut node: readers outside the parts get the reassembled tensors."""
        replacements = []
        for element in with_elements(node):
            readers = [user for user in element.users if user not in self.parts.partitioned]
            if readers and tensor_names(element):
                whole = self.whole(element)
                replacements += [(reader, element, whole) for reader in readers]
        return replacements

    def whole(self, element: fx.Node) -> fx.Node:
        """The node with the reassembled tensor; created on first use."""
        if element not in self.wholes:
            node = element.args[0] if element.target is operator.getitem else element
            whole = self._view_again(node) or self._join(node, element)
            if whole.target is not operator.getitem:
                STANDS_FOR.set(whole, tensor_names(element)[0])
            self.wholes[element] = whole
        return self.wholes[element]

    def _view_again(self, node: fx.Node) -> fx.Node | None:
        """Repeat a view on the whole tensor, which is free; joining the parts of a view would copy them.

        None if the op is not a view, or cannot be one here: reassembled tensors are contiguous, even if the
        original was not (attention's transposed result).
        """
        if not is_view(node):
            return None
        args = fx.map_arg(
            node.args, lambda source: self.whole(source) if source in self.parts.partitioned else source
        )
        try:
            return self.parts.call(node.target, args, dict(node.kwargs), f"{node.name}_whole")
        except (RuntimeError, ValueError):
            return None

    def _join(self, node: fx.Node, element: fx.Node) -> fx.Node:
        if any(element not in env for env in self.parts.env):
            raise refuse(
                f"{element.name} read before all its parts are computed", "an order that computes them first"
            )
        parts = [self.parts.env[p][element] for p in range(self.parts.count)]
        name, form = f"{element.name}_whole", self.parts.form(element)
        if form == CARRIED:
            return parts[-1]
        if form == PARTIAL or rule_of(node).is_count:
            total = parts[0]
            for other in parts[1:]:
                total = self.parts.call(aten.add.Tensor, (total, other), {}, name)
            reduction = rule_of(node).reduction_argument
            if reduction and argument(node, reduction) == MEAN and element.args[1] == 0:
                weight = self.whole(element_of(node, 1))
                total = self.parts.call(aten.div.Tensor, (total, weight), {}, f"{element.name}_mean")
            return total
        if form in (WINDOW, IRREGULAR):
            count = self._count_of(node)
            pick = self.parts.window_counts if form == WINDOW else self.parts.part
            counts = [pick(count, p) for p in range(self.parts.count)]
            merged = self.parts.rows(lancet.merge_parts.default, (parts, counts), are_by_expert(node), name)
            # The expected row counts of the parts are bounded one by one, and need not add up to the whole's.
            set_value(merged, element.meta["val"])
            return merged
        if form.dimension is not None:
            return self._concatenate(parts, form.dimension, element.meta["val"], name)
        raise refuse(
            f"{element.name}, whole in every part, read after the range", "tensors that can be reassembled"
        )

    def _count_of(self, node: fx.Node) -> fx.Node:
        """The counts of the rows that an op returns."""
        rule = rule_of(node)
        if rule.count_arguments:
            return argument(node, rule.count_arguments[-1])
        return next(routing.count for routing in self.parts.routings if routing.dispatch is node)

    def _concatenate(self, parts: list[fx.Node], axis: int, whole: Tensor, name: str) -> fx.Node:
        """The concatenated parts, in the memory layout of the uncut tensor, which its readers may rely on.

        Names of all steps but the last one end as `JOIN_STEP` says.
        """
        order = sorted(range(whole.dim()), key=lambda d: -whole.stride()[d])
        if order == list(range(whole.dim())):
            return self.parts.call(aten.cat.default, (parts, axis), {}, name)
        laid_out = [
            self.parts.call(aten.permute.default, (part, order), {}, f"{name}_laid_out") for part in parts
        ]
        joined = self.parts.call(aten.cat.default, (laid_out, order.index(axis)), {}, f"{name}_joined")
        back = [order.index(d) for d in range(whole.dim())]
        return self.parts.call(aten.permute.default, (joined, back), {}, name)

    def merged_rows(self, routing: Routing) -> list[Replacement]:
        """Readers of row indices after the range get the indices into the merged rows."""
        readers = [user for user in routing.row.users if user not in self.parts.partitioned]
        if not readers:
            return []
        experts = [self.parts.part(routing.expert, p) for p in range(self.parts.count)]
        rows, counts = zip(
            *(self.parts.rows_and_counts(routing, p) for p in range(self.parts.count)), strict=True
        )
        name = f"{routing.row.name}_merged"
        merged = self.parts.call(lancet.merge_rows.default, (experts, list(rows), list(counts)), {}, name)
        return [(reader, routing.row, merged) for reader in readers]


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
        self._programs: dict[tuple[object, ...], Program] = {}
        in_graph = set(instruction_order(module.graph))
        self._behind = tuple(i for i in program.instructions if i.name not in in_graph)

    def graph(self, ranges: Sequence[PartitionRange]) -> fx.Graph:
        """The graph with these ranges cut, not to be changed. Equal parts share their fake results.

        Raises: as `cut_ranges`.
        """
        key = range_names(ranges)
        if key not in self._graphs:
            first = _longest_start(key, self._graphs)
            graph = copy_of_graph(self.module, self._graphs.get(key[:first]))
            cut_ranges(graph, self.program, ranges[first:], self._values)
            self._graphs[key] = graph
        return self._graphs[key]

    def __call__(self, ranges: Sequence[PartitionRange]) -> Program:
        """The Program with these ranges cut. Instructions outside the graph (the optimizer's step) come last.

        Raises: as `cut_ranges`.
        """
        key = range_names(ranges)
        first = _longest_start(key, self._programs)
        before = self._programs.get(key[:first], self.program)
        times = {name: part for planned in ranges[first:] for name, part in self._priced(planned).items()}
        cut = program_from_graph(self.graph(ranges), self.program.name, unchanged=before, parts=times)
        self._programs[key] = cut
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
        """By name of a part: its milliseconds, and the number of parts."""
        first, last = positions(self.program, planned)
        times: dict[str, tuple[float, int]] = {}
        for instruction in self.program.instructions[first : last + 1]:
            if is_cut(instruction, planned.forms):
                tensors, forms, parts = self.program.tensors, planned.forms, planned.parts
                ms = self.cost(*part_instruction(instruction, tensors, forms, 0, parts))
                times.update((part_name(instruction.name, part), (ms, parts)) for part in range(parts))
        return times


def _longest_start(key: tuple[object, ...], cut: Collection[tuple[object, ...]]) -> int:
    """The number of leading ranges that have been cut together already."""
    return next((n for n in range(len(key), 0, -1) if key[:n] in cut), 0)


def with_joins(order: Sequence[str], present: Sequence[str]) -> list[str]:
    """The order without what is not present; steps of a join that are new stand before their last one."""
    in_order, in_graph = set(order), set(present)
    new = defaultdict(list)
    for name in present:
        if name not in in_order:
            new[JOIN_STEP.sub("", name)].append(name)
    return [step for name in order if name in in_graph for step in (*new[name], name)]
