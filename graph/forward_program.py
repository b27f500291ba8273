"""The forward of a model as a Program: the part of its joint graph that its outputs depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from lancet_kernels.graph.capture import Captured, capture, output_node
from lancet_kernels.graph.from_fx import program_from_fx, tensor_names
from lancet_kernels.graph.program import Phase, Program


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
        _storage_of(t, program)
        for i in program.instructions
        if i.phase is not Phase.FORWARD
        for t in i.inputs
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


def _storage_of(tensor: str, program: Program) -> str:
    """The tensor whose storage a view shares."""
    base = program.tensors[tensor].alias_of
    return tensor if base is None else _storage_of(base, program)
