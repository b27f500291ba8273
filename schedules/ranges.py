"""What becomes of a Program whose ranges are cut into parts? Another Program, as plain as the first.

Each partitioned range is replaced by: a split of every cut tensor that comes from outside (views, free), the
parts of its instructions in pipeline order (section 5.3), and the reassembly of every tensor that is needed
outside. Names tell parts apart: `layer1.moe.gate_part1`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lancet_kernels.errors import UserError
from lancet_kernels.graph.forms import CARRIED, WHOLE, Form, Forms
from lancet_kernels.graph.part_instruction import is_cut, part_instruction, part_name, reassembly
from lancet_kernels.graph.program import Instruction, Program, TensorSpec


@dataclass(frozen=True)
class PartitionRange:
    """Instructions first..last (names, both included) cut into `parts`; `forms` of the tensors that are
    not whole in a part."""

    first: str
    last: str
    parts: int
    forms: Forms


def stages(program: Program, first: int, last: int) -> list[list[int]]:
    """Runs of consecutive computation or consecutive communication.

    Example: compute, compute, all-to-all, compute gives three stages of 2, 1 and 1 instructions.
    """
    found: list[list[int]] = []
    for i in range(first, last + 1):
        kind = program.instructions[i].kind
        if found and program.instructions[found[-1][0]].kind.is_communication == kind.is_communication:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def pipeline_order(
    program: Program, first: int, last: int, forms: Forms, parts: int
) -> Iterator[tuple[int, int | None]]:
    """(position, part) in the order of Fig. 9: stage by stage, in each stage part by part.

    The part is None for an instruction with nothing to cut; it runs once, with the first part.
    """
    for stage in stages(program, first, last):
        for part in range(parts):
            for i in stage:
                if is_cut(program.instructions[i], forms):
                    yield i, part
                elif part == 0:
                    yield i, None


@dataclass(frozen=True)
class Outgoing:
    """How a range hands on what is needed outside.

    reassembled: cut tensors that are put together again.
    viewed: positions of views that run once more, on the whole tensor, because that costs nothing.
    """

    reassembled: tuple[str, ...]
    viewed: tuple[int, ...]


def outgoing(program: Program, first: int, last: int, forms: Forms) -> Outgoing:
    """What must be whole again behind the range. A view of a tensor is made again from the whole tensor."""
    made = {t for i in range(first, last + 1) for t in program.instructions[i].outputs}
    wanted = [
        t
        for t in made
        if forms.get(t, WHOLE) != WHOLE and (program.consumers[t][-1:] > [last] or t in program.output_set)
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
            wanted += [s for s in inputs if s in made and forms.get(s, WHOLE) != WHOLE]
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


def _is_view(instruction: Instruction) -> bool:
    """Does it cost nothing? Then making it again on the whole tensor is cheaper than joining its parts."""
    return instruction.flops == 0 and instruction.bytes == 0 and not instruction.milliseconds


def _first_reader_outside(program: Program, tensor: str, last: int) -> int:
    return next((i for i in program.consumers[tensor] if i > last), len(program))
