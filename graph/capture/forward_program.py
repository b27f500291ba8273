"""The forward of a model, the part of its joint graph that its outputs depend on: as a Program or a graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

from torch import fx, nn

from lancet_kernels.graph.capture.capture import Captured, capture
from lancet_kernels.graph.capture.captured_graph import fake_mode_of, module_of, output_node, set_value
from lancet_kernels.graph.from_fx import facts_of, program_from_fx, tensor_names
from lancet_kernels.graph.meta import forward_nodes
from lancet_kernels.graph.ops import argument_names
from lancet_kernels.graph.program.forms import WHOLE, Forms
from lancet_kernels.graph.program.program import Phase, Program
from lancet_kernels.graph.rules.rules import Rule


def forward_program(module: nn.Module, inputs: Sequence[object], name: str) -> Program:
    """The forward of `module(*inputs)`, without instructions that only the backward needs. Raises:
    CaptureError."""
    return forward_of(capture(module, inputs), name)


def forward_of(captured: Captured, name: str) -> Program:
    """The forward of a captured module. Attribute `saved` of an instruction: positions of the outputs that
    the backward reads."""
    program = program_from_fx(captured.joint, name)
    results = output_node(captured.joint).args[0][: captured.forward_outputs]
    outputs = tuple(dict.fromkeys(t for node in results for t in tensor_names(node)))
    needed, instructions = set(outputs), []
    for instruction in reversed(program.instructions):
        if instruction.phase is Phase.FORWARD and not needed.isdisjoint(instruction.outputs):
            needed |= {*instruction.inputs, *instruction.mutates}
            instructions.append(instruction)
    saved = {
        program.storage[t] for i in program.instructions if i.phase is not Phase.FORWARD for t in i.inputs
    }
    instructions = [
        replace(i, attributes={**i.attributes, "saved": [p for p, t in enumerate(i.outputs) if t in saved]})
        for i in instructions
    ]
    inputs = tuple(t for t in program.inputs if t in needed)
    named = needed | {t for i in instructions for t in i.outputs}
    tensors = {t: program.tensors[t] for t in program.tensors if t in named}
    return replace(
        program,
        instructions=tuple(reversed(instructions)),
        tensors=tensors,
        inputs=inputs,
        outputs=outputs,
        parameters=tuple(t for t in program.parameters if t in needed),
    )


def forward_graph(captured: Captured) -> fx.GraphModule:
    """The graph of which `forward_of` is the Program: the same names, a tuple of the results as output."""
    results = output_node(captured.joint).args[0][: captured.forward_outputs]
    nodes = list(captured.joint.graph.nodes)
    forward = forward_nodes(nodes)
    needed = {node for node in results if isinstance(node, fx.Node)}
    for node in reversed(nodes):
        if node in needed and node in forward:
            needed.update(node.all_input_nodes)
    # With every element of a tuple: a cut needs the weight of a mean, though only the backward reads it.
    needed |= {n for n in nodes if n.target is operator.getitem and n.args[0] in needed and n in forward}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = dict(node.meta)
    graph.output(tuple(copies.get(node) for node in results))
    return module_of(captured.joint, graph)


def on_part_of_batch(module: fx.GraphModule, forms: Forms, parts: int) -> fx.GraphModule:
    """A forward graph as it would be captured with the first of `parts` equal parts of the batch.

    Args: forms: of the tensors that have the batch in them, by name.
    Raises: RuntimeError or ValueError where an op cannot run with fewer rows.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    changed: set[fx.Node] = set()
    with fake_mode_of(next(node for node in module.graph.nodes if node.op == "placeholder")):
        for node in module.graph.nodes:
            copy = copies[node] = graph.node_copy(node, copies.__getitem__)
            copy.meta = dict(node.meta)
            form = forms.get(node.name, WHOLE)
            shape = list(node.meta["val"].shape) if form.dimension is not None else []
            if form.dimension is not None:
                shape[form.dimension] //= parts
            if node.op == "placeholder" and shape:
                set_value(copy, node.meta["val"].new_empty(shape))
            elif node.op == "call_function" and not changed.isdisjoint(node.all_input_nodes):
                rule = facts_of(node).rule or Rule()
                names = argument_names(node.target)
                copy.args = tuple(rule.arguments_of_slice(copy.args, names, shape or None, sums=False))
                given = fx.map_arg((copy.args, copy.kwargs), lambda source: source.meta["val"])
                set_value(copy, copy.target(*given[0], **given[1]))
            else:
                continue
            changed.add(node)
    return module_of(module, graph)


def runs_graph(root: nn.Module, graph: fx.Graph) -> nn.Module:
    """A module with the parameters, buffers and submodules of `root` that runs the graph, and that can be
    captured: torch's trace of a GraphModule takes the module's graph for its own."""
    forward = type(fx.GraphModule(root, graph)).forward
    module = type("GraphForward", (nn.Module,), {"forward": forward})()
    module._parameters, module._buffers, module._modules = root._parameters, root._buffers, root._modules
    module._non_persistent_buffers_set = root._non_persistent_buffers_set
    return module
