"""Adds the optimizer's step to a Program, because captured graphs end with the gradients."""

from __future__ import annotations

from dataclasses import replace

from lancet_kernels.graph.capture import Captured
from lancet_kernels.graph.captured_graph import output_node, state_name
from lancet_kernels.graph.from_fx import tensor_names
from lancet_kernels.graph.program import Instruction, Phase, Program, TensorSpec


def with_sgd(program: Program, captured: Captured) -> Program:
    """The program of a captured step with SGD with momentum: one instruction per parameter with a gradient,
    which reads three tensors and writes two."""
    gradients = _gradients(captured)
    tensors = dict(program.tensors)
    steps, momenta = [], []
    for weight, gradient in gradients.items():
        spec = tensors[weight]
        momentum = TensorSpec(f"{weight}.momentum", spec.shape)
        updated = replace(spec, name=f"{weight}.updated", bytes=0, alias_of=weight)
        tensors |= {momentum.name: momentum, updated.name: updated}
        momenta.append(momentum.name)
        steps.append(
            Instruction(
                f"{weight}.sgd",
                "lancet.sgd",
                (gradient, weight, momentum.name),
                (updated.name,),
                phase=Phase.OPTIMIZER,
                bytes=float(3 * spec.content_bytes + 2 * momentum.content_bytes),
                mutates=(weight, momentum.name),
            )
        )
    return replace(
        program,
        instructions=(*program.instructions, *steps),
        tensors=tensors,
        inputs=(*program.inputs, *momenta),
        outputs=(*program.outputs, *(f"{weight}.updated" for weight in gradients)),
    )


def _gradients(captured: Captured) -> dict[str, str]:
    """Tensor of a parameter -> tensor of its gradient (after the all-reduce, if the step has one)."""
    graph = captured.joint.graph
    tensor_of = {state_name(n): n.name for n in graph.nodes if n.op == "placeholder" and state_name(n)}
    results = output_node(captured.joint).args[0]
    return {
        tensor_of[name]: tensor_names(results[i])[0]
        for i, name in captured.parameter_of_gradient().items()
        if results[i] is not None
    }
