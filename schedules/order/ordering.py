"""Topological orders of a Program: which instructions are ready, the valid order by a given key, and one with
its messages issued early.

Also moves instructions that nothing waits for out of the way: views of messages, statistics, constants.

`read_late`: views of what messages bring stand right before the first instruction that reads them. A
schedule places a view where its message arrives in the simulation. Where a real collective takes longer,
everything behind the view would stand still. What was sent stays in memory until the view.

`sink_statistics`: statistics move to the end of the forward pass and constants to its start, so that ranges
can be cut.

Statistics are instructions that no later all-to-all depends on, such as the sums of the router losses, which
read the gate's results for the whole batch. In their original place they would break a range into two.

Constants are vectors computed from scalars alone (the positions for a keyed gate or dropout). A part reads
its slice of them, so they must be computed before the range.

Behind the last all-to-all, instructions that do not depend on it move too, right before their first reader:
so a range can continue up to the model's head. The order of all other instructions is unchanged.

Which weight gradients overlap which all-to-all? (Lancet, section 4.) *Labelling* (4.1): a dW may overlap an
all-to-all if no directed path connects them, in either direction. *Scheduling* (4.2, Algorithm 1): for each
all-to-all in order, repeatedly choose the unused dW whose time fits its remaining time best, until it is
covered; then place every chosen dW right behind its all-to-all.

A dW moves together with the transpose before it and the cast behind it, as one `Unit`. Its gradient
all-reduce and the optimizer follow by their dependencies. Details beyond the paper:

- Computation after an all-to-all that does not depend on it already overlaps it; its time is subtracted.
- If other computation already overlaps an all-to-all, a unit more than twice as long as the remaining time is
  not placed there, because it would cost more than it hides, unless no later all-to-all can overlap it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import and_
from typing import Any

import networkx
import numpy as np

from lancet_kernels.graph.costs.costs import collective_of
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program, bitset
from lancet_kernels.schedules.time.peak_memory import Storages, alive_bytes


class Ready:
    """Tracks which instructions are ready, as others are done.

    Args: chains: sequences of positions that keep their order, in addition to the dependencies.
    """

    def __init__(self, program: Program, chains: Iterable[Sequence[int]] = ()) -> None:
        self._dependents = [list(after) for after in program.dependents]
        self._missing = [len(before) for before in program.dependencies]
        for chain in chains:
            for before, after in pairwise(chain):
                self._dependents[before].append(after)
                self._missing[after] += 1
        self.at_first = [i for i, missing in enumerate(self._missing) if not missing]

    def is_ready(self, i: int) -> bool:
        """Is everything done that the instruction at position i depends on?"""
        return not self._missing[i]

    def done(self, i: int) -> list[int]:
        """Mark i as done. -> the positions that become ready by that."""
        missing, ready = self._missing, []
        for j in self._dependents[i]:
            missing[j] -= 1
            if not missing[j]:
                ready.append(j)
        return ready


def ordered(program: Program, key: Callable[[int], Any], chains: Iterable[Sequence[int]] = ()) -> list[int]:
    """The valid order in which the next instruction is always the ready one with the smallest key.

    Args:
        key: of a position. chains: as in `Ready`; together with the dependencies they must be acyclic.
    """
    ready = Ready(program, chains)
    heap = [(key(i), i) for i in ready.at_first]
    heapq.heapify(heap)
    order = []
    while heap:
        _, i = heapq.heappop(heap)
        order.append(i)
        for j in ready.done(i):
            heapq.heappush(heap, (key(j), j))
    assert len(order) == len(program), "chains and dependencies must be acyclic"
    return order


def issue_early(program: Program, order: Sequence[int], *, fixed: Collection[str] = ()) -> list[int]:
    """Move each message up to right behind its inputs; computations, all-reduces, and other messages keep
    their order.

    The runtime issues in program order, so a message would wait for unrelated computation in front of it.
    Example: A, B, X with X an all-to-all that reads A only: A, X, B.

    Args:
        order: a valid order, as positions.
        fixed: names of messages that stay behind the computation before them (blocking ones).
    """
    kinds = [instruction.kind for instruction in program.instructions]
    place = {i: k for k, i in enumerate(order)}
    computations: list[int] = []
    sums: list[int] = []
    other_messages: list[int] = []
    chains = [computations, sums, other_messages]
    for i in order:
        if kinds[i] is Kind.COMPUTE:
            computations.append(i)
            continue
        (sums if kinds[i] is Kind.ALL_REDUCE else other_messages).append(i)
        if program.instructions[i].name in fixed:
            chains.append([*computations[-1:], i])
    return ordered(
        program, lambda i: (kinds[i] is Kind.COMPUTE, kinds[i] is Kind.ALL_REDUCE, place[i]), chains
    )


def read_late(program: Program, order: Sequence[int], limit_bytes: float = float("inf")) -> list[int]:
    """The order with each view of a message's result right before its first reader, as far as memory stays
    within a limit. A view that nothing reads comes last.

    Args: order: a valid order of positions, within the limit.
    """
    place = {i: k for k, i in enumerate(order)}
    views = _views_of_messages(program, order)
    first_reader = _first_readers(program, order, views)
    storages = Storages(program)
    alive = np.array(alive_bytes(storages, order), dtype=np.int64)
    touches = storages.touches(order)
    last = {s: place[i] for i in order for s in touches[i]}
    moved = []
    for i in views:
        # What it touches stays until right before the reader.
        longer = [s for s in touches[i] if last[s] < first_reader[i]]
        then = alive[place[i] : first_reader[i]].copy()
        for s in longer:
            then[last[s] + 1 - place[i] :] += storages.bytes[s]
        if not longer or int(then.max()) <= limit_bytes:
            alive[place[i] : first_reader[i]] = then
            last.update(dict.fromkeys(longer, first_reader[i] - 1))
            moved.append(i)
    late = _first_readers(program, order, moved)
    # In one place: views in their own order, then the reader.
    return sorted(order, key=lambda i: (late.get(i, place[i]), i not in late, i))


def _views_of_messages(program: Program, order: Sequence[int]) -> list[int]:
    """Positions of the views of what messages bring, also views of views, in the order."""
    views: dict[int, None] = {}
    for i in order:
        instruction = program.instructions[i]
        if instruction.is_free and program.is_view(instruction) and not instruction.mutates:
            sources = program.dependencies[i]
            if any(j in views or program.instructions[j].kind.is_communication for j in sources):
                views[i] = None
    return list(views)


def _first_readers(program: Program, order: Sequence[int], views: Collection[int]) -> dict[int, int]:
    """By position of a view: the place in the order of its first reader that is none of the views."""
    place, late = {i: k for k, i in enumerate(order)}, dict.fromkeys(views, len(program))
    for i in reversed(order):
        if i in late:
            late[i] = min((late.get(j, place[j]) for j in program.dependents[i]), default=len(program))
    return late


def sink_statistics(program: Program) -> list[str]:
    """Names of the instructions in the new order: a valid one, for `apply.reorder`."""
    instructions = program.instructions
    forward = [i for i, instruction in enumerate(instructions) if instruction.phase is Phase.FORWARD]
    all_to_alls = {i for i in program.positions(Kind.ALL_TO_ALL) if i in set(forward)}
    if not all_to_alls:
        by_phase = sorted(instructions, key=lambda i: i.phase is not Phase.FORWARD)
        return [instruction.name for instruction in by_phase]
    last = max(all_to_alls)
    end = next(
        (i for i in range(last + 1, len(program)) if instructions[i].phase is not Phase.FORWARD), len(program)
    )
    front = _constants(program, end)
    needed = [False] * len(program)
    for i in reversed(range(last + 1)):
        needed[i] = i in all_to_alls or any(needed[j] for j in program.dependents[i])
    before = [i for i in range(last + 1) if needed[i] and i not in front]
    sinks = [i for i in range(last + 1) if not needed[i] and i not in front]
    tail = [i for i in range(last + 1, end) if i not in front]
    behind = _main_path_first(program, last, [*sinks, *tail])
    # Forward instructions that only the backward reads (the transpose of a weight) may be in the backward
    # part of the order; they move to the forward.
    rest = sorted(range(end, len(program)), key=lambda i: instructions[i].phase is not Phase.FORWARD)
    return [instructions[i].name for i in (*sorted(front), *before, *behind, *rest)]


def _main_path_first(program: Program, last: int, positions: list[int]) -> list[int]:
    """Instructions that depend on the last all-to-all keep their order; each other one goes right before its
    first reader among them."""
    follows = {last}
    for i in positions:
        if not follows.isdisjoint(program.dependencies[i]):
            follows.add(i)
    # For an instruction that does not depend on it: its first direct or indirect reader that does.
    place = {i: i for i in follows}
    for i in reversed(positions):
        if i not in follows:
            place[i] = min((place[j] for j in program.dependents[i] if j in place), default=len(program))
    return sorted(positions, key=lambda i: (place[i], i in follows, i))


def _constants(program: Program, end: int) -> set[int]:
    """Positions before `end` of constants: vectors or scalars that are computed from scalars and
    constants."""
    inputs = set(program.inputs)
    constants: set[int] = set()
    for i, instruction in enumerate(program.instructions[:end]):
        if instruction.phase is not Phase.FORWARD or instruction.mutates or instruction.kind.is_communication:
            continue
        is_constant = all(
            program.producer[t] in constants if t not in inputs else not program.tensors[t].shape
            for t in instruction.inputs
        )
        if is_constant and all(len(program.tensors[t].shape) <= 1 for t in instruction.outputs):
            constants.add(i)
    return constants


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
        if program.descendants[i] & all_to_alls:
            continue
        readers = ((j, program.instructions[j]) for j in program.dependents[i])
        if all(is_gradient[j] or sums_gradients(r) or r.phase is Phase.OPTIMIZER for j, r in readers):
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
    all_to_alls, descendants = program.positions(Kind.ALL_TO_ALL), program.descendants
    # Nothing that an all-to-all needs is a weight gradient.
    labels = {
        i: bitset([a for a in all_to_alls if not descendants[a] >> i & 1]) for i in weight_gradients(program)
    }
    return {i: label for i, label in labels.items() if label}


def units(program: Program, ms: Sequence[float]) -> list[Unit]:
    """Overlappable weight gradients; those connected by edges form one unit, with the intersection of their
    labels."""
    labels = overlappable(program)
    graph = networkx.Graph()
    graph.add_nodes_from(labels)
    graph.add_edges_from((i, j) for i in labels for j in program.dependencies[i] if j in labels)
    result = []
    for positions in map(sorted, networkx.connected_components(graph)):
        shared = reduce(and_, (labels[i] for i in positions))
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
    needs = program.descendants[a]
    total = 0.0
    for i in range(a + 1, len(program)):
        if program.instructions[i].kind is Kind.COMPUTE:
            if needs >> i & 1:
                break
            if not movable >> i & 1:
                total += ms[i]
    return total
