"""A partitioned range of a Program: in which order do its parts run, and which tensors are reassembled?

Parts run in pipeline order (Lancet, section 5.3). `schedules.rewrite.cut` does the partitioning, on the
graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.part_instruction import is_cut, part_name, reads_whole, reassembly
from lancet_kernels.graph.program.forms import CARRIED, WHOLE, Form, Forms
from lancet_kernels.graph.program.program import Instruction, Program


@dataclass(frozen=True)
class LaunchFillers:
    """Weight gradients that the fused backward launch of one part also computes: names in the cut graph, and
    the predicted time of the launch with them (`schedules.rewrite.fused`)."""

    launch: str
    gradients: tuple[str, ...]
    milliseconds: float


@dataclass(frozen=True)
class PartitionRange:
    """Instructions first..last (names, both included), cut into `parts`; `forms` has the form of every tensor
    that is not whole in a part. `fillers`: of the fused launches in it."""

    first: str
    last: str
    parts: int
    forms: Forms
    fillers: tuple[LaunchFillers, ...] = ()


@dataclass
class PipelineStage:
    """Consecutive computation, or consecutive communication. Parts run stage by stage.

    in_parts: positions that run once per part, and uncut ones that these read. behind: positions that run
    once, after all parts of the stage, because they read its results as a whole.
    """

    in_parts: list[int]
    behind: list[int]


def range_names(ranges: Sequence[PartitionRange]) -> tuple[tuple[object, ...], ...]:
    """What identifies ranges within one Program: first and last name, number of parts, fillers."""
    return tuple((r.first, r.last, r.parts, r.fillers) for r in ranges)


def stages(program: Program, first: int, last: int, forms: Forms) -> list[PipelineStage]:
    """The stages of positions first..last.

    Example: compute, compute, all-to-all, compute give three stages of 2, 1 and 1 instructions. A new stage
    begins where a part reads a whole result of the current stage (a sum over the batch).
    """
    result = [PipelineStage([], [])]
    sends: bool | None = None
    """Is the current stage communication? None: it has no cut instruction so far."""
    partial: set[str] = set()
    """Tensors that the current stage computes part by part."""
    late: set[str] = set()
    """Results of the instructions that run after all parts of the current stage."""
    for i in range(first, last + 1):
        instruction = program.instructions[i]
        inputs = instruction.inputs
        if not is_cut(instruction, forms):
            if late.intersection(inputs) or partial.intersection(inputs):
                result[-1].behind.append(i)
                late.update(instruction.outputs)
            else:
                result[-1].in_parts.append(i)
            continue
        needs_whole = any(t in late or (t in partial and reads_whole(instruction, t, forms)) for t in inputs)
        kind = instruction.kind.is_communication
        if needs_whole or (sends is not None and sends != kind):
            result.append(PipelineStage([], []))
            partial, late = set(), set()
        sends = kind
        result[-1].in_parts.append(i)
        partial.update(instruction.outputs)
    return result


def pipeline_order(
    program: Program, first: int, last: int, forms: Forms, parts: int
) -> Iterator[tuple[int, int | None]]:
    """(position, part) in the order of Fig. 9: stage by stage, in each stage part by part.

    The part is None for an instruction that is not cut; it runs once, with the first part, or after all parts
    of the instructions that it reads.
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


def reassembled(program: Program, first: int, last: int, forms: Forms) -> set[str]:
    """The tensors that parts of a range are joined to, because they are needed whole, after the range or
    inside it. A view that is needed whole is repeated on the joined tensor instead, which is free."""
    in_range = program.instructions[first : last + 1]
    in_parts = {t for i in in_range for t in i.outputs if forms.get(t, WHOLE).is_made_in_parts}
    pending = [t for t in in_parts if is_needed_behind(program, t, last)]
    pending += [t for i in in_range for t in i.inputs if t in in_parts and reads_whole(i, t, forms)]
    joined: set[str] = set()
    repeated: set[int] = set()
    while pending:
        t = pending.pop()
        i = program.producer[t]
        if not program.instructions[i].is_free:
            joined.add(t)
        elif i not in repeated:
            repeated.add(i)
            pending += [source for source in program.instructions[i].inputs if source in in_parts]
    return joined


def is_needed_behind(program: Program, tensor: str, last: int) -> bool:
    """Is the tensor read behind position `last`, or an output of the program?"""
    return program.consumers[tensor][-1:] > [last] or tensor in program.output_set


def reassembly_instruction(program: Program, tensor: str, form: Form, parts: int) -> Instruction:
    """The instruction that joins the parts of a tensor."""
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
