"""The times of compute and one link, by looking at every moment at which something ends: a reference for the
clock.

Without all-reduces. A message starts when its inputs are there and the link is free, in issue order; it does
not wait for the computation in front of it.
"""

from collections.abc import Sequence

from lancet_kernels.graph.program import Program


def times(program: Program, ms: Sequence[float]) -> tuple[list[float], list[float]]:
    """-> start and end by position."""
    pending = [len(before) for before in program.dependencies]
    queues: list[list[int]] = [[], []]
    for i, instruction in enumerate(program.instructions):
        queues[instruction.kind.is_communication].append(i)
    start, end = [0.0] * len(program), [0.0] * len(program)
    running: list[int | None] = [None, None]
    now = 0.0
    while any(queues) or any(i is not None for i in running):
        for k, queue in enumerate(queues):
            if running[k] is None and queue and not pending[queue[0]]:
                running[k] = queue.pop(0)
                start[running[k]] = now
        now = min(start[i] + ms[i] for i in running if i is not None)
        for k, i in enumerate(running):
            if i is not None and start[i] + ms[i] <= now:
                end[i], running[k] = now, None
                for j in program.dependents[i]:
                    pending[j] -= 1
    return start, end
