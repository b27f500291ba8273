"""Statistics do not stand in the middle of the forward pass: what no later all-to-all needs goes behind
the last one.

The sums of the router losses read what the gate says of the whole batch. Where they stand they would
keep the planner from cutting around them; behind the last forward all-to-all they are in nobody's way.
The order of everything else stays.
"""

from __future__ import annotations

from lancet_kernels.graph.program import Kind, Phase, Program


def sink_statistics(program: Program) -> list[str]:
    """Names of the instructions in the new order: a valid one, for `apply.reorder`."""
    instructions = program.instructions
    all_to_alls = [i for i in program.positions(Kind.ALL_TO_ALL) if instructions[i].phase is Phase.FORWARD]
    if not all_to_alls:
        return [instruction.name for instruction in instructions]
    last = all_to_alls[-1]
    reached = [False] * len(program)
    for i in reversed(range(last + 1)):
        reached[i] = i in all_to_alls or any(reached[j] for j in program.dependents[i])
    stays = [i for i in range(last + 1) if reached[i]]
    sinks = [i for i in range(last + 1) if not reached[i]]
    return [instructions[i].name for i in (*stays, *sinks, *range(last + 1, len(program)))]
