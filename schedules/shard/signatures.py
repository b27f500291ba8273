"""The forms in which an instruction can run on all ranks, and the collectives that convert between forms.

A conversion (HiDup, section 4.1) has an adjoint in the backward. The gradient of a tensor has the dual form:
of a slice a slice, of a partial tensor the whole, and of a whole tensor a partial one, because each rank
computes the gradient from its own readers only. So the backward needs no signatures of its own, and every
collective has one adjoint:

    from      to        forward           backward
    whole     cut i     slice (local)     zeros around the slice (local)
    cut i     whole     all-gather        reduce-scatter
    cut i     cut j     all-to-all        all-to-all
    partial   whole     all-reduce        all-reduce
    partial   cut i     reduce-scatter    all-gather

A signature (section 4.1) is a form for each input and output. Signatures follow from the rule table: a
cut along a dimension name cuts every operand that has it, and a cut along a contraction gives partial
results. In addition, every op can run whole on every rank, and ops that only move elements can run on partial
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.costs.part_instruction import part_instruction
from lancet_kernels.graph.ops import rule_for
from lancet_kernels.graph.program.forms import CARRIED, IRREGULAR, PARTIAL, WHOLE, WINDOW, Form, cut_along
from lancet_kernels.graph.program.program import Instruction, Kind, Program, TensorSpec
from lancet_kernels.graph.rules import derived

SLICE = "slice"
ADJOINT = {
    SLICE: SLICE,
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "all_reduce": "all_reduce",
}
MESSAGE_KINDS = {
    "all_to_all": Kind.ALL_TO_ALL,
    "all_reduce": Kind.ALL_REDUCE,
    "all_gather": Kind.OTHER_COMMUNICATION,
    "reduce_scatter": Kind.OTHER_COMMUNICATION,
}


def collective(source: Form, target: Form) -> str | None:
    """The collective that converts a tensor from one form to another; None if there is none."""
    if source == WHOLE and target.is_cut:
        return SLICE
    if source.is_cut and target == WHOLE:
        return "all_gather"
    if source.is_cut and target.is_cut:
        return "all_to_all"
    if source == PARTIAL and target == WHOLE:
        return "all_reduce"
    if source == PARTIAL and target.is_cut:
        return "reduce_scatter"
    return None


def forms_of(spec: TensorSpec, ranks: int) -> list[Form]:
    """Whole, and cut along each dimension that the ranks divide."""
    return [
        WHOLE,
        *(cut_along(d) for d, size in enumerate(spec.shape) if size >= ranks and size % ranks == 0),
    ]


def held_bytes(spec: TensorSpec, form: Form, ranks: int) -> float:
    """Bytes of a tensor's values on one rank."""
    return spec.content_bytes / (ranks if form.is_cut else 1)


@dataclass(frozen=True)
class CollectiveCosts:
    """Milliseconds of collectives among `ranks` ranks, from a `Cost` that covers communication."""

    cost: Cost
    ranks: int

    def milliseconds(self, name: str, spec: TensorSpec) -> float:
        """The time of one collective on a tensor. Args: spec: of the whole tensor; the cost of an all-to-all
        depends on the bytes of a rank's slice, that of all others on the bytes of the whole."""
        if name == SLICE or self.ranks == 1:
            return 0.0
        size = spec.content_bytes / (self.ranks if name == "all_to_all" else 1)
        message = Instruction(
            f"{name} of {spec.name}",
            f"sharding.{name}",
            kind=MESSAGE_KINDS[name],
            bytes=size,
            attributes={"collective": name},
        )
        return self.cost(message, {})


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
