"""The backward of one microbatch and the forward of the next, as one graph: neither reads what the other
computes, so each hides the communication of the other, and no matrix is cut in two.

    microbatches 1 .. M       forward 1 | backward 1 with forward 2 | ... | backward M

Megatron's 1F1B overlap and DualPipe are the same by hand. Routing is that of M separate calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from lancet_kernels.graph.capture.captured_graph import module_of, output_node, state_name
from lancet_kernels.graph.from_fx import program_from_fx
from lancet_kernels.graph.meta import GRADIENTS_OF, IN_BACKWARD, UNIT
from lancet_kernels.graph.program.program import Program


@dataclass
class Pair:
    """A pair as a graph. Its outputs are those of the backward, then those of the forward.

    Attributes:
        backward_inputs, forward_inputs: names of its placeholders, by name of that of the half. What both
            read of parameters and buffers is one placeholder.
        original: by name of a node, its name in its half.
    """

    module: fx.GraphModule
    backward_inputs: dict[str, str]
    forward_inputs: dict[str, str]
    original: dict[str, str]


def pair_of(forward: fx.GraphModule, backward: fx.GraphModule) -> Pair:
    """The pair of the two halves of a joint graph (`split_joint`), the backward first."""
    pair = Pair(module_of(forward, fx.Graph()), {}, {}, {})
    graph = pair.module.graph
    state: dict[str, fx.Node] = {}
    results = []
    halves = (backward, pair.backward_inputs, "earlier"), (forward, pair.forward_inputs, "later")
    for half, inputs, microbatch in halves:
        copies: dict[fx.Node, fx.Node] = {}
        for node in half.graph.find_nodes(op="placeholder"):
            # A joint graph's placeholder of a parameter or buffer; saved, it has the same name.
            if node.name in state:
                copies[node] = state[node.name]
            else:
                copies[node] = graph.node_copy(node)
                copies[node].target = copies[node].name  # both halves may read an input
                if state_name(node) is not None:
                    state[node.name] = copies[node]
            inputs[node.name] = copies[node].name
        for node in half.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copies[node] = graph.node_copy(node, copies.__getitem__)
            pair.original[copies[node].name] = node.name
            # Of one phase, so that they can mix; each half gathers parameters for itself.
            IN_BACKWARD.set(copies[node], True)
            if UNIT.on(node):
                UNIT.set(copies[node], ((microbatch, UNIT.of(node)[0]), UNIT.of(node)[1]))
        results += fx.map_arg(list(output_node(half).args[0]), copies.__getitem__)
    graph.output(results)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.find_nodes(op="placeholder"):
        first.prepend(node)
    graph.lint()
    pair.module.recompile()
    return pair


def program_of_pair(pair: Pair, step: Program) -> Program:
    """The Program of a pair, with the times and bytes of the step's instructions; its gradients are not
    summed."""
    program = program_from_fx(pair.module)
    unsummed = {node.name for node in pair.module.graph.nodes if GRADIENTS_OF.on(node)}
    instructions = []
    for instruction in program.instructions:
        single = step.instructions[step.index[pair.original[instruction.name]]]
        milliseconds = 0.0 if instruction.name in unsummed else single.milliseconds
        link = {"link": single.attributes["link"]} if "link" in single.attributes else {}
        attributes = {**instruction.attributes, **link}
        instructions.append(
            replace(instruction, milliseconds=milliseconds, bytes=single.bytes, attributes=attributes)
        )
    return replace(program, instructions=tuple(instructions))
