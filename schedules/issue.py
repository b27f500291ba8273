"""Where in an order is communication issued? As early as its inputs allow.

When a message starts on the link depends on its inputs and on the messages before it, not on the place it
has among computation. A runtime that issues in program order, though, lets it wait for the computation in
front of it: so that nothing is lost there, messages stand right behind what they need.

Example: A, B, X with X an all-to-all that needs A only: A, X, B.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from lancet_kernels.graph.program import Kind, Program


def issue_early(program: Program, order: Sequence[int], *, fixed: Collection[str] = ()) -> list[int]:
    """The same order of computation, of all-to-alls and of all-reduces, with each message moved up.

    Args:
        order: a valid order, as positions.
        fixed: names of messages that stay behind the computation in front of them (blocking ones).
    """
    pending = [len(before) for before in program.dependencies]
    instructions = program.instructions
    messages: tuple[deque[int], deque[int]] = deque(), deque()
    for i in order:
        if instructions[i].kind.is_communication:
            messages[instructions[i].kind is Kind.ALL_REDUCE].append(i)
    held = {i for i in order if instructions[i].kind.is_communication and instructions[i].name in fixed}
    issued: list[int] = []

    def issue(i: int) -> None:
        issued.append(i)
        for j in program.dependents[i]:
            pending[j] -= 1

    def issue_messages() -> None:
        moved = True
        while moved:
            moved = False
            for queue in messages:
                while queue and not pending[queue[0]] and queue[0] not in held:
                    issue(queue.popleft())
                    moved = True

    issue_messages()
    for i in order:
        if instructions[i].kind is Kind.COMPUTE:
            issue(i)
        held.discard(i)
        issue_messages()
    return issued
