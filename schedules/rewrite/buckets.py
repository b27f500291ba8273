"""Inserts gradient all-reduces into a joint graph, in buckets of several gradients, and their division.

Buckets follow the order in which the backward computes the gradients, so each is complete early; if a weight
gradient is scheduled later, its bucket is, too.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.captured_graph import (
    fake_mode_of,
    is_gradient_of_input,
    is_tangent,
    output_node,
    set_value,
)
from lancet_kernels.ops.comm.all_reduce import cut_into_buckets
from lancet_kernels.schedules.rewrite.apply import GRADIENTS_OF

BUCKET_BYTES = 1 << 20


def insert_all_reduces(
    module: fx.GraphModule,
    parameter_of_output: Mapping[int, str],
    group_of_parameter: Mapping[str, str],
    replica_group: str = "",
    bucket_bytes: int = BUCKET_BYTES,
) -> list[str]:
    """Put `lancet.all_reduce_bucket` between the gradients of a joint graph and its outputs.

    Args:
        parameter_of_output: position among the outputs -> parameter (`Captured.parameter_of_gradient`).
        group_of_parameter: parameter -> the group over which its gradient is summed; "": it is not summed.
        replica_group: the replica group, whose collectives have costs of their own (group "replica").
        bucket_bytes: a bucket is closed once it has this many bytes.
    Returns: names of the new instructions.
    Raises: UserError for a sparse gradient.
    """
    graph, output = module.graph, output_node(module)
    results = list(output.args[0])
    place = {node: i for i, node in enumerate(graph.nodes)}
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

    in_order = sorted(summed, key=lambda i: place[results[i]])
    names = []
    for group, bucket in cut_into_buckets(map(finished, in_order), bucket_bytes):
        node = _insert(graph, group, bucket, results, place)
        node.meta[GRADIENTS_OF] = tuple(parameter_of_output[i] for i in bucket)
        if group == replica_group:
            node.meta["group"] = "replica"
        names.append(node.name)
    output.args = (results,)
    graph.lint()
    module.recompile()
    return names


def divide_gradients(module: fx.GraphModule, divide_by: int) -> None:
    """Divide the gradients of all parameters of a joint graph: the backward is linear in the gradients of its
    results, which are mostly one number, so these are divided. Gradients of inputs stay as they are."""
    if divide_by == 1:
        return
    graph, output = module.graph, output_node(module)
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="placeholder"):
        if is_tangent(node) and node.users:
            users = sorted(node.users, key=place.__getitem__)
            scaled = _times(graph, node, 1.0 / divide_by, users[0])
            for user in users:
                user.replace_input_with(node, scaled)
    results = list(output.args[0])
    for i, descriptor in enumerate(output.meta["desc"]):
        if is_gradient_of_input(descriptor) and isinstance(results[i], fx.Node):
            results[i] = _times(graph, results[i], float(divide_by), output)
    output.args = (results,)
    graph.lint()
    module.recompile()


def _times(graph: fx.Graph, node: fx.Node, factor: float, before: fx.Node) -> fx.Node:
    with graph.inserting_before(before), fake_mode_of(node):
        scaled = graph.call_function(torch.ops.aten.mul.Tensor, (node, factor))
        set_value(scaled, node.meta["val"] * factor)
    return scaled


def buckets_in_order(
    module: fx.GraphModule, parameter_of_output: Mapping[int, str]
) -> list[tuple[str, list[str]]]:
    """Group and parameters of each bucket of a joint graph, in the order in which it sums them.

    Args: parameter_of_output: as of `insert_all_reduces`.
    """
    results = output_node(module).args[0]
    name_of = {results[i].args: name for i, name in parameter_of_output.items() if _is_sum(results[i])}
    return [
        (node.args[1], [name_of[node, k] for k in range(len(node.args[0]))])
        for node in module.graph.nodes
        if _is_bucket(node)
    ]


def _is_sum(result: object) -> bool:
    return isinstance(result, fx.Node) and result.target is operator.getitem and _is_bucket(result.args[0])


def _is_bucket(node: fx.Node) -> bool:
    return node.target is torch.ops.lancet.all_reduce_bucket.default


def _insert(
    graph: fx.Graph, group: str, bucket: list[int], results: list[fx.Node], place: Mapping[fx.Node, int]
) -> fx.Node:
    """Insert the all-reduce of a bucket; its results replace the gradients among the outputs."""
    gradients = [results[i] for i in bucket]
    last = max(gradients, key=place.__getitem__)
    with graph.inserting_after(last):
        node = graph.call_function(torch.ops.lancet.all_reduce_bucket.default, (gradients, group))
    with fake_mode_of(last):
        set_value(node, [torch.empty_like(gradient.meta["val"]) for gradient in gradients])
    cursor = node
    for k, i in enumerate(bucket):
        with graph.inserting_after(cursor):
            cursor = graph.call_function(operator.getitem, (node, k))
        set_value(cursor, node.meta["val"][k])
        results[i] = cursor
    return node
