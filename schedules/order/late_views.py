"""Moves the views of what messages bring right before the first instruction that reads them.

A schedule places a view where its message arrives in the simulation. Where a real collective takes longer,
everything behind the view would stand still. What was sent stays in memory until the view.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from lancet_kernels.graph.program.program import Program
from lancet_kernels.schedules.time.peak_memory import Storages, alive_bytes


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
