"""A graph to run, with calls that cost the host less than those of a traced graph:

    torch.ops.aten.t.default(w)              torch.t(w)
    torch.ops.lancet.combine.default(...)    the op's function itself

An op by its overload goes through a boxed call, 2 to 3 us where torch's own function takes 1; an op of this
library goes twice through the dispatcher and has its results checked, 15 us (`ops.registration`). A planned
step calls a thousand of them. Nothing may watch what runs: gradients are off, tensors are real.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from lancet_kernels.ops.registration import function_of

aten = torch.ops.aten
_FUNCTIONS: dict[object, Callable] = {
    aten.add.Tensor: torch.add,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.detach.default: torch.detach,
    aten.div.Scalar: torch.div,
    aten.div.Tensor: torch.div,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mul.Scalar: torch.mul,
    aten.mul.Tensor: torch.mul,
    aten.neg.default: torch.neg,
    aten.permute.default: torch.permute,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.reshape.default: torch.reshape,
    aten.rsqrt.default: torch.rsqrt,
    aten.select.int: torch.select,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten._unsafe_view.default: torch.reshape,
}
"""Functions of torch that take the arguments of an op as they stand in a graph."""
_METHODS = {aten.expand.default: "expand"}


def with_direct_calls(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph, to be run without gradients on plain tensors; shares everything with `module`."""
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _METHODS:
            node.op, node.target = "call_method", _METHODS[node.target]
        else:
            node.target = _FUNCTIONS.get(node.target) or function_of(node.target) or node.target
    return fx.GraphModule(module, graph)
