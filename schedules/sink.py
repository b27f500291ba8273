"""Statistics and constants do not stand in the middle of the forward pass.

Statistics are what no later all-to-all needs: they go behind everything that does not read them. The sums
of the router losses read what the gate says of the whole batch. Where they stand they would keep the
planner from cutting around them; at the end of the forward pass they are in nobody's way.

Constants are vectors made from nothing (the positions that a keyed gate or dropout goes by): they go to the
front, because a part needs its slice of one, which has to exist before the range that is cut.

Behind the last all-to-all the same holds for what does not follow from it: a range can then go on from
there, to the model's head. The order of everything else stays.
"""

from __future__ import annotations

from lancet_kernels.graph.program import Kind, Phase, Program


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
    # What needs no gradient but is read by the backward alone (the transpose of a weight) belongs to the
    # forward, wherever it stood.
    rest = sorted(range(end, len(program)), key=lambda i: instructions[i].phase is not Phase.FORWARD)
    return [instructions[i].name for i in (*sorted(front), *before, *behind, *rest)]


def _main_path_first(program: Program, last: int, positions: list[int]) -> list[int]:
    """What follows from the last all-to-all in its order; all else right before what reads it."""
    follows = {last}
    for i in positions:
        if not follows.isdisjoint(program.dependencies[i]):
            follows.add(i)
    # Of what does not follow, the first of its readers that does, directly or through others.
    place = {i: i for i in follows}
    for i in reversed(positions):
        if i not in follows:
            place[i] = min((place[j] for j in program.dependents[i] if j in place), default=len(program))
    return sorted(positions, key=lambda i: (place[i], i in follows, i))


def _constants(program: Program, end: int) -> set[int]:
    """Before position `end`: made from scalars and other constants alone, and at most a vector."""
    inputs = set(program.inputs)
    found: set[int] = set()
    for i, instruction in enumerate(program.instructions[:end]):
        if instruction.phase is not Phase.FORWARD or instruction.mutates or instruction.kind.is_communication:
            continue
        is_known = all(
            program.producer[t] in found if t not in inputs else not program.tensors[t].shape
            for t in instruction.inputs
        )
        if is_known and all(len(program.tensors[t].shape) <= 1 for t in instruction.outputs):
            found.add(i)
    return found
