"""Partitions a range of an fx graph: replaces its instructions by those of the parts.

Lancet, section 5 and figures 5(c) and 8. The range [dispatch, all_to_all, ..., next layer's attention], cut
into k = 2 parts, becomes

    dispatch_0 dispatch_1 all_to_all_0 ...  (in the requested order), and one node that reassembles the parts
    of a tensor wherever an instruction outside the parts reads it.

The form of a tensor (`graph.program.forms`) says which slice of it a part has; the rule of an op
(`graph.rules.rules`) says which of its arguments differ between parts. After the gate, rows are irregular:
each part has its own counts, its own exchange of counts and its own rows.

Contract:

1. The order has every instruction of the range once per part, and once if it is not cut.
2. The parts stand in that order behind the range; what is not cut moves between them.
3. The summands of a partial tensor are added right behind the last one: their memory is freed early.
4. Readers outside the parts read one node that reassembles the tensor; joins are marked for `in_place`.
5. The original instructions are gone.
6. If a range cannot be cut, CutError says why, and the graph is unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise

from torch import fx

from lancet_kernels.graph.from_fx import tensor_names, with_elements
from lancet_kernels.graph.program.forms import PARTIAL, Forms, any_made_in_parts
from lancet_kernels.schedules.rewrite.cut_parts import CutError, Parts, Routing, Values, refuse, rule_of
from lancet_kernels.schedules.rewrite.cut_wholes import Reassembly
from lancet_kernels.schedules.rewrite.in_place import mark_join

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
        values: cache of fake results, only for a graph that will not run: nodes then share their
            `meta["val"]`, so torch believes that they share storage. None: each node gets its own.
        empty_parts: the last parts may have no elements: a batch that is smaller than the one that was
            planned is cut into as many parts, because its collectives must be those of the plan.
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
        before = list(self.graph.nodes)
        try:
            with self.graph.inserting_before(end):
                for node, part in ordered:  # 2
                    if part is None:
                        self._move(node, end)
                    else:
                        self.parts.copy(node, part)
                        if part + 1 == count:
                            self._add_summands(node)  # 3
                rows = {routing.row: routing for routing in self.parts.routings}.values()
                replacements = [r for routing in rows for r in self.reassembly.merged_rows(routing)]
                replacements += [r for node in self.in_parts for r in self.reassembly.replacements(node)]
        except (RuntimeError, ValueError, IndexError) as error:
            self._restore(before)  # 6
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
        """Add the summands of a node, if it has any."""
        for element in with_elements(node):
            if self.parts.form(element) == PARTIAL and element.users and tensor_names(element):
                self.reassembly.whole(element)
