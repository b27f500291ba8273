"""Reads and edits captured graphs: what a placeholder stands for, results as fake tensors, copies, and
activation checkpointing. Does not import `capture`, which takes longer to import than torch.

Activation checkpointing becomes instructions of the backward. A trace marks every node inside
`torch.utils.checkpoint` (of either kind, `use_reentrant` or not) with its region and its policy; selective
checkpointing marks some of them to be saved. `insert_recomputation` copies the marked nodes that the backward
reads, and those that the copies read, behind the forward:

    forward   a = f(x); b = g(a); y = h(b)          x is what the region reads, y its result
    backward  a' = f(x); b' = g(a')                 right before the first reader of the region
              dx = ... (dy, a', b')

They are priced, moved and hidden like all other instructions, all-to-alls among them. What is not recomputed:

- a result that the forward reads outside its region, as in torch: it is what the next region starts from
- the routing of an MoE layer (experts, slots and weights of the choices, counts): 12 bytes a choice, against
  a second exchange of counts, for which the host waits
- random numbers, which would be others (torch's checkpoint restores its generator; a plan moves instructions)
- what reads a buffer that the forward changes: its old value is gone

A region is recomputed at the earliest when the backward of the one before has begun
(`graph.meta.recompute_after`), so a plan keeps the memory that checkpointing saves.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import operator
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    TangentAOTInput,
)
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils.checkpoint import CheckpointPolicy

from lancet_kernels.graph.from_fx import draws_random_numbers, facts_of
from lancet_kernels.graph.meta import REGION, SAME_CALL
from lancet_kernels.graph.program import recomputed_name
from lancet_kernels.ops.base import during


def module_of(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module that runs the graph with what `root` has. Its code is generated when it first runs: most
    modules are only planned with."""
    return _LazyGraphModule(root, graph)


def copy_of(joint: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph module, with the names and `meta` of its nodes."""
    return module_of(joint, copy_of_graph(joint))


def copy_of_graph(joint: fx.GraphModule, graph: fx.Graph | None = None) -> fx.Graph:
    """A copy of the graph alone, or of another graph derived from it; it cannot be run."""
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

    torch swaps in other tensors while it traces, and restores name by name in the order of the swaps: a
    module that is registered under two names would keep one of the others.
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
    """Index of the flattened module input that a placeholder stands for; None: not an input."""
    descriptor = node.meta.get("desc")
    return descriptor.idx if isinstance(descriptor, PlainAOTInput) else None


def state_name(node: fx.Node) -> str | None:
    """Name of the parameter or buffer that a placeholder stands for; None: an input or tangent."""
    return getattr(node.meta.get("desc"), "target", None)


@contextlib.contextmanager
def garbage_collection(*, on: bool) -> Iterator[None]:
    """Context with or without garbage collection. Off: graphs are many small objects that stay alive."""
    was_on = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if was_on else gc.disable)()


_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def insert_recomputation(module: fx.GraphModule) -> None:
    """Insert into a traced joint graph the recomputation that torch's marks ask for; remove the marks."""
    graph = module.graph
    # What was traced in the forward, and the inputs; later nodes may also depend on no tangent.
    forward = {n for n in graph.nodes if n.op != "output" and n.meta.get("partitioner_tag") != "is_backward"}
    marked = {n for n in forward if n.meta.get("recompute") in _RECOMPUTED} - _saved(module, forward)
    readers: dict[fx.Node, list[fx.Node]] = {}
    """By region's first reader, the marked nodes that the backward reads of it."""
    first_reader: dict[object, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes if node not in forward else ():
            if source in marked:
                first = first_reader.setdefault(_region(source), node)
                readers.setdefault(first, []).append(source)
    copies: dict[fx.Node, fx.Node] = {}
    for number, (first, read) in enumerate(readers.items()):
        for node in sorted(_with_sources(read, marked)):
            with graph.inserting_before(first):
                copy = graph.node_copy(node, lambda source: copies.get(source, source))
            copy.name = recomputed_name(node.name)
            copy.meta = {**node.meta, "partitioner_tag": "is_backward"}
            REGION.set(copy, number)
            copies[node] = copy
    for node in graph.nodes:
        if node not in forward and not REGION.on(node):
            for source in node.all_input_nodes:
                if source in copies:
                    node.replace_input_with(source, copies[source])
    for node in graph.nodes:
        node.meta.pop("recompute", None)
    graph.lint()
    module.recompile()


def _region(node: fx.Node) -> object:
    return node.meta.get("ac_graph_id")


def _saved(module: fx.GraphModule, forward: set[fx.Node]) -> set[fx.Node]:
    """The nodes that are saved although they are marked."""
    output = module.graph.output_node()
    changed = {d.mutated_input for d in output.meta["desc"] if isinstance(d, InputMutationAOTOutput)}
    saved = set()
    for node in module.graph.nodes:
        is_saved = _is_read_outside(node, forward)
        if node.target is operator.getitem:
            is_saved |= node.args[0] in saved and not _is_read_outside(node.args[0], forward)
        elif node.op == "call_function":
            reads_changed = any(source.meta.get("desc") in changed for source in node.all_input_nodes)
            is_saved |= draws_random_numbers(node) or not facts_of(node).is_recomputed or reads_changed
        if is_saved:
            saved.add(node)
    return saved


def _is_read_outside(node: fx.Node, forward: set[fx.Node]) -> bool:
    """Does the forward read the node, or is it returned, outside its region?"""
    return any(
        user.op == "output" or (user in forward and _region(user) != _region(node)) for user in node.users
    )


def _with_sources(nodes: list[fx.Node], marked: set[fx.Node]) -> set[fx.Node]:
    """The nodes, and all marked ones that they depend on."""
    reached: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += [source for source in node.all_input_nodes if source in marked]
    return reached
