"""Gradient all-reduces of replicated parameters as instructions of the graph, several gradients to a bucket.

Buckets follow the order in which the backward makes the gradients, so each is complete early; a weight
gradient that is scheduled later takes its bucket along.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping

import torch
from torch import fx

from lancet_kernels.graph.capture import fake_mode_of, output_node, set_value

BUCKET_BYTES = 1 << 20


def insert_all_reduces(
    module: fx.GraphModule,
    parameter_of_output: Mapping[int, str],
    expert_names: Collection[str],
    group: str,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[str]:
    """Put `lancet.all_reduce_bucket` between the replicated gradients of a joint graph and its outputs.

    Args:
        parameter_of_output: position among the outputs -> parameter (`Captured.parameter_of_gradient`).
        expert_names: parameters that each rank has of its own. bucket_bytes: a bucket closes when it has
        that many.
    Returns: names of the new instructions.
    """
    graph, output = module.graph, output_node(module)
    results = list(output.args[0])
    place = {node: i for i, node in enumerate(graph.nodes)}
    replicated = [
        i
        for i, name in parameter_of_output.items()
        if name not in expert_names and isinstance(results[i], fx.Node)
    ]
    buckets: list[list[int]] = []
    size, dtype = bucket_bytes, None
    for i in sorted(replicated, key=lambda i: place[results[i]]):
        value = results[i].meta["val"]
        if size >= bucket_bytes or value.dtype != dtype:
            buckets.append([])
            size, dtype = 0, value.dtype
        buckets[-1].append(i)
        size += value.numel() * value.element_size()
    names = []
    for bucket in buckets:
        gradients = [results[i] for i in bucket]
        names.append(_insert(graph, gradients, group, bucket, results, place))
    output.args = (results,)
    graph.lint()
    module.recompile()
    return names


def _insert(
    graph: fx.Graph,
    gradients: list[fx.Node],
    group: str,
    bucket: list[int],
    results: list[fx.Node],
    place: Mapping[fx.Node, int],
) -> str:
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
    return node.name
