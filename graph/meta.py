"""This library's entries of `node.meta` in fx graphs, typed; and what follows from them: which nodes of a
joint graph are its forward, and when recomputation and the gathering of sharded parameters may begin. The
entries of torch are read under their own names.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any, Generic, TypeVar, cast

from torch import fx

T = TypeVar("T")


class Entry(Generic[T]):
    """One entry of `meta`. Example: `MILLISECONDS.set(node, 2.5)`; then `MILLISECONDS.get(node) == 2.5`."""

    def __init__(self, key: str) -> None:
        self.key = key

    def on(self, node: fx.Node) -> bool:
        """Does the node have the entry?"""
        return self.key in node.meta

    def get(self, node: fx.Node) -> T | None:
        """The entry; None if the node has none."""
        return node.meta.get(self.key)

    def of(self, node: fx.Node) -> T:
        """The entry of a node that has it."""
        return node.meta[self.key]

    def set(self, node: fx.Node, value: T) -> None:
        """Write the entry."""
        node.meta[self.key] = value

    def drop(self, node: fx.Node) -> None:
        """Remove the entry, if the node has it."""
        node.meta.pop(self.key, None)


MILLISECONDS: Entry[float] = Entry("milliseconds")
"""The time of an instruction that needs no measurement."""
GROUP: Entry[str] = Entry("group")
"""The name of a collective's group, for its costs."""
STANDS_FOR: Entry[str] = Entry("stands_for")
"""The name of the tensor that a node reassembles from its parts."""
KEPT_BYTES: Entry[int] = Entry("kept_bytes")
"""The bytes that the ticket of a fused forward launch, its last result, keeps alive."""
ROWS_BY_EXPERT: Entry[bool] = Entry("rows_by_expert")
"""Are the rows sorted by local expert, rather than by rank?"""
REGION: Entry[int] = Entry("recomputed_region")
"""The number of a recomputed node's checkpointed region (`graph.capture.captured_graph`), in the order in
which the backward reads them."""
UNIT: Entry[tuple[Any, int]] = Entry("gathered_unit")
"""In which pass over the model a node gathers sharded parameters (`schedules.rewrite.gathers`), and the
number of their unit."""
IN_BACKWARD: Entry[bool] = Entry("in_backward")
"""The node belongs to the backward although it depends on no tangent."""
GRADIENTS_OF: Entry[tuple] = Entry("gradients_of")
"""The key of a sum of gradients over the ranks, and the names of its parameters, which other sums may
share."""
WRITTEN_INTO: Entry[str] = Entry("written_into")
"""The name of the tensor into whose storage the node writes its result."""
IN_PLACE: Entry[bool] = Entry("parts_in_place")
"""The node joins parts that are written in place (`schedules.rewrite.apply`)."""
HOLDS_PARTS: Entry[bool] = Entry("holds_parts")
"""The node is only the storage of parts, or a slice of it."""
SAME_CALL: Entry[dict[str, Any]] = Entry("same_call")
"""Shared by nodes that call one op with arguments of equal shapes, as parts of repeated layers do: the cost
of the call (`graph.from_fx`) and the cache key of its result (`schedules.rewrite.cut_parts`), computed
once."""


def forward_nodes(nodes: list[fx.Node]) -> set[fx.Node]:
    """The forward nodes: in a joint graph those that neither depend on a tangent nor are recomputed or
    gathered again; in any other graph all."""
    behind = {
        n
        for n in nodes
        if REGION.on(n) or IN_BACKWARD.on(n) or (n.op == "placeholder" and n.name.startswith("tangents"))
    }
    for node in nodes:
        if any(source in behind for source in node.all_input_nodes):
            behind.add(node)
    return {node for node in nodes if node not in behind}


def forward_first(graph: fx.Graph) -> set[fx.Node]:
    """Move forward nodes in front of the first backward node, also those that only the backward reads, such
    as the transpose of a weight. -> the forward nodes."""
    forward = forward_nodes(list(graph.nodes))
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    first = next((i for i, node in enumerate(nodes) if node not in forward), len(nodes))
    for node in nodes[first:]:
        if node in forward:
            nodes[first].prepend(node)
    return forward


def not_before(nodes: list[fx.Node], forward: Collection[fx.Node]) -> Mapping[fx.Node, fx.Node]:
    """By node that recomputes or gathers, the node that must have run before, without being read by it."""
    return {**recompute_after(nodes, forward), **_gather_after(nodes)}


def _gather_after(nodes: list[fx.Node]) -> Mapping[fx.Node, fx.Node]:
    """By node that gathers a unit, the first node that reads the unit before its own. So two units are whole
    at most in each pass, whatever order is planned."""
    first_reader: dict[tuple[object, int], fx.Node] = {}
    for node in nodes:
        for source in node.all_input_nodes if node.op != "output" and not UNIT.on(node) else ():
            if UNIT.on(source):
                first_reader.setdefault(UNIT.of(source), node)
    # In the order of the first readers.
    before: dict[tuple[object, int], fx.Node] = {}
    for number in {number for number, _ in first_reader}:
        units = [unit for unit in first_reader if unit[0] == number]
        before |= {unit: first_reader[last] for last, unit in pairwise(units)}
    return {
        node: before[unit]
        for node in nodes
        if (unit := UNIT.get(node)) in before
        if before[unit] is not first_reader[unit] and node.target is not operator.getitem
    }


def recompute_after(nodes: list[fx.Node], forward: Collection[fx.Node]) -> Mapping[fx.Node, fx.Node]:
    """By recomputed node, the node that must have run before: the first backward node that reads the region
    before its own. So the activations of two regions are alive at most, whatever order is planned."""
    first_reader: dict[int, fx.Node] = {}
    after: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        region = _region(node)
        if region is not None:
            if region - 1 in first_reader:
                after[node] = first_reader[region - 1]
        elif node not in forward:
            for source in node.all_input_nodes:
                read = _region(source)
                if read is not None:
                    first_reader.setdefault(read, node)
    return after


def _region(node: fx.Node) -> int | None:
    """The region that a node, or the tuple that it is an element of, recomputes; None: none."""
    while node.target is operator.getitem:
        node = cast(fx.Node, node.args[0])
    return REGION.get(node)
