"""What is one part of an instruction that is cut into k? Its name, shapes, work and traffic.

The overhead of partitioning is real here: each part pays its own launch, and reads whatever is not cut (a
weight) in full. An irregular part counts as 1/k of the rows (Lancet, section 3): as many as it has if tokens
are spread evenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lancet_kernels.graph.program import Instruction, Kind, TensorSpec
from lancet_kernels.graph.rules import CARRIED, IRREGULAR, PARTIAL, WHOLE, rule_for

Axes = Mapping[str, int]


def part_name(name: str, part: int, parts: int) -> str:
    """Name of one part. Example: `part_name("x", 0, 4)` is `x[1/4]`."""
    return f"{name}[{part + 1}/{parts}]"


def is_cut(instruction: Instruction, axes: Axes) -> bool:
    """Does the instruction run part by part? One with all operands whole runs once."""
    return any(axes.get(t, WHOLE) != WHOLE for t in (*instruction.inputs, *instruction.outputs))


def part_tensor(
    spec: TensorSpec, axis: int, part: int, parts: int, row_dimension: int | None = None
) -> TensorSpec:
    """One part of a tensor. Example: x (8, 4) cut along 0 into 2: `x[1/2]` (4, 4), half the bytes."""
    name = part_name(spec.name, part, parts)
    shape = list(spec.shape)
    if axis == IRREGULAR and row_dimension is not None:
        axis = row_dimension
    if axis >= 0:
        shape[axis] = -(-shape[axis] // parts)
        return TensorSpec(name, tuple(shape), spec.dtype, -(-spec.bytes // parts), spec.alias_of)
    return TensorSpec(name, tuple(shape), spec.dtype, spec.bytes, spec.alias_of)


def can_be_cut(tensors: Mapping[str, TensorSpec], axes: Axes, parts: int) -> bool:
    """Do the parts of all tensors line up? Parts are whole units of the shortest dimension that is cut, so
    it must divide the others. Equal parts line up through views too; uneven ones only where all tensors
    have the same size along their axes (rows)."""
    sizes = {tensors[t].shape[a] for t, a in axes.items() if a >= 0}
    units = min(sizes, default=0)
    if units < parts or any(s % units for s in sizes):
        return False
    return units % parts == 0 or len(sizes) == 1


def part_instruction(
    instruction: Instruction, tensors: Mapping[str, TensorSpec], axes: Axes, part: int, parts: int
) -> tuple[Instruction, dict[str, TensorSpec]]:
    """Part `part` (from 0) of an instruction, and the specs of all operands it names.

    Attributes for costs to derive the part's: how inputs and outputs are cut (`axes`), their shapes as a
    whole (`whole_shapes`), and a measured time of the whole (`whole_milliseconds`).
    """
    rule = rule_for(instruction)
    rows = rule.row_dimensions(instruction, tensors) if rule else {}
    operands = {t: axes.get(t, WHOLE) for t in (*instruction.inputs, *instruction.outputs)}
    specs = {
        t: tensors[t] if a == WHOLE else part_tensor(tensors[t], a, part, parts, rows.get(t))
        for t, a in operands.items()
    }
    names = {t: spec.name for t, spec in specs.items()}
    inputs = [names[t] for t in instruction.inputs]
    for source, target in rule.carried(instruction, tensors) if rule else ():
        if part and operands[instruction.outputs[target]] == CARRIED:
            inputs[source] = part_name(instruction.outputs[target], part - 1, parts)
            specs[f"{instruction.inputs[source]} carried"] = part_tensor(
                tensors[instruction.outputs[target]], CARRIED, part - 1, parts
            )
    attributes = {
        **instruction.attributes,
        "part": part,
        "parts": parts,
        "axes": [operands[t] for t in (*instruction.inputs, *instruction.outputs)],
        "whole_shapes": [tensors[t].shape for t in (*instruction.inputs, *instruction.outputs)],
    }
    if instruction.milliseconds is not None:
        attributes["whole_milliseconds"] = instruction.milliseconds
    made = replace(
        instruction,
        name=part_name(instruction.name, part, parts),
        inputs=tuple(inputs),
        outputs=tuple(names[t] for t in instruction.outputs),
        flops=instruction.flops / parts,
        bytes=_part_bytes(instruction, tensors, specs, parts),
        milliseconds=None,
        attributes=attributes,
    )
    return made, {spec.name: spec for spec in specs.values()}


def _part_bytes(
    instruction: Instruction,
    tensors: Mapping[str, TensorSpec],
    specs: Mapping[str, TensorSpec],
    parts: int,
) -> float:
    """Traffic of a part: proportional to its operands, of which whole ones are read in full each time."""
    operands = (*instruction.inputs, *instruction.outputs)
    whole = sum(tensors[t].content_bytes for t in operands)
    if instruction.kind is not Kind.COMPUTE or not whole:
        return instruction.bytes / parts
    return instruction.bytes * sum(specs[t].content_bytes for t in operands) / whole


def reassembly(spec: TensorSpec, axis: int, parts: int) -> tuple[float, float]:
    """(flops, bytes) to make the whole tensor again: joined along an axis, rows merged, or summands added."""
    if axis == CARRIED:
        return 0.0, 0.0
    if axis == PARTIAL:
        count = spec.content_bytes
        return float(parts * count), float((parts + 1) * count)
    return 0.0, 2.0 * spec.content_bytes
