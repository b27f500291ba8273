"""One part of an instruction that is cut into k: its name, shapes, FLOPs and bytes.

This includes the overhead of partitioning: each part has its own launch, and reads operands that are not cut
(a weight) in full. An irregular part has 1/k of the rows (Lancet, section 3), as if tokens were spread
evenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lancet_kernels.graph.ops import rule_for
from lancet_kernels.graph.program.forms import (
    CARRIED,
    IRREGULAR,
    PARTIAL,
    WHOLE,
    WINDOW,
    Form,
    Forms,
    any_made_in_parts,
)
from lancet_kernels.graph.program.program import Instruction, Kind, TensorSpec


def part_name(name: str, part: int) -> str:
    """The name of a part, in Programs and in graphs. Example: `part_name("mm", 0)` is `mm_part0`."""
    return f"{name}_part{part}"


def whole_name(name: str) -> str:
    """The name of the instruction that a part is one of; of any other instruction, its own.

    Example: `whole_name("mm_part0")` is `mm`, and so is `whole_name("mm")`.
    """
    whole, marker, part = name.rpartition("_part")
    return whole if marker and part.isdigit() else name


def is_cut(instruction: Instruction, forms: Forms) -> bool:
    """Does the instruction run part by part? An instruction with whole results runs once, on whole
    operands."""
    return any_made_in_parts(forms, instruction.outputs)


def reads_whole(instruction: Instruction, tensor: str, forms: Forms) -> bool:
    """Does the instruction read all of a tensor that is computed part by part? A partial tensor is only read
    as the complete sum."""
    form = forms.get(tensor, WHOLE)
    return form == PARTIAL or (form.is_made_in_parts and not is_cut(instruction, forms))


def part_tensor(
    spec: TensorSpec, form: Form, part: int, parts: int, row_dimension: int | None = None
) -> TensorSpec:
    """One part of a tensor. Example: x (8, 4) cut along 0 into 2: `x_part0` (4, 4), half the bytes."""
    name = part_name(spec.name, part)
    dimension = row_dimension if form in (IRREGULAR, WINDOW) else form.dimension
    if dimension is None:
        return replace(spec, name=name)
    shape = list(spec.shape)
    shape[dimension] = -(-shape[dimension] // parts)
    return replace(spec, name=name, shape=tuple(shape), bytes=-(-spec.bytes // parts))


def can_be_cut(tensors: Mapping[str, TensorSpec], forms: Forms, parts: int) -> bool:
    """Do the parts of all tensors cover the same part of the batch? Parts are multiples of a unit of the
    shortest dimension that is cut, so its size must divide the others. Parts of equal size work with views,
    too; uneven ones only if all tensors have the same size along the dimensions that are cut. Windows of
    slots fit any number of rows."""
    sizes = {tensors[t].shape[form.dimension] for t, form in forms.items() if form.dimension is not None}
    if not sizes:
        return True
    units = min(sizes)
    if units < parts or any(s % units for s in sizes):
        return False
    return units % parts == 0 or len(sizes) == 1


def part_instruction(
    instruction: Instruction, tensors: Mapping[str, TensorSpec], forms: Forms, part: int, parts: int
) -> tuple[Instruction, dict[str, TensorSpec]]:
    """Part `part` (from 0) of an instruction, and the specs of its operands.

    Attributes from which cost models derive the time of the part: the `forms` of inputs and outputs, their
    shapes in the uncut instruction (`whole_shapes`), and its measured time (`whole_milliseconds`).
    """
    rule = rule_for(instruction)
    rows = rule.row_dimensions(instruction, tensors) if rule else {}
    operands = {
        t: WHOLE if forms.get(t) == PARTIAL else forms.get(t, WHOLE).of_reader for t in instruction.inputs
    }
    operands |= {t: forms.get(t, WHOLE) for t in instruction.outputs}
    specs = {
        t: tensors[t] if form == WHOLE else part_tensor(tensors[t], form, part, parts, rows.get(t))
        for t, form in operands.items()
    }
    names = {t: spec.name for t, spec in specs.items()}
    inputs = [names[t] for t in instruction.inputs]
    for source, target in rule.carried(instruction, tensors) if rule else ():
        if part and operands[instruction.outputs[target]] == CARRIED:
            inputs[source] = part_name(instruction.outputs[target], part - 1)
            specs[f"{instruction.inputs[source]} carried"] = part_tensor(
                tensors[instruction.outputs[target]], CARRIED, part - 1, parts
            )
    attributes = {
        **instruction.attributes,
        "part": part,
        "parts": parts,
        "forms": [str(operands[t]) for t in (*instruction.inputs, *instruction.outputs)],
        "whole_shapes": [tensors[t].shape for t in (*instruction.inputs, *instruction.outputs)],
    }
    if instruction.milliseconds is not None:
        attributes["whole_milliseconds"] = instruction.milliseconds
    result = replace(
        instruction,
        name=part_name(instruction.name, part),
        inputs=tuple(inputs),
        outputs=tuple(names[t] for t in instruction.outputs),
        flops=instruction.flops / parts,
        bytes=_part_bytes(instruction, tensors, specs, parts),
        milliseconds=None,
        attributes=attributes,
    )
    return result, {spec.name: spec for spec in specs.values()}


def _part_bytes(
    instruction: Instruction,
    tensors: Mapping[str, TensorSpec],
    specs: Mapping[str, TensorSpec],
    parts: int,
) -> float:
    """Bytes read and written by a part, proportional to the sizes of its operands; whole ones count in
    full."""
    operands = (*instruction.inputs, *instruction.outputs)
    whole = sum(tensors[t].content_bytes for t in operands)
    if instruction.kind is not Kind.COMPUTE or not whole:
        return instruction.bytes / parts
    return instruction.bytes * sum(specs[t].content_bytes for t in operands) / whole


def reassembly(spec: TensorSpec, form: Form, parts: int) -> tuple[float, float]:
    """(FLOPs, bytes) of reassembling a tensor: joining slices, merging rows, or adding summands."""
    if form == CARRIED:
        return 0.0, 0.0
    if form == PARTIAL:
        count = spec.content_bytes
        return float(parts * count), float((parts + 1) * count)
    return 0.0, 2.0 * spec.content_bytes
