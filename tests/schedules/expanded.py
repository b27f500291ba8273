"""A Program with ranges cut, from shapes alone: what the graph that is cut is compared with, and what made-up
Programs, which have no graph, are cut with.

Each range is replaced by: a split of every cut tensor that comes from outside (views, free), the parts of its
instructions in pipeline order, and the reassembly of every tensor that is needed outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lancet_kernels.graph.costs.part_instruction import part_instruction, part_name, reads_whole
from lancet_kernels.graph.program import Instruction, Program, TensorSpec
from lancet_kernels.graph.rules.rules import PARTIAL, WHOLE
from lancet_kernels.schedules.cut.ranges import (
    PartitionRange,
    is_needed_behind,
    pipeline_order,
    positions,
    reassembled,
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
    return replace(program, instructions=tuple(instructions), tensors=tensors)


def _expand_range(
    program: Program,
    first: int,
    last: int,
    cut: PartitionRange,
    instructions: list[Instruction],
    tensors: dict[str, TensorSpec],
) -> None:
    outputs = {t for i in program.instructions[first : last + 1] for t in i.outputs}
    in_parts = {t for t in outputs if cut.forms.get(t, WHOLE).is_made_in_parts}
    sliced = {t for t in cut.forms if t not in in_parts}
    joined = reassembled(program, first, last, cut.forms)
    whole: set[str] = set()
    split: set[str] = set()

    def make_whole(t: str) -> None:
        """Put a tensor together, or make a view of it again, unless that is done already."""
        if t in whole or t not in in_parts:
            return
        i = program.producer[t]
        if t not in joined:
            for source in program.instructions[i].inputs:
                make_whole(source)
            instructions.append(program.instructions[i])
            whole.update(program.instructions[i].outputs)
        else:
            instructions.append(reassembly_instruction(program, t, cut.forms[t], cut.parts))
            tensors[t] = TensorSpec(t, program.tensors[t].shape, program.tensors[t].dtype)
            whole.add(t)

    for i, part in pipeline_order(program, first, last, cut.forms, cut.parts):
        original = program.instructions[i]
        for t in original.inputs:
            if reads_whole(original, t, cut.forms):
                make_whole(t)
        if part is None:
            instructions.append(original)
            continue
        slices = {part_name(t, part): t for t in original.inputs if t in sliced}
        for t in slices.values():
            if t not in split:
                split.add(t)
                instructions.append(_split(t, original, cut))
        instruction, specs = part_instruction(original, program.tensors, cut.forms, part, cut.parts)
        for spec in specs.values():
            _add_part(spec, part, cut, in_parts, slices, tensors)
        inputs = tuple(_slice_name(slices[t], part, cut) if t in slices else t for t in instruction.inputs)
        instructions.append(replace(instruction, inputs=inputs))
    for i in program.instructions[first : last + 1]:
        for t in i.outputs:
            if is_needed_behind(program, t, last):
                make_whole(t)


def _split(tensor: str, reader: Instruction, cut: PartitionRange) -> Instruction:
    """Slices of a tensor that is there as a whole, one for each part: views."""
    pieces = tuple(_slice_name(tensor, p, cut) for p in range(cut.parts))
    attributes = {"form": str(cut.forms[tensor].of_reader), "parts": cut.parts}
    name = f"split {tensor} for {cut.first}"
    return Instruction(name, "lancet.split", (tensor,), pieces, phase=reader.phase, attributes=attributes)


def _slice_name(tensor: str, part: int, cut: PartitionRange) -> str:
    """A part of a tensor that is there as a whole."""
    return f"{part_name(tensor, part)} for {cut.first}"


def _add_part(
    spec: TensorSpec,
    part: int,
    cut: PartitionRange,
    in_parts: set[str],
    slices: Mapping[str, str],
    tensors: dict[str, TensorSpec],
) -> None:
    """Describe one operand of a part. Splits share the storage of the whole; parts of views that of parts."""
    if spec.name in slices:
        whole = slices[spec.name]
        spec = replace(spec, name=_slice_name(whole, part, cut), alias_of=whole, bytes=0)
    elif spec.alias_of in in_parts:
        # A summand of which this is a view is read as a whole.
        if cut.forms[spec.alias_of] != PARTIAL:
            spec = replace(spec, alias_of=part_name(spec.alias_of, part))
    elif part_name(str(spec.alias_of), part) in slices:
        spec = replace(spec, alias_of=_slice_name(str(spec.alias_of), part, cut))
    tensors.setdefault(spec.name, spec)
