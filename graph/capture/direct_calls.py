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

from lancet_kernels.graph.capture.captured_graph import module_of
from lancet_kernels.ops.registration import function_of

aten = torch.ops.aten
_SAME_NAMES = """add.Tensor bmm.default cat.default clone.default detach.default div.Scalar div.Tensor
    mean.dim mm.default mul.Scalar mul.Tensor neg.default permute.default pow.Tensor_Scalar reshape.default
    rsqrt.default select.int sub.Tensor sum.dim_IntList t.default transpose.int unsqueeze.default""".split()
_FUNCTIONS: dict[object, Callable] = {aten._unsafe_view.default: torch.reshape} | {
    getattr(getattr(aten, name), overload): getattr(torch, name)
    for name, _, overload in (text.partition(".") for text in _SAME_NAMES)
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
    return module_of(module, graph)
