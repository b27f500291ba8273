"""Which weight gradients run while which all-to-all is on its way? (Lancet, section 4)

*Labelling* (4.1): a dW may overlap an all-to-all when no directed path joins them, in either direction.
*Scheduling* (4.2, Algorithm 1): walk the all-to-alls in order; give each one the unused dW whose time fits
what is left of it best, until it is filled; then place every dW right behind its all-to-all.

A dW is rarely alone: the transpose before it and the cast behind it move along, as one `Unit`. Its gradient
all-reduce and optimizer follow by their dependencies. Details beyond the paper:

- Computation that lies behind an all-to-all without needing it fills it already, and is taken off its time.
- A unit more than twice as long as what is left does not go behind an all-to-all that something fills
  already: it would cost more than it hides. If no later all-to-all can take it, it goes there all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lancet_kernels.graph.costs import collective_of
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program
from lancet_kernels.graph.reachability import bitset
from lancet_kernels.schedules.ordering import ordered


@dataclass(frozen=True)
class Unit:
    """Weight gradient instructions that move together: positions, milliseconds, and a bitset of the
    all-to-alls (by position) that they may overlap."""

    positions: tuple[int, ...]
    ms: float
    overlaps: int


def weight_gradients(program: Program) -> list[int]:
    """Positions of the weight gradient instructions.

    A backward computation that no all-to-all waits for, and whose results go only to program outputs,
    gradient all-reduces and reduce-scatters, the optimizer, or other weight gradients.
    """
    all_to_alls = bitset(program.positions(Kind.ALL_TO_ALL))
    is_gradient = [False] * len(program)
    found = []
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
            found.append(i)
    return found[::-1]


def sums_gradients(instruction: Instruction) -> bool:
    """Is it the sum of a gradient over ranks, whole (all-reduce) or a shard of it (FSDP's reduce-scatter)?"""
    return instruction.kind is Kind.ALL_REDUCE or (
        instruction.phase is Phase.BACKWARD and collective_of(instruction) == "reduce_scatter"
    )


def overlappable(program: Program) -> dict[int, int]:
    """For each weight gradient that has any: the bitset of all-to-alls without a path to or from it."""
    all_to_alls = bitset(program.positions(Kind.ALL_TO_ALL))
    labels = {i: program.reachability.independent(i) & all_to_alls for i in weight_gradients(program)}
    return {i: label for i, label in labels.items() if label}


def units(program: Program, ms: Sequence[float]) -> list[Unit]:
    """Overlappable weight gradients, joined along their edges; a joint label is what all of them share."""
    labels = overlappable(program)
    leader = {i: i for i in labels}

    def find(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    for i in labels:
        for j in program.dependencies[i]:
            if j in labels:
                leader[find(i)] = find(j)
    groups: dict[int, list[int]] = {}
    for i in sorted(labels):
        groups.setdefault(find(i), []).append(i)
    found = []
    for positions in groups.values():
        shared = labels[positions[0]]
        for i in positions[1:]:
            shared &= labels[i]
        if shared:
            found.append(Unit(tuple(positions), sum(ms[i] for i in positions), shared))
    return found


def assign(program: Program, ms: Sequence[float]) -> dict[int, list[Unit]]:
    """Algorithm 1: the units that overlap each all-to-all (by its position)."""
    all_to_alls = program.positions(Kind.ALL_TO_ALL)
    unused = units(program, ms)
    movable = bitset([i for unit in unused for i in unit.positions])
    assigned: dict[int, list[Unit]] = {}
    for a in all_to_alls:
        filled = _already_filled(program, ms, a, movable)
        remaining = ms[a] - filled
        is_filling = filled > 0
        while remaining > 0:
            candidates = [
                u
                for u in unused
                if u.overlaps >> a & 1 and not (is_filling and u.ms > 2 * remaining and u.overlaps >> (a + 1))
            ]
            if not candidates:
                break
            best = min(candidates, key=lambda u: (abs(remaining - u.ms), u.positions))
            remaining -= best.ms
            is_filling = True
            unused.remove(best)
            assigned.setdefault(a, []).append(best)
    return assigned


def greedy_order(program: Program, ms: Sequence[float]) -> list[int]:
    """Positions, the weight gradients behind the all-to-alls that they overlap. Args: ms: by position."""
    slots: dict[int, float] = {}
    for a, chosen in assign(program, ms).items():
        for unit in chosen:
            slots.update(dict.fromkeys(unit.positions, a + 0.5))
    return order_by_slots(program, slots)


def order_by_slots(program: Program, slots: Mapping[int, float]) -> list[int]:
    """The valid order nearest to the original one in which some instructions have another place.

    A slot of 4.5 stands for right behind position 4. An instruction that depends on one that moved goes
    behind it; communication is issued as soon as its inputs are made.
    """
    instructions = program.instructions
    return ordered(program, lambda i: (not instructions[i].kind.is_communication, slots.get(i, float(i))))


def _already_filled(program: Program, ms: Sequence[float], a: int, movable: int) -> float:
    """Computation other than movable weight gradients, between an all-to-all and the first one that
    needs it."""
    needs = program.reachability.descendants[a]
    total = 0.0
    for i in range(a + 1, len(program)):
        if program.instructions[i].kind is Kind.COMPUTE:
            if needs >> i & 1:
                break
            if not movable >> i & 1:
                total += ms[i]
    return total
