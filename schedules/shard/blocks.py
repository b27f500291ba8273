"""Groups the forward of a Program into blocks without communication inside; sharding is decided per block.

Views, and ops that only prepare weights (a transpose, a broadcast), are free, so every block that reads their
result has its own copy of them. A light op (no matrix product) whose activations all come from one block
joins that block, because communication before it would move as many bytes as after it. The signatures of a
block are all consistent combinations of those of its instructions; among combinations with the same forms at
the block's inputs and outputs only the fastest is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.program.forms import PARTIAL, Form
from lancet_kernels.graph.program.program import Instruction, Phase, Program
from lancet_kernels.schedules.shard.conversions import forms_of, held_bytes
from lancet_kernels.schedules.shard.signatures import Signature, signatures


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


def blocks_of(program: Program, ranks: int, cost: Cost, *, grouped: bool = True) -> list[Block]:
    """The blocks of a forward Program, in a valid order. `grouped` False: one block per instruction that
    reads an activation. Raises: UserError for a Program with a backward, or with collectives in it."""
    wrong = [i for i in program.instructions if i.phase is not Phase.FORWARD or i.kind.is_communication]
    if wrong:
        raise UserError(
            f"program {program.name} for a search of shardings",
            got=f"{wrong[0].name} ({wrong[0].op}, {wrong[0].phase.value})",
            expected="the forward of a model for one device, without collectives",
            do="capture the model without a process group",
        )
    prepares = _preparations(program)
    read_by_instruction = {
        i.name: _activations_read(i, prepares, program.parameter_set) for i in program.instructions
    }
    members: list[list[Instruction]] = []
    home: dict[str, int] = {}
    for instruction in program.instructions:
        if any(t in prepares for t in instruction.outputs):
            continue
        sources = {home.get(t, -1) for t in read_by_instruction[instruction.name]}
        place = min(sources, default=-1)
        joins = grouped and len(sources) == 1 and place >= 0 and not instruction.flops
        if joins:
            # Partial results of a product must be summed before the op, so it starts a new block.
            read = read_by_instruction[instruction.name]
            joins = not _may_be_partial(members[place], read, program, ranks, cost)
        if joins:
            members[place].append(instruction)
        else:
            place = len(members)
            members.append([instruction])
        home.update(dict.fromkeys(instruction.outputs, place))
    ordered = _in_order(members, home, read_by_instruction)
    readers: dict[str, set[str]] = {t: set() for t in program.tensors}
    for block in members:
        for i in block:
            for t in read_by_instruction[i.name]:
                readers[t].add(i.name)
    cache: dict[tuple, tuple[BlockSignature, ...]] = {}
    return [_block(members[m], program, prepares, readers, ranks, cost, cache) for m in ordered]


def _preparations(program: Program) -> dict[str, Instruction]:
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


def _activations_read(
    instruction: Instruction, prepares: dict[str, Instruction], parameters: frozenset[str]
) -> list[str]:
    """Activations and inputs that an instruction reads, directly or through views."""
    read: list[str] = []
    waiting = list(reversed(instruction.inputs))
    while waiting:
        t = waiting.pop()
        if t in prepares:
            waiting += reversed(prepares[t].inputs)
        elif t not in parameters:
            read.append(t)
    return list(dict.fromkeys(read))


def _may_be_partial(
    members: list[Instruction], read: Iterable[str], program: Program, ranks: int, cost: Cost
) -> bool:
    """Can these instructions give one of the tensors `read` in form partial?"""
    partial: set[str] = set()
    for i in members:
        for signature in signatures(i, program, ranks, cost):
            fits = all(f != PARTIAL or t in partial for t, f in zip(i.inputs, signature.inputs, strict=True))
            if fits:
                partial |= {t for t, f in zip(i.outputs, signature.outputs, strict=True) if f == PARTIAL}
    return not partial.isdisjoint(read)


def _in_order(
    members: list[list[Instruction]], home: dict[str, int], reads: dict[str, list[str]]
) -> list[int]:
    """A topological order of the blocks. It exists, because an op joins an earlier block only if it reads no
    other one."""
    before = [
        {home[t] for i in block for t in reads[i.name] if t in home} - {n} for n, block in enumerate(members)
    ]
    order: list[int] = []
    remaining = list(range(len(members)))
    while remaining:
        n = next(n for n in remaining if before[n] <= set(order))
        order.append(n)
        remaining.remove(n)
    return order


def _block(
    members: list[Instruction],
    program: Program,
    prepares: dict[str, Instruction],
    readers: dict[str, set[str]],
    ranks: int,
    cost: Cost,
    cache: dict[tuple, tuple[BlockSignature, ...]],
) -> Block:
    instructions = _with_preparations(members, prepares, program)
    inside = {t for i in instructions for t in i.outputs}
    names = {i.name for i in members}
    read = list(dict.fromkeys(t for i in instructions for t in i.inputs if t not in inside))
    makes = [t for i in members for t in i.outputs if t in program.output_set or readers[t] - names]
    reads = tuple(t for t in read if t not in program.parameter_set)
    parameters = tuple(t for t in read if t in program.parameter_set)
    key = _structure(instructions, reads, parameters, tuple(makes), program)
    if key not in cache:
        cache[key] = _combined(instructions, reads, parameters, tuple(makes), program, ranks, cost)
    return Block(tuple(i.name for i in instructions), reads, parameters, tuple(makes), cache[key])


def _with_preparations(
    members: list[Instruction], prepares: dict[str, Instruction], program: Program
) -> list[Instruction]:
    needed: dict[str, Instruction] = {}
    waiting = [t for i in members for t in i.inputs]
    while waiting:
        t = waiting.pop()
        if t in prepares and prepares[t].name not in needed:
            needed[prepares[t].name] = prepares[t]
            waiting += prepares[t].inputs
    both = {i.name: i for i in members} | needed
    return sorted(both.values(), key=lambda i: program.index[i.name])


def _structure(
    instructions: list[Instruction],
    reads: tuple[str, ...],
    parameters: tuple[str, ...],
    makes: tuple[str, ...],
    program: Program,
) -> tuple:
    """The structure of a block without names: equal for the blocks of repeated layers."""
    number: dict[str, int] = {}
    for i in instructions:
        for t in (*i.inputs, *i.outputs):
            number.setdefault(t, len(number))
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
        tuple((program.tensors[t].shape, program.tensors[t].dtype) for t in number),
        *(tuple(number[t] for t in of) for of in (reads, parameters, makes)),
    )


def _combined(
    instructions: list[Instruction],
    reads: tuple[str, ...],
    parameters: tuple[str, ...],
    makes: tuple[str, ...],
    program: Program,
    ranks: int,
    cost: Cost,
) -> tuple[BlockSignature, ...]:
    """All combinations, instruction by instruction. The form of a tensor is dropped after its last reader."""
    outside = {*reads, *parameters}
    last = {t: n for n, i in enumerate(instructions) for t in i.inputs}
    keep = {*outside, *makes}
    partial: dict[frozenset, tuple[dict[str, Form], tuple, float, float]] = {frozenset(): ({}, (), 0.0, 0.0)}
    for n, instruction in enumerate(instructions):
        following: dict[frozenset, tuple[dict[str, Form], tuple, float, float]] = {}
        choices = _choices(instruction, program, ranks, cost)
        for (forms, ways, ms, size), choice in product(partial.values(), choices):
            if not _fits(instruction, choice, forms, outside):
                continue
            joined = forms | dict(zip(instruction.inputs, choice.inputs, strict=True))
            joined |= dict(zip(instruction.outputs, choice.outputs, strict=True))
            saved = set(saved_outputs(instruction))
            new_bytes = sum(
                held_bytes(program.tensors[t], f, ranks)
                for t, f in zip(instruction.outputs, choice.outputs, strict=True)
                if t in saved and program.tensors[t].alias_of is None
            )
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


def saved_outputs(instruction: Instruction) -> list[str]:
    """Outputs that stay until the backward; all, where the Program does not say which (`forward_of`)."""
    saved = instruction.attributes.get("saved", range(len(instruction.outputs)))
    return [instruction.outputs[position] for position in saved]


def _choices(instruction: Instruction, program: Program, ranks: int, cost: Cost) -> list[Signature]:
    choices = signatures(instruction, program, ranks, cost)
    if instruction.inputs or len(instruction.outputs) != 1:
        return choices
    # Every rank computes a constant itself, so it can have any slice of it.
    spec = program.tensors[instruction.outputs[0]]
    return [Signature((), (form,), choices[0].ms) for form in forms_of(spec, ranks)]


def _fits(instruction: Instruction, choice: Signature, forms: dict[str, Form], outside: set[str]) -> bool:
    """Does every input have the required form, or come from outside the block, where any form is possible?"""
    return all(
        forms[t] == form if t in forms else t in outside
        for t, form in zip(instruction.inputs, choice.inputs, strict=True)
    )
