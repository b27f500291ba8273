"""A lower bound for the iteration time of any order of a Program.

Compute is one resource and each link another, and the instructions on a path of dependencies run one after
the
other: the longest of these times is a lower bound, even if no order reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lancet_kernels.graph.program import Kind, Program
from lancet_kernels.schedules.clock import COMPUTE, link_of


def critical_path(program: Program, ms: Sequence[float]) -> list[float]:
    """For each instruction, the longest path from its start to the end of the program, in milliseconds.

    All-reduces count too, because the optimizer waits for them.
    """
    length = [0.0] * len(program)
    for i in reversed(range(len(program))):
        length[i] = ms[i] + max((length[j] for j in program.dependents[i]), default=0.0)
    return length


def lower_bound_ms(program: Program, ms: Sequence[float]) -> float:
    """max(compute, each link, critical path), in milliseconds, for durations by position."""
    busy: dict[str, float] = {}
    for instruction, duration in zip(program.instructions, ms, strict=True):
        resource = COMPUTE if instruction.kind is Kind.COMPUTE else link_of(instruction)
        busy[resource] = busy.get(resource, 0.0) + duration
    return max([*busy.values(), *critical_path(program, ms)], default=0.0)
