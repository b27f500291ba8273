"""A range of a Program, cut into parts: in which order do they run, and what is whole again behind it?

Parts run in pipeline order (Lancet, section 5.3). Cutting itself is done on the graph (`schedules.cut`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lancet_kernels.errors import UserError
from lancet_kernels.graph.forms import CARRIED, WHOLE, Form, Forms
from lancet_kernels.graph.part_instruction import is_cut, part_name, reassembly
from lancet_kernels.graph.program import Instruction, Program


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


def positions(program: Program, planned: PartitionRange) -> tuple[int, int]:
    """First and last position of a range. Raises: UserError if it is not in the program."""
    first, last = program.index.get(planned.first, -1), program.index.get(planned.last, -1)
    if not 0 <= first <= last:
        raise UserError(
            "partition range",
            got=f"{planned.first} to {planned.last}",
            expected=f"instructions of {program.name}",
            do="plan again for this program",
        )
    return first, last


def _is_view(instruction: Instruction) -> bool:
    """Does it cost nothing? Then making it again on the whole tensor is cheaper than joining its parts."""
    return instruction.flops == 0 and instruction.bytes == 0 and not instruction.milliseconds


def _first_reader_outside(program: Program, tensor: str, last: int) -> int:
    return next((i for i in program.consumers[tensor] if i > last), len(program))
