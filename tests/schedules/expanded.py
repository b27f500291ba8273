"""A Program with ranges cut, from shapes alone: what the graph that is cut is compared with, and what made-up
Programs, which have no graph, are cut with.

Each range is replaced by: a split of every cut tensor that comes from outside (views, free), the parts of its
instructions in pipeline order, and the reassembly of every tensor that is needed outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lancet_kernels.graph.part_instruction import part_instruction, part_name
from lancet_kernels.graph.program import Instruction, Program, TensorSpec
from lancet_kernels.schedules.ranges import (
    PartitionRange,
    outgoing,
    pipeline_order,
    positions,
    reassembly_instruction,
)


def expand(program: Program, ranges: Sequence[PartitionRange]) -> Program:
    """The program with its ranges cut into parts; without ranges, the program itself."""
    if not ranges:
        return program
    instructions: list[Instruction] = []
    tensors = dict(program.tensors)
    done = 0
    for cut in sorted(ranges, key=lambda r: program.index.get(r.first, -1)):
        first, last = positions(program, cut)
        instructions += program.instructions[done:first]
        _expand_range(program, first, last, cut, instructions, tensors)
        done = last + 1
    instructions += program.instructions[done:]
    used = {t for i in instructions for t in (*i.inputs, *i.outputs, *i.mutates)}
    used |= {*program.inputs, *program.outputs}
    for t in list(used):
        while (storage := tensors[t].alias_of) is not None:
            t = storage
            used.add(t)
    kept = {t: spec for t, spec in tensors.items() if t in used}
    return replace(program, instructions=tuple(instructions), tensors=kept)


def _expand_range(
    program: Program,
    first: int,
    last: int,
    cut: PartitionRange,
    instructions: list[Instruction],
    tensors: dict[str, TensorSpec],
) -> None:
    made = {t for i in range(first, last + 1) for t in program.instructions[i].outputs}
    phase = program.instructions[first].phase
    for t, form in cut.forms.items():
        if t not in made:
            attributes = {"form": str(form), "parts": cut.parts}
            name = f"split {t} for {cut.first}"
            pieces = tuple(_slice_name(t, p, cut) for p in range(cut.parts))
            instructions.append(
                Instruction(name, "lancet.split", (t,), pieces, phase=phase, attributes=attributes)
            )
    for i, part in pipeline_order(program, first, last, cut.forms, cut.parts):
        if part is None:
            instructions.append(program.instructions[i])
            continue
        instruction, specs = part_instruction(
            program.instructions[i], program.tensors, cut.forms, part, cut.parts
        )
        outside = {
            part_name(t, part): t for t in program.instructions[i].inputs if t in cut.forms and t not in made
        }
        for spec in specs.values():
            _add_part(spec, part, cut, made, outside, tensors)
        inputs = tuple(_slice_name(outside[t], part, cut) if t in outside else t for t in instruction.inputs)
        instructions.append(replace(instruction, inputs=inputs))
    handed_on = outgoing(program, first, last, cut.forms)
    for t in handed_on.reassembled:
        instructions.append(reassembly_instruction(program, t, cut.forms[t], cut.parts))
        tensors[t] = TensorSpec(t, program.tensors[t].shape, program.tensors[t].dtype)
    instructions += [program.instructions[i] for i in handed_on.viewed]


def _slice_name(tensor: str, part: int, cut: PartitionRange) -> str:
    """A part of a tensor that is made in front of the range."""
    return f"{part_name(tensor, part)} for {cut.first}"


def _add_part(
    spec: TensorSpec,
    part: int,
    cut: PartitionRange,
    made: set[str],
    outside: Mapping[str, str],
    tensors: dict[str, TensorSpec],
) -> None:
    """Describe one operand of a part. Splits share the storage of the whole; parts of views that of parts."""
    if spec.name in outside:
        whole = outside[spec.name]
        spec = replace(spec, name=_slice_name(whole, part, cut), alias_of=whole, bytes=0)
    elif spec.alias_of in made:
        if spec.alias_of in cut.forms:
            spec = replace(spec, alias_of=part_name(spec.alias_of, part))
    elif part_name(str(spec.alias_of), part) in outside:
        spec = replace(spec, alias_of=_slice_name(str(spec.alias_of), part, cut))
    tensors.setdefault(spec.name, spec)
