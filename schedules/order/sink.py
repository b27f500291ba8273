"""Moves statistics to the end of the forward pass and constants to its start, so that ranges can be cut.

Statistics are instructions that no later all-to-all depends on, such as the sums of the router losses, which
read the gate's results for the whole batch. In their original place they would break a range into two.

Constants are vectors computed from scalars alone (the positions for a keyed gate or dropout). A part reads
its slice of them, so they must be computed before the range.

Behind the last all-to-all, instructions that do not depend on it move too, right before their first reader:
so a range can continue up to the model's head. The order of all other instructions is unchanged.
"""

from __future__ import annotations

from lancet_kernels.graph.program.program import Kind, Phase, Program


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
