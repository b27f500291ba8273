"""Inserts the optimizer's steps into a joint graph, one for each bucket of gradients.

They stand at its end, where an ordinary loop has them; a schedule moves them, behind the sums of their
gradients and behind whatever still reads their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from lancet_kernels.graph.capture.captured_graph import output_node, state_name
from lancet_kernels.ops.comm.all_reduce import cut_into_buckets
from lancet_kernels.ops.optimizer_step import BucketSteps
from lancet_kernels.schedules.rewrite.apply import GRADIENTS_OF, OPTIMIZER_STEP
from lancet_kernels.schedules.rewrite.buckets import BUCKET_BYTES


@dataclass(frozen=True)
class OptimizerSteps:
    """The optimizer's steps. parameter: gives a parameter of the model by name."""

    steps: BucketSteps
    parameter: Callable[[str], torch.Tensor]


def insert_optimizer_steps(
    module: fx.GraphModule, optimizer: OptimizerSteps, parameter_of_output: Mapping[int, str]
) -> None:
    """Step each parameter that the optimizer trains.

    Args: parameter_of_output: position among the outputs -> parameter (`Captured.parameter_of_gradient`).
    """
    steps, parameter = optimizer.steps, optimizer.parameter
    graph, output = module.graph, output_node(module)
    place = {node: i for i, node in enumerate(graph.nodes)}
    given = {name: n for n in graph.find_nodes(op="placeholder") if (name := state_name(n))}
    gradient_of = {
        name: gradient
        for i, name in parameter_of_output.items()
        if isinstance(gradient := output.args[0][i], fx.Node) and name in given
        if steps.trains(parameter(name))
    }
    in_order = sorted(gradient_of, key=lambda name: place[gradient_of[name]])
    # A name for what is summed together; "" for what no other rank has.
    sums = {name: _sum(gradient_of[name]) for name in in_order}
    apart = [
        (name, torch.uint8, sums[name], 0 if sums[name] else _bytes(gradient_of[name])) for name in in_order
    ]
    for _, names in cut_into_buckets(apart, BUCKET_BYTES):
        arguments = [given[name] for name in names], [gradient_of[name] for name in names]
        bucket = steps.bucket({name: parameter(name) for name in names})
        with graph.inserting_before(output):
            node = graph.call_function(OPTIMIZER_STEP, (steps.number, bucket, steps.kind, *arguments))
        node.meta["val"] = None
        # Gradient and parameter are read, the parameter is written, and states are read and written.
        node.meta["bytes"] = sum(map(_bytes, arguments[0])) * (3 + 2 * steps.states)
    graph.lint()
    module.recompile()


def _sum(gradient: fx.Node) -> str:
    """The sum over the ranks that gives a gradient; "": none does."""
    node = gradient
    while GRADIENTS_OF not in node.meta:
        if len(node.all_input_nodes) != 1 or node.op != "call_function":
            return ""
        node = node.all_input_nodes[0]
    return node.name


def _bytes(node: fx.Node) -> int:
    value = cast(torch.Tensor, node.meta["val"])
    return value.numel() * value.element_size()
