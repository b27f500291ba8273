"""Megatron's order of several microbatches, as a baseline: the forward of a microbatch beside the backward of
the one before, layer by layer in a fixed pattern (1F1B with overlapped all-to-alls). Each dispatch and
combine of one travels beside computation of the other.

Megatron can also delay weight gradients (`delay_wgrad_compute`): `with_delayed_weight_gradients`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

from lancet_kernels.graph.program import Kind, Program
from lancet_kernels.schedules.time.simulate import INFINITY, Clock, link_of

DELAYED = 24
"""The most weight gradients that wait at once: those of two or three layers, whose activations stay alive."""


def paired_order(
    program: Program, backward: Sequence[Sequence[int]], forward: Sequence[Sequence[int]]
) -> list[int]:
    """Positions of a pair in Megatron's order: a backward, and the forward of the next microbatch.

    Args: backward, forward: the positions of each block, as many of each.
    """
    positions: list[int] = []
    for back, forth in zip(backward, forward, strict=True):
        positions += _in_turns(list(_pieces(program, back)), list(_pieces(program, forth)))
    return positions


def _pieces(program: Program, block: Sequence[int]) -> Iterator[list[int]]:
    """A block cut at its all-to-alls: computation, message, computation, message, computation. A block
    without messages is one piece."""
    piece: list[int] = []
    for i in block:
        if program.instructions[i].kind is Kind.ALL_TO_ALL:
            yield piece
            yield [i]
            piece = []
        else:
            piece.append(i)
    yield piece


def _in_turns(back: list[list[int]], forth: list[list[int]]) -> Iterator[int]:
    """Pieces of a backward and a forward block in turns, beginning with the backward's: while the message of
    one travels, the other computes. A message of the forward is issued behind the backward's next piece: the
    host may have to wait for its sizes.

    Example: B1 b1 F1 B2 f1 b2 F2 B3 f2 F3, with messages b1, f1, ... in small letters.
    """
    for k in range(0, max(len(back), len(forth)), 2):
        for piece in (*back[k : k + 1], *forth[max(0, k - 1) : k], *back[k + 1 : k + 2], *forth[k : k + 1]):
            yield from piece


def with_delayed_weight_gradients(
    program: Program, ms: Sequence[float], order: Sequence[int], weight_gradients: Collection[int]
) -> list[int]:
    """The order with its weight gradients delayed: these run whenever computation would wait for a message,
    the oldest first, and at the latest before what reads them (their sums, the optimizer).

    Args: ms: durations by position. order: positions in a valid order. weight_gradients: positions.
    """
    delayed = frozenset(weight_gradients)
    clock: Clock[int] = Clock()
    positions: list[int] = []
    waiting: deque[int] = deque()

    def issue(i: int) -> None:
        instruction = program.instructions[i]
        positions.append(i)
        if instruction.kind is Kind.COMPUTE:
            clock.compute(i, ms[i], program.dependencies[i])
        else:
            clock.send(i, ms[i], program.dependencies[i], link=link_of(instruction), issued_at=0.0)

    def is_ready(i: int) -> bool:
        clock.catch_up()
        return all(clock.end.get(j, INFINITY) <= clock.now for j in program.dependencies[i])

    for i in order:
        if i in delayed:
            waiting.append(i)
            if len(waiting) > DELAYED:
                issue(waiting.popleft())
            continue
        due = set(waiting).intersection(program.dependencies[i])
        while due:  # oldest first: a weight gradient may read another one
            due.discard(waiting[0])
            issue(waiting.popleft())
        if program.instructions[i].kind is Kind.COMPUTE:
            while waiting and not is_ready(i) and is_ready(waiting[0]):
                issue(waiting.popleft())
        issue(i)
    for i in waiting:
        issue(i)
    return positions
