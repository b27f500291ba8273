"""Writes new nodes into a captured graph, with their fake results: ops, and collectives of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lancet_kernels.graph.capture.captured_graph import fake_mode_of, set_value
from lancet_kernels.ops.comm.link_group import link_group
from lancet_kernels.schedules.rewrite.apply import GRADIENTS_OF

aten = torch.ops.aten


def call_op(graph: fx.Graph, target: Any, *args: object, **kwargs: object) -> fx.Node:
    """A new node at the graph's place of insertion that calls an op, with its fake result."""
    node = graph.call_function(target, args, kwargs)
    values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with fake_mode_of(node.all_input_nodes[0]):
        set_value(node, target(*values, **named))
    return node


class Inserter:
    """Writes nodes at the graph's place of insertion.

    cost_group: by name of a group, the one under which its communication has costs; "world": by default.
    marks: entries of `meta` of new nodes.
    """

    def __init__(self, graph: fx.Graph, cost_group: Mapping[str, str]) -> None:
        self.graph, self._cost_group = graph, cost_group
        self.marks: dict[str, object] = {}

    def call(self, target: Any, *args: object, **kwargs: object) -> fx.Node:
        """`call_op`, with the marks."""
        node = call_op(self.graph, target, *args, **kwargs)
        node.meta.update(self.marks)
        return node

    def start(
        self, target: Any, tensors: Any, *args: object, group: str, gradients_of: Sequence[str] = ()
    ) -> fx.Node:
        """The start of a functional collective. Args: gradients_of: what identifies a sum of gradients."""
        node = self.call(target, tensors, *args, link_group(group))
        if (name := self._cost_group.get(group, "world")) != "world":
            node.meta["group"] = name
        if gradients_of:
            node.meta[GRADIENTS_OF] = tuple(gradients_of)
        return node

    def arrived(self, node: fx.Node) -> fx.Node:
        """The result of a collective, after waiting for it."""
        return self.call(torch.ops._c10d_functional.wait_tensor.default, node)

    def shaped(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        """The same numbers in another shape; a copy where they do not lie one behind the other."""
        value = node.meta["val"]
        if list(value.shape) == list(shape):
            return node
        if not value.is_contiguous():
            node = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self.call(aten.view.default, node, list(shape))
