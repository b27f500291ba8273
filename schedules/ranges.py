"""What becomes of a Program whose ranges are cut into parts? Another Program, as plain as the first.

Each partitioned range is replaced by: a split of every cut tensor that comes from outside (views, free), the
parts of its instructions in pipeline order (section 5.3), and the reassembly of every tensor that is needed
outside. Names tell parts apart: `layer1.moe.gate_part1`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lancet_kernels.errors import UserError
from lancet_kernels.graph.forms import CARRIED, PARTIAL, WHOLE, Form, Forms
from lancet_kernels.graph.part_instruction import (
    is_cut,
    part_instruction,
    part_name,
    reads_whole,
    reassembly,
)
from lancet_kernels.graph.program import Instruction, Program, TensorSpec


@dataclass(frozen=True)
class PartitionRange:
    """Instructions first..last (names, both included) cut into `parts`; `forms` of the tensors that are
    not whole in a part."""

    first: str
    last: str
    parts: int
    forms: Forms


@dataclass
class Stage:
    """Consecutive computation, or consecutive communication, that parts take in turns.

    in_parts: positions that run once per part, and what they read besides. behind: positions that run once,
    behind all parts of the stage: they read what the stage makes in parts.
    """

    in_parts: list[int]
    behind: list[int]


def stages(program: Program, first: int, last: int, forms: Forms) -> list[Stage]:
    """The stages of positions first..last.

    Example: compute, compute, all-to-all, compute give three stages of 2, 1 and 1 instructions. Where parts
    read something whole of the same stage (the sum over a batch), another stage begins.
    """
    found = [Stage([], [])]
    sends: bool | None = None
    """Of the stage so far: communication? None: nothing that is cut."""
    partial: set[str] = set()
    """What the stage makes in parts."""
    late: set[str] = set()
    """What runs behind the parts of the stage makes."""
    for i in range(first, last + 1):
        instruction = program.instructions[i]
        inputs = instruction.inputs
        if not is_cut(instruction, forms):
            if late.intersection(inputs) or partial.intersection(inputs):
                found[-1].behind.append(i)
                late.update(instruction.outputs)
            else:
                found[-1].in_parts.append(i)
            continue
        needs_whole = any(t in late or (t in partial and reads_whole(instruction, t, forms)) for t in inputs)
        kind = instruction.kind.is_communication
        if needs_whole or (sends is not None and sends != kind):
            found.append(Stage([], []))
            partial, late = set(), set()
        sends = kind
        found[-1].in_parts.append(i)
        partial.update(instruction.outputs)
    return found


def pipeline_order(
    program: Program, first: int, last: int, forms: Forms, parts: int
) -> Iterator[tuple[int, int | None]]:
    """(position, part) in the order of Fig. 9: stage by stage, in each stage part by part.

    The part is None for an instruction with nothing to cut; it runs once, with the first part, or behind all
    parts of what it reads.
    """
    for stage in stages(program, first, last, forms):
        for part in range(parts):
            for i in stage.in_parts:
                if is_cut(program.instructions[i], forms):
                    yield i, part
                elif part == 0:
                    yield i, None
        for i in stage.behind:
            yield i, None


@dataclass(frozen=True)
class Outgoing:
    """How a range hands on what is needed whole, outside or within.

    reassembled: cut tensors that are put together again.
    viewed: positions of views that run once more, on the whole tensor, because that costs nothing.
    """

    reassembled: tuple[str, ...]
    viewed: tuple[int, ...]


def outgoing(program: Program, first: int, last: int, forms: Forms) -> Outgoing:
    """What must be whole again. A view of a tensor is made again from the whole tensor."""
    made = {
        t
        for i in range(first, last + 1)
        for t in program.instructions[i].outputs
        if forms.get(t, WHOLE).is_made_in_parts
    }
    wanted = [t for t in made if program.consumers[t][-1:] > [last] or t in program.output_set]
    wanted += [
        t
        for i in range(first, last + 1)
        for t in program.instructions[i].inputs
        if t in made and reads_whole(program.instructions[i], t, forms)
    ]
    reassembled: set[str] = set()
    viewed: set[int] = set()
    while wanted:
        t = wanted.pop()
        if t in reassembled:
            continue
        i = program.producer[t]
        if not _is_view(program.instructions[i]):
            reassembled.add(t)
        elif i not in viewed:
            viewed.add(i)
            inputs = program.instructions[i].inputs
            wanted += [s for s in inputs if s in made]
    in_order = sorted(
        reassembled, key=lambda t: (_first_reader_outside(program, t, last), program.producer[t])
    )
    return Outgoing(tuple(in_order), tuple(sorted(viewed)))


def reassembly_instruction(program: Program, tensor: str, form: Form, parts: int) -> Instruction:
    """The instruction that makes a tensor whole again from its parts."""
    flops, traffic = reassembly(program.tensors[tensor], form, parts)
    first = parts - 1 if form == CARRIED else 0
    return Instruction(
        f"reassemble {tensor}",
        "lancet.reassemble",
        tuple(part_name(tensor, p) for p in range(first, parts)),
        (tensor,),
        phase=program.instructions[program.producer[tensor]].phase,
        flops=flops,
        bytes=traffic,
        attributes={"form": str(form), "parts": parts},
    )


def expand(program: Program, ranges: Sequence[PartitionRange]) -> Program:
    """The program with its ranges cut into parts; without ranges, the program itself.

    Raises:
        UserError: a range is not in the program, or two overlap.
    """
    if not ranges:
        return program
    instructions: list[Instruction] = []
    tensors = dict(program.tensors)
    done = 0
    for cut in sorted(ranges, key=lambda r: program.index.get(r.first, -1)):
        first, last = program.index.get(cut.first, -1), program.index.get(cut.last, -1)
        if not done <= first <= last:
            raise UserError(
                "partition range",
                got=f"{cut.first} to {cut.last}",
                expected=f"instructions of {program.name}, behind the range before",
                do="plan again for this program",
            )
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
    in_parts = {
        t
        for i in range(first, last + 1)
        for t in program.instructions[i].outputs
        if cut.forms.get(t, WHOLE).is_made_in_parts
    }
    sliced = {t for t in cut.forms if t not in in_parts}
    handed_on = outgoing(program, first, last, cut.forms)
    whole: set[str] = set()
    split: set[str] = set()

    def make_whole(t: str) -> None:
        """Put a tensor together, or make a view of it again, unless that is done already."""
        if t in whole or t not in in_parts:
            return
        i = program.producer[t]
        if i in handed_on.viewed and t not in handed_on.reassembled:
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
    for t in handed_on.reassembled:
        make_whole(t)
    for i in handed_on.viewed:
        for t in program.instructions[i].outputs:
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


def _is_view(instruction: Instruction) -> bool:
    """Does it cost nothing? Then making it again on the whole tensor is cheaper than joining its parts."""
    return instruction.flops == 0 and instruction.bytes == 0 and not instruction.milliseconds


def _first_reader_outside(program: Program, tensor: str, last: int) -> int:
    return next((i for i in program.consumers[tensor] if i > last), len(program))
