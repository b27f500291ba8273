"""Reads and edits captured graphs: what a placeholder stands for, results as fake tensors, copies.

Needs nothing of what captures them, whose import alone takes longer than that of torch.

`without_garbage_collection`, because a graph is many small objects that stay alive.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, TangentAOTInput
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from lancet_kernels.graph.meta import SAME_CALL
from lancet_kernels.ops.base import during


def module_of(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module that runs the graph with what `root` has. Its code is generated when it first runs: most
    modules are only planned with."""
    return _LazyGraphModule(root, graph)


def copy_of(joint: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph module, with the names and `meta` of its nodes."""
    return module_of(joint, copy_of_graph(joint))


def copy_of_graph(joint: fx.GraphModule, graph: fx.Graph | None = None) -> fx.Graph:
    """A copy of the graph alone, or of another one that was made of it, which cannot be run."""
    with warnings.catch_warnings():
        # A warning of torch about copying its own data structures; users cannot avoid it.
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        graph = copy.deepcopy(joint.graph if graph is None else graph)
    graph.owning_module = joint
    return graph


@contextlib.contextmanager
def fake_mode_of(node: fx.Node) -> Iterator[None]:
    """A context in which ops can be called on the `meta["val"]`s of the node's graph, to get fake results."""
    value = node.meta["val"]
    with (value[0] if isinstance(value, (tuple, list)) else value).fake_mode, during(expects_sizes=True):
        yield


def set_value(node: fx.Node, value: object) -> None:
    """Set the fake result of a new node, as tracing would have."""
    SAME_CALL.drop(node)
    node.meta["val"] = value
    if isinstance(value, Tensor):
        # Without it, torch's partitioner assumes that the result is a tuple.
        node.meta["tensor_meta"] = _extract_tensor_metadata(value)


@contextlib.contextmanager
def tensors_restored(module: nn.Module, buffers: bool = True) -> Iterator[None]:
    """Afterwards every submodule has the parameters (and buffers) that it had.

    torch runs modules with other tensors in their place, and puts these back name by name in the order in
    which it took them out: a module that is registered under two names would keep one of the others.
    """
    states: list[dict[str, Any]] = []
    for one in module.modules():
        states += (one._parameters, one._buffers) if buffers else (one._parameters,)
    before = [dict(state) for state in states]
    try:
        yield
    finally:
        for state, tensors in zip(states, before, strict=True):
            state.update(tensors)


def with_any_strides(target: object) -> object:
    """The op to run in place of a traced one: a view that copies where real strides forbid a view.

    Strides of fake results can be wrong: those of a batch norm of a transposed tensor are, in torch 2.13.
    """
    return torch.ops.aten.reshape.default if target is torch.ops.aten.view.default else target


def is_tangent(node: fx.Node) -> bool:
    """Is this placeholder of a joint graph the gradient of an output?"""
    return isinstance(node.meta.get("desc"), TangentAOTInput)


def is_gradient_of_input(descriptor: object) -> bool:
    """Does this descriptor of an output of a joint graph say that it is the gradient of an input?"""
    return isinstance(descriptor, GradAOTOutput) and isinstance(descriptor.grad_of, PlainAOTInput)


def input_position(node: fx.Node) -> int | None:
    """Index of the module input that a placeholder stands for, in the flattened inputs; None: not an
    input."""
    descriptor = node.meta.get("desc")
    return descriptor.idx if isinstance(descriptor, PlainAOTInput) else None


def state_name(node: fx.Node) -> str | None:
    """Name of the parameter or buffer that a placeholder of a joint graph stands for; None: an input or
    tangent."""
    return getattr(node.meta.get("desc"), "target", None)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Context without garbage collection: graphs and Programs are many small objects that stay alive
    anyway."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
