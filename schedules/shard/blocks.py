"""Groups the forward of a Program into blocks without communication inside; sharding is decided per block.

Views, and ops that only prepare weights (a transpose, a broadcast), are free, so every block that reads their
result has its own copy of them. A light op (no matrix product) whose activations all come from one block
joins that block: communication before it would move as many bytes as after it. The signatures of a block are
the consistent combinations of those of its instructions, of those with the same forms at the block's inputs
and outputs the fastest.

The gradient of a tensor has the dual form: of a slice a slice, of a partial tensor the whole, and of a whole
tensor a partial one, because each rank computes the gradient from its own readers only. So the backward needs
no signatures of its own, and every collective between two forms has one adjoint (HiDup, section 4.1).

A signature (section 4.1) is a form for each input and output. Signatures follow from the rule table: a
cut along a dimension name cuts every operand that has it, and a cut along a contraction gives partial
results. Every op can also run whole on every rank, and one that only moves elements on partial tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.costs.part_instruction import part_instruction
from lancet_kernels.graph.ops import rule_for
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program, TensorSpec
from lancet_kernels.graph.rules import derived
from lancet_kernels.graph.rules.rules import CARRIED, IRREGULAR, PARTIAL, WHOLE, WINDOW, Form, cut_along

SLICE = "slice"
"""Sends nothing; its backward pads with zeros."""
_COLLECTIVES = {
    ("whole", "cut"): SLICE,
    ("cut", "whole"): "all_gather",
    ("cut", "cut"): "all_to_all",
    ("partial", "whole"): "all_reduce",
    ("partial", "cut"): "reduce_scatter",
}
ADJOINT = {
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
    return _COLLECTIVES.get((source.kind, target.kind))


def forms_of(spec: TensorSpec, ranks: int) -> list[Form]:
    """Whole, and cut along each dimension that the ranks divide."""
    return [
        WHOLE,
        *(cut_along(d) for d, size in enumerate(spec.shape) if size >= ranks and size % ranks == 0),
    ]


def held_bytes(spec: TensorSpec, form: Form, ranks: int) -> float:
    """Bytes of a tensor's values on one rank."""
    return spec.content_bytes / (ranks if form.is_cut else 1)


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
    if not instruction.inputs or not any(form.is_cut for form in way):
        return cost(instruction, program.tensors)
    forms = dict(zip((*instruction.inputs, *instruction.outputs), way, strict=True))
    part, tensors = part_instruction(instruction, program.tensors, forms, 0, ranks)
    return cost(part, tensors)


@dataclass(frozen=True)
class BlockSignature:
    """Forms of a block's `reads`, `parameters` and `makes`, by position.

    ways: for each instruction, the forms of its inputs and outputs. ms: of one forward on each rank.
    bytes: of the results in the block that the backward reads.
    """

    reads: tuple[Form, ...]
    parameters: tuple[Form, ...]
    makes: tuple[Form, ...]
    ways: tuple[tuple[Form, ...], ...]
    ms: float
    bytes: float


@dataclass(frozen=True)
class Block:
    """Instructions that run without communication between them.

    reads: activations from other blocks, and inputs. parameters: weights. makes: results that other blocks
    read.
    """

    instructions: tuple[str, ...]
    reads: tuple[str, ...]
    parameters: tuple[str, ...]
    makes: tuple[str, ...]
    signatures: tuple[BlockSignature, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.reads + self.parameters + self.makes


def blocks_of(program: Program, ranks: int, cost: Cost) -> list[Block]:
    """The blocks of a forward Program, in a valid order. Raises: UserError for a Program with a backward, or
    with collectives in it."""
    wrong = [i for i in program.instructions if i.phase is not Phase.FORWARD or i.kind.is_communication]
    if wrong:
        raise UserError(
            f"program {program.name} for a search of shardings",
            got=f"{wrong[0].name} ({wrong[0].op}, {wrong[0].phase.value})",
            expected="the forward of a model for one device, without collectives",
            do="capture the model without a process group",
        )
    return _Grouping(program, ranks, cost).blocks()


def preparations(program: Program) -> dict[str, Instruction]:
    """Tensors that are views, or depend only on weights and constants -> the instruction that computes
    them."""
    prepares: dict[str, Instruction] = {}
    constant = set(program.parameter_set)
    for i in program.instructions:
        is_constant = not i.flops and constant.issuperset(i.inputs)
        if is_constant:
            constant.update(i.outputs)
        if is_constant or (program.is_view(i) and program.output_set.isdisjoint(i.outputs)):
            prepares.update(dict.fromkeys(i.outputs, i))
    return prepares


class _Grouping:
    """Blocks of the same structure, those of repeated layers, share their signatures."""

    def __init__(self, program: Program, ranks: int, cost: Cost) -> None:
        self.program, self.ranks, self.cost = program, ranks, cost
        self.prepares = preparations(program)
        self.combined: dict[tuple, tuple[BlockSignature, ...]] = {}

    def blocks(self) -> list[Block]:
        """In the order of their first instructions: those that join a block read nothing of other ones."""
        parameters = self.program.parameter_set
        members: list[list[Instruction]] = []
        home: dict[str, int] = {}
        readers: dict[str, set[str]] = {t: set() for t in self.program.tensors}
        for instruction in self.program.instructions:
            if any(t in self.prepares for t in instruction.outputs):
                continue
            # Activations and inputs.
            read = [t for t in self._behind_preparations(instruction)[0] if t not in parameters]
            for t in read:
                readers[t].add(instruction.name)
            sources = {home.get(t, -1) for t in read}
            place = min(sources, default=-1)
            joins = len(sources) == 1 and place >= 0 and not instruction.flops
            # Partial results of a product must be summed before the op, so it starts a new block.
            if joins and not self._may_be_partial(members[place], read):
                members[place].append(instruction)
            else:
                place = len(members)
                members.append([instruction])
            home.update(dict.fromkeys(instruction.outputs, place))
        return [self._block(of, readers) for of in members]

    def _behind_preparations(self, instruction: Instruction) -> tuple[list[str], list[Instruction]]:
        """Tensors that an instruction reads, directly or through preparations, and these."""
        read: list[str] = []
        needed: list[Instruction] = []
        waiting = list(reversed(instruction.inputs))
        while waiting:
            t = waiting.pop()
            if t in self.prepares:
                needed.append(self.prepares[t])
                waiting += reversed(self.prepares[t].inputs)
            else:
                read.append(t)
        return list(dict.fromkeys(read)), needed

    def _may_be_partial(self, members: list[Instruction], read: Iterable[str]) -> bool:
        """Can these instructions give one of the tensors `read` in form partial?"""
        partial: set[str] = set()
        for i in members:
            for signature in signatures(i, self.program, self.ranks, self.cost):
                inputs = zip(i.inputs, signature.inputs, strict=True)
                if all(f != PARTIAL or t in partial for t, f in inputs):
                    outputs = zip(i.outputs, signature.outputs, strict=True)
                    partial |= {t for t, f in outputs if f == PARTIAL}
        return not partial.isdisjoint(read)

    def _block(self, members: list[Instruction], readers: Mapping[str, set[str]]) -> Block:
        program, names = self.program, {i.name for i in members}
        needed = {i.name: i for member in members for i in (member, *self._behind_preparations(member)[1])}
        instructions = sorted(needed.values(), key=lambda i: program.index[i.name])
        inside = {t for i in instructions for t in i.outputs}
        read = list(dict.fromkeys(t for i in instructions for t in i.inputs if t not in inside))
        reads = tuple(t for t in read if t not in program.parameter_set)
        parameters = tuple(t for t in read if t in program.parameter_set)
        makes = tuple(t for i in members for t in i.outputs if t in program.output_set or readers[t] - names)
        key = self._structure(instructions, reads, parameters, makes)
        if key not in self.combined:
            self.combined[key] = self._combined(instructions, reads, parameters, makes)
        return Block(tuple(i.name for i in instructions), reads, parameters, makes, self.combined[key])

    def _structure(self, instructions: list[Instruction], *ends: tuple[str, ...]) -> tuple:
        """The structure of a block without names. ends: what it reads and makes."""
        number: dict[str, int] = {}
        for i in instructions:
            for t in (*i.inputs, *i.outputs):
                number.setdefault(t, len(number))
        tensors = self.program.tensors
        return (
            tuple(
                (
                    i.op,
                    tuple(number[t] for t in i.inputs),
                    tuple(number[t] for t in i.outputs),
                    repr(sorted(i.attributes.items(), key=lambda item: item[0])),
                    (i.flops, i.bytes, i.milliseconds, len(i.mutates)),
                )
                for i in instructions
            ),
            tuple((tensors[t].shape, tensors[t].dtype) for t in number),
            *(tuple(number[t] for t in of) for of in ends),
        )

    def _combined(
        self,
        instructions: list[Instruction],
        reads: tuple[str, ...],
        parameters: tuple[str, ...],
        makes: tuple[str, ...],
    ) -> tuple[BlockSignature, ...]:
        """All combinations, instruction by instruction. The form of a tensor is dropped after its last
        reader."""
        last = {t: n for n, i in enumerate(instructions) for t in i.inputs}
        outside, keep = {*reads, *parameters}, {*reads, *parameters, *makes}
        partial: dict[frozenset, tuple[dict[str, Form], tuple, float, float]] = {
            frozenset(): ({}, (), 0.0, 0.0)
        }
        for n, instruction in enumerate(instructions):
            following: dict[frozenset, tuple[dict[str, Form], tuple, float, float]] = {}
            saved = saved_outputs(instruction)
            for (forms, ways, ms, size), choice in product(partial.values(), self._choices(instruction)):
                inputs = list(zip(instruction.inputs, choice.inputs, strict=True))
                # What comes from outside the block can have any form.
                if any(forms[t] != form if t in forms else t not in outside for t, form in inputs):
                    continue
                outputs = dict(zip(instruction.outputs, choice.outputs, strict=True))
                specs = [self.program.tensors[t] for t in outputs if t in saved]
                new_bytes = sum(
                    held_bytes(spec, outputs[spec.name], self.ranks)
                    for spec in specs
                    if spec.alias_of is None
                )
                joined = forms | dict(inputs) | outputs
                alive = {t: f for t, f in joined.items() if t in keep or last.get(t, -1) > n}
                key = frozenset(alive.items())
                if key not in following or ms + choice.ms < following[key][2]:
                    way = (*choice.inputs, *choice.outputs)
                    following[key] = alive, (*ways, way), ms + choice.ms, size + new_bytes
            partial = following
        return tuple(
            BlockSignature(
                tuple(forms[t] for t in reads),
                tuple(forms[t] for t in parameters),
                tuple(forms[t] for t in makes),
                ways,
                ms,
                size,
            )
            for forms, ways, ms, size in partial.values()
        )

    def _choices(self, instruction: Instruction) -> list[Signature]:
        choices = signatures(instruction, self.program, self.ranks, self.cost)
        if instruction.inputs or len(instruction.outputs) != 1:
            return choices
        # Every rank computes a constant itself, so it can have any slice of it.
        spec = self.program.tensors[instruction.outputs[0]]
        return [Signature((), (form,), choices[0].ms) for form in forms_of(spec, self.ranks)]


def saved_outputs(instruction: Instruction) -> list[str]:
    """Outputs that stay until the backward; all, where the Program does not say which (`forward_of`)."""
    saved = instruction.attributes.get("saved", range(len(instruction.outputs)))
    return [instruction.outputs[position] for position in saved]
