"""Which weight gradients overlap which all-to-all? (Lancet, section 4)

*Labelling* (4.1): a dW may overlap an all-to-all if no directed path connects them, in either direction.
*Scheduling* (4.2, Algorithm 1): for each all-to-all in order, repeatedly choose the unused dW whose time fits
its remaining time best, until it is covered; then place every chosen dW right behind its all-to-all.

A dW moves together with the transpose before it and the cast behind it, as one `Unit`. Its gradient
all-reduce and the optimizer follow by their dependencies. Details beyond the paper:

- Computation after an all-to-all that does not depend on it already overlaps it; its time is subtracted.
- If other computation already overlaps an all-to-all, a unit more than twice as long as the remaining time is
  not placed there, because it would cost more than it hides, unless no later all-to-all can overlap it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lancet_kernels.graph.costs.costs import collective_of
from lancet_kernels.graph.program.program import Instruction, Kind, Phase, Program, bitset, connected
from lancet_kernels.schedules.order.ordering import ordered


@dataclass(frozen=True)
class Unit:
    """Weight gradient instructions that move together: positions, milliseconds, and the all-to-alls that all
    of them may overlap, as a bitset of positions."""

    positions: tuple[int, ...]
    ms: float
    overlaps: int


def weight_gradients(program: Program) -> list[int]:
    """Positions of the weight gradient instructions.

    These are the backward computations that no all-to-all depends on, and whose results are read only by
    gradient all-reduces and reduce-scatters, the optimizer, or other weight gradients, or are program
    outputs.
    """
    all_to_alls = bitset(program.positions(Kind.ALL_TO_ALL))
    is_gradient = [False] * len(program)
    positions = []
    for i in reversed(range(len(program))):
        instruction = program.instructions[i]
        if instruction.phase is not Phase.BACKWARD or instruction.kind is not Kind.COMPUTE:
            continue
        if program.reachability.descendants[i] & all_to_alls:
            continue
        readers = (program.instructions[j] for j in program.dependents[i])
        if all(
            is_gradient[program.index[r.name]] or sums_gradients(r) or r.phase is Phase.OPTIMIZER
            for r in readers
        ):
            is_gradient[i] = True
            positions.append(i)
    return positions[::-1]


def sums_gradients(instruction: Instruction) -> bool:
    """Does it sum gradients over ranks: an all-reduce, or a reduce-scatter of the backward (FSDP)?"""
    return instruction.kind is Kind.ALL_REDUCE or (
        instruction.phase is Phase.BACKWARD and collective_of(instruction) == "reduce_scatter"
    )


def overlappable(program: Program) -> dict[int, int]:
    """By position of a weight gradient: the bitset of the all-to-alls without a path to or from it, if
    any."""
    all_to_alls = bitset(program.positions(Kind.ALL_TO_ALL))
    labels = {i: program.reachability.independent(i) & all_to_alls for i in weight_gradients(program)}
    return {i: label for i, label in labels.items() if label}


def units(program: Program, ms: Sequence[float]) -> list[Unit]:
    """Overlappable weight gradients; those connected by edges form one unit, with the intersection of their
    labels."""
    labels = overlappable(program)
    edges = ((i, j) for i in labels for j in program.dependencies[i] if j in labels)
    result = []
    for positions in connected(sorted(labels), edges):
        shared = labels[positions[0]]
        for i in positions[1:]:
            shared &= labels[i]
        if shared:
            result.append(Unit(tuple(positions), sum(ms[i] for i in positions), shared))
    return result


def assign(program: Program, ms: Sequence[float]) -> dict[int, list[Unit]]:
    """Algorithm 1: by position of an all-to-all, the units that overlap it."""
    all_to_alls = program.positions(Kind.ALL_TO_ALL)
    unused = units(program, ms)
    movable = bitset([i for unit in unused for i in unit.positions])
    assigned: dict[int, list[Unit]] = {}
    for a in all_to_alls:
        covered_ms = _covered_ms(program, ms, a, movable)
        remaining = ms[a] - covered_ms
        is_covered = covered_ms > 0
        while remaining > 0:
            candidates = [
                u
                for u in unused
                if u.overlaps >> a & 1 and not (is_covered and u.ms > 2 * remaining and u.overlaps >> (a + 1))
            ]
            if not candidates:
                break
            best = min(candidates, key=lambda u: (abs(remaining - u.ms), u.positions))
            remaining -= best.ms
            is_covered = True
            unused.remove(best)
            assigned.setdefault(a, []).append(best)
    return assigned


def greedy_order(program: Program, ms: Sequence[float]) -> list[int]:
    """All positions, in the order of Algorithm 1. Args: ms: by position."""
    slots: dict[int, float] = {}
    for a, chosen in assign(program, ms).items():
        for unit in chosen:
            slots.update(dict.fromkeys(unit.positions, a + 0.5))
    return order_by_slots(program, slots)


def order_by_slots(program: Program, slots: Mapping[int, float]) -> list[int]:
    """The valid order closest to the original one in which some instructions have another place.

    A slot of 4.5 means right behind position 4. An instruction that depends on a moved one follows it;
    communication is issued as soon as its inputs are computed.
    """
    instructions = program.instructions
    return ordered(program, lambda i: (not instructions[i].kind.is_communication, slots.get(i, float(i))))


def _covered_ms(program: Program, ms: Sequence[float], a: int, movable: int) -> float:
    """Milliseconds of computation, without movable weight gradients, between an all-to-all and the first
    instruction that depends on it."""
    needs = program.reachability.descendants[a]
    total = 0.0
    for i in range(a + 1, len(program)):
        if program.instructions[i].kind is Kind.COMPUTE:
            if needs >> i & 1:
                break
            if not movable >> i & 1:
                total += ms[i]
    return total
