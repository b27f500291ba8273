"""Moves the waits of functional collectives right before the first instruction that reads what has arrived.

A schedule places `wait_tensor` where the result arrives in the simulation. Where a real collective takes
longer, everything behind the wait would stand still. What was sent stays in memory until the wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from lancet_kernels.graph.program.from_fx import WAIT
from lancet_kernels.graph.program.program import Program
from lancet_kernels.schedules.time.peak_memory import Storages, alive_bytes


def wait_late(program: Program, order: Sequence[int], limit_bytes: float = float("inf")) -> list[int]:
    """The order with each `wait_tensor`, and the views of its result, right before their first reader, as far
    as memory stays within a limit. A wait that nothing reads comes last.

    Args: order: a valid order of positions, within the limit.
    """
    place = {i: k for k, i in enumerate(order)}
    waits = [i for i in order if program.instructions[i].op == WAIT]
    first_reader = _first_readers(program, order, waits)
    storages = Storages(program)
    alive = np.array(alive_bytes(storages, order), dtype=np.int64)
    touches = storages.touches(order)
    last = {s: place[i] for i in order for s in touches[i]}
    moved = []
    for i in waits:
        # What it touches stays until the reader.
        longer = [s for s in touches[i] if last[s] < first_reader[i]]
        then = alive[place[i] : first_reader[i]].copy()
        for s in longer:
            then[last[s] + 1 - place[i] :] += storages.bytes[s]
        if not longer or int(then.max()) <= limit_bytes:
            alive[place[i] : first_reader[i]] = then
            last.update(dict.fromkeys(longer, first_reader[i]))
            moved.append(i)
    late = _first_readers(program, order, moved)
    # In one place: waits and views in their own order, then the reader.
    return sorted(order, key=lambda i: (late.get(i, place[i]), i not in late, i))


def _first_readers(program: Program, order: Sequence[int], waits: Collection[int]) -> dict[int, int]:
    """By position of a wait, and of the views of what it waits for: the place in the order of their first
    reader that is none of these."""
    waiting, late = set(waits), dict[int, int]()
    for i in order:
        instruction = program.instructions[i]
        is_view = instruction.is_free and program.is_view(instruction) and not instruction.mutates
        if i in waiting or (is_view and not late.keys().isdisjoint(program.dependencies[i])):
            late[i] = len(program)
    place = {i: k for k, i in enumerate(order)}
    for i in reversed(order):
        if i in late:
            late[i] = min((late.get(j, place[j]) for j in program.dependents[i]), default=len(program))
    return late
