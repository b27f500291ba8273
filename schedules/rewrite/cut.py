"""Partitions a range of an fx graph: replaces its instructions by those of the parts.

Lancet, section 5 and figures 5(c) and 8. The range [dispatch, all_to_all, ..., next layer's attention], cut
into k = 2 parts, becomes

    dispatch_0 dispatch_1 all_to_all_0 ...  (in the requested order), and one node that reassembles the parts
    of a tensor wherever an instruction outside the parts reads it.

The form of a tensor (`graph.program.forms`) says which slice of it a part has; the rule of an op
(`graph.rules.rules`) says which of its arguments differ between parts. After the gate, rows are irregular:
each part has its own counts, its own exchange of counts and its own rows. If a range cannot be cut,
`CutError` is raised and the graph is unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from lancet_kernels.graph.program.forms import PARTIAL, Forms, any_made_in_parts
from lancet_kernels.graph.program.from_fx import is_instruction, tensor_names, with_elements
from lancet_kernels.schedules.rewrite.cut_nodes import CutError, Routing, refuse, rule_of
from lancet_kernels.schedules.rewrite.cut_parts import Parts, Values
from lancet_kernels.schedules.rewrite.cut_wholes import Reassembly
from lancet_kernels.schedules.rewrite.in_place import mark_join


@dataclass(frozen=True)
class RangeToCut:
    """The instructions to cut (names, in any order), the number of parts, and the forms of all their tensors
    that are not whole.

    empty_parts: the last parts may have no elements: a batch that is smaller than the one that was planned
    is cut into as many parts, because its collectives must be those of the plan.
    """

    instructions: tuple[str, ...]
    parts: int
    forms: Forms
    empty_parts: bool = False


def cut_range(
    graph: fx.Graph,
    cut: RangeToCut,
    order: Sequence[tuple[str, int | None]] | None = None,
    values: Values | None = None,
) -> list[str]:
    """Replace the instructions of a range by those of its parts.

    Args:
        order: (instruction, part) in execution order; part None for an instruction that is not cut. Default:
            all parts of an instruction, then the next instruction.
        values: cache of fake results, only for a graph that will not run: nodes then share their
            `meta["val"]`, so torch believes that they share storage. None: each node gets its own.
    Returns: names of the new instruction nodes, in order.
    Raises: CutError.
    """
    before = {node.name for node in graph.nodes}
    _Cutter(graph, cut, values).run(order)
    return [node.name for node in graph.nodes if node.name not in before and is_instruction(node)]


class _Cutter:
    """Cuts one range.

    Attributes: inside: the nodes of the range. in_parts: those that run part by part. routing_nodes: counts
        and rows of the whole batch, which each part computes for itself.
    """

    def __init__(self, graph: fx.Graph, cut: RangeToCut, values: Values | None) -> None:
        self.graph = graph
        names = set(cut.instructions)
        self.inside = [node for node in graph.nodes if node.name in names]
        if len(self.inside) != len(names) or not names:
            raise refuse(f"{len(names) - len(self.inside)} unknown instructions", "instructions of the graph")
        dispatches = [node for node in self.inside if rule_of(node).row_argument is not None]
        routings = [Routing.of(node) for node in dispatches]
        self.routing_nodes = [node for node in self.inside if rule_of(node).routing]
        self.in_parts = [
            node
            for node in self.inside
            if node not in self.routing_nodes and any_made_in_parts(cut.forms, tensor_names(node))
        ]
        self.parts = Parts(
            graph,
            self.in_parts,
            cut.forms,
            cut.parts,
            routings,
            values,
            lambda node: self.reassembly.whole(node),
            cut.empty_parts,
        )
        self.reassembly = Reassembly(self.parts)

    def run(self, order: Sequence[tuple[str, int | None]] | None) -> None:
        """Insert the parts in order, redirect the readers of cut tensors, erase the original nodes."""
        nodes = {node.name: node for node in self.inside if node not in self.routing_nodes}
        in_parts = set(self.in_parts)
        if order is None:
            order = [
                (n.name, p)
                for n in self.inside
                for p in (range(self.parts.count) if n in in_parts else (None,))
            ]
        order = [(name, part) for name, part in order if name in nodes]
        expected: list[tuple[str, int | None]] = [
            (n.name, p) for n in nodes.values() if n in in_parts for p in range(self.parts.count)
        ]
        expected += [(n.name, None) for n in nodes.values() if n not in in_parts]
        if Counter(order) != Counter(expected):
            raise refuse("an order that is not every instruction once per part", "all of them")
        end = with_elements(self.inside[-1])[-1].next
        before = list(self.graph.nodes)
        try:
            with self.graph.inserting_before(end):
                for name, part in order:
                    if part is None:
                        self._move(nodes[name], end)
                    else:
                        self.parts.copy(nodes[name], part)
                        if part + 1 == self.parts.count:
                            self._add_summands(nodes[name])
                rows = {routing.row: routing for routing in self.parts.routings}.values()
                replacements = [r for routing in rows for r in self.reassembly.merged_rows(routing)]
                replacements += [r for node in self.in_parts for r in self.reassembly.replacements(node)]
        except (RuntimeError, ValueError, IndexError) as error:
            self._restore(before)
            if isinstance(error, CutError):
                raise
            reason = str(error).splitlines()[0]
            raise refuse(f"parts that do not fit together: {reason}", "axes that the rules allow") from error
        for reader, old, new in replacements:
            reader.replace_input_with(old, new)
        for node in reversed(self.in_parts):
            for element in reversed(with_elements(node)):
                self.graph.erase_node(element)
        for node in self.routing_nodes:
            end.prepend(node)
        for node in (*reversed(self.routing_nodes), *reversed(self.reassembly.wholes.values())):
            if not node.users:
                self.graph.erase_node(node)
        for whole in self.reassembly.wholes.values():
            if whole.users:
                mark_join(whole)

    def _restore(self, before: list[fx.Node]) -> None:
        """Erase all nodes that were inserted, and put the others back into their order."""
        original = set(before)
        for node in reversed(self.graph.nodes):
            if node not in original:
                self.graph.erase_node(node)
        for node, follower in pairwise(before):
            node.append(follower)

    def _move(self, node: fx.Node, end: fx.Node) -> None:
        """Move an instruction that is not cut behind the parts so far and the whole tensors that it reads."""
        for source in node.all_input_nodes:
            if source in self.parts.partitioned:
                self.reassembly.whole(source)
            if source in self.routing_nodes:
                raise refuse(f"{node.name}, which is not cut but reads {source.name}", "parts of it")
        for element in with_elements(node):
            end.prepend(element)

    def _add_summands(self, node: fx.Node) -> None:
        """Add the summands right after the last one, so that their memory is freed early."""
        for element in with_elements(node):
            if self.parts.form(element) == PARTIAL and element.users and tensor_names(element):
                self.reassembly.whole(element)
