"""Signatures: the forms in which an instruction can run on all ranks, and its time in each of them.

HiDup, section 4.1: a signature is a form for each input and output. Signatures follow from the rule table: a
cut along a dimension name cuts every operand that has it, and a cut along a contraction gives partial
results. In addition, every op can run whole on every rank, and ops that only move elements can run on partial
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.program.forms import CARRIED, IRREGULAR, PARTIAL, WHOLE, WINDOW, Form
from lancet_kernels.graph.program.program import Instruction, Program
from lancet_kernels.graph.rules import derived
from lancet_kernels.graph.rules.part_instruction import part_instruction
from lancet_kernels.graph.rules.rules import rule_for

_MOVES_ELEMENTS = (derived.view, derived.permute, derived.squeeze, derived.unflatten)


@dataclass(frozen=True)
class Signature:
    """The form of each input and output, in the instruction's order, and the milliseconds on each rank."""

    inputs: tuple[Form, ...]
    outputs: tuple[Form, ...]
    ms: float


def signatures(instruction: Instruction, program: Program, ranks: int, cost: Cost) -> list[Signature]:
    """All signatures of an instruction on `ranks` ranks, whole first. Slices have equal sizes."""
    operands = (*instruction.inputs, *instruction.outputs)
    ways = [(WHOLE,) * len(operands)]
    rule = rule_for(instruction)
    if rule is not None and ranks > 1:
        ways += rule.assignments(instruction, program.tensors, only_experts=False, contractions=True)
        is_move = rule.derived in _MOVES_ELEMENTS and len(operands) == 2
        ways += [(PARTIAL, PARTIAL)] if is_move else []
    split = len(instruction.inputs)
    return [
        Signature(way[:split], way[split:], signature_ms(instruction, program, way, ranks, cost))
        for way in dict.fromkeys(ways)
        if _is_even(instruction, program, way, ranks)
    ]


def _is_even(instruction: Instruction, program: Program, way: tuple[Form, ...], ranks: int) -> bool:
    for tensor, form in zip((*instruction.inputs, *instruction.outputs), way, strict=True):
        if form in (IRREGULAR, WINDOW, CARRIED):
            return False
        size = program.tensors[tensor].shape[form.dimension] if form.dimension is not None else ranks
        if size < ranks or size % ranks:
            return False
    return True


def signature_ms(
    instruction: Instruction, program: Program, way: tuple[Form, ...], ranks: int, cost: Cost
) -> float:
    """Milliseconds on each rank. way: the forms of inputs and outputs, by position. A constant is made whole
    on every rank, whatever slice of it is read."""
    if not instruction.inputs:
        return cost(instruction, program.tensors)
    forms = dict(zip((*instruction.inputs, *instruction.outputs), way, strict=True))
    if not any(form.is_cut for form in way):
        return cost(instruction, program.tensors)
    part, tensors = part_instruction(instruction, program.tensors, forms, 0, ranks)
    return cost(part, tensors)
