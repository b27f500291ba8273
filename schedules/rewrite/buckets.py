"""Inserts gradient all-reduces into a joint graph, in buckets of several gradients, and their division.

Buckets follow the order in which the backward computes the gradients, so each is complete early; if a weight
gradient is scheduled later, its bucket is, too.

Also how a pass writes nodes, with their fake results: `call_op` for an op, `Inserter` for a collective.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.captured_graph import (
    fake_mode_of,
    is_gradient_of_input,
    is_tangent,
    set_value,
)
from lancet_kernels.graph.meta import GRADIENTS_OF, GROUP
from lancet_kernels.ops.comm.collectives import cut_into_buckets
from lancet_kernels.ops.comm.link_group import link_group, plain_group

aten = torch.ops.aten
ALL_REDUCE = torch.ops._c10d_functional.all_reduce_coalesced.default
BUCKET_BYTES, LARGEST_BUCKET_BYTES = 1 << 20, 16 << 20
"""With fewer bytes, a message uses the wire badly; what is summed last is exposed."""


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
            GROUP.set(node, name)
        if gradients_of:
            GRADIENTS_OF.set(node, tuple(gradients_of))
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


def bucket_bytes_of(total: int) -> int:
    """The size of buckets for so many bytes of gradients: about 32 buckets, of 1 to 16 MiB.

    Simulated for half of `gpt2-s-moe` on three clusters, 1, 4 and 16 MiB were within 0.8 % of each other, and
    64 MiB was 3 % slower (`docs/reference/results.md`, 2026-11-24).
    """
    return min(max(total // 32, BUCKET_BYTES), LARGEST_BUCKET_BYTES)


def insert_all_reduces(
    module: fx.GraphModule,
    parameter_of_output: Mapping[int, str],
    group_of_parameter: Mapping[str, str],
    replica_group: str = "",
) -> None:
    """Sum the gradients of a joint graph over the ranks, in buckets (`bucket_bytes_of`).

    Args:
        parameter_of_output: position among the outputs -> parameter (`Captured.parameter_of_gradient`).
        group_of_parameter: parameter -> the group over which its gradient is summed; "": it is not summed.
        replica_group: the replica group, whose collectives have costs of their own (group "replica").
    Raises: UserError for a sparse gradient.
    """
    graph, output = module.graph, module.graph.output_node()
    results = list(output.args[0])
    summed = [
        i
        for i, name in parameter_of_output.items()
        if group_of_parameter[name] and isinstance(results[i], fx.Node)
    ]

    def finished(i: int) -> tuple[int, torch.dtype, str, int]:
        value = results[i].meta["val"]
        if value.layout is not torch.strided:
            raise UserError(
                f"gradient of {parameter_of_output[i]}",
                got=f"a tensor of layout {value.layout}",
                expected="dense gradients, which are summed over the ranks",
                do="build the nn.Embedding with sparse=False",
            )
        group = group_of_parameter[parameter_of_output[i]]
        return i, value.dtype, group, value.numel() * value.element_size()

    inserter = Inserter(graph, {replica_group: "replica"})
    gradients = [finished(i) for i in sorted(summed, key=results.__getitem__)]
    bucket_bytes = bucket_bytes_of(sum(size for *_, size in gradients))
    for group, bucket in cut_into_buckets(gradients, bucket_bytes):
        summands, parameters = [results[i] for i in bucket], [parameter_of_output[i] for i in bucket]
        last = max(summands)
        with graph.inserting_before(last.next):
            start = inserter.start(ALL_REDUCE, summands, "sum", group=group, gradients_of=parameters)
            for k, i in enumerate(bucket):
                results[i] = inserter.arrived(inserter.call(operator.getitem, start, k))
    output.args = (results,)
    graph.lint()
    module.recompile()


def divide_gradients(module: fx.GraphModule, divide_by: int) -> None:
    """Divide the gradients of all parameters of a joint graph, by dividing those of its results, mostly one
    number: the backward is linear. Gradients of inputs stay as they are."""
    if divide_by == 1:
        return
    graph, output = module.graph, module.graph.output_node()
    for node in graph.find_nodes(op="placeholder"):
        if is_tangent(node) and node.users:
            users = sorted(node.users)
            with graph.inserting_before(users[0]):
                scaled = call_op(graph, torch.ops.aten.mul.Tensor, node, 1.0 / divide_by)
            for user in users:
                user.replace_input_with(node, scaled)
    results = list(output.args[0])
    for i, descriptor in enumerate(output.meta["desc"]):
        if is_gradient_of_input(descriptor) and isinstance(results[i], fx.Node):
            with graph.inserting_before(output):
                results[i] = call_op(graph, torch.ops.aten.mul.Tensor, results[i], float(divide_by))
    output.args = (results,)
    graph.lint()
    module.recompile()


def buckets_in_order(module: fx.GraphModule) -> list[tuple[str, list[str]]]:
    """Group and parameters of each bucket of a joint graph, in the order in which it sums them."""
    return [
        (plain_group(node.args[-1]), list(GRADIENTS_OF.of(node)))
        for node in module.graph.nodes
        if node.target is ALL_REDUCE and GRADIENTS_OF.on(node)
    ]
