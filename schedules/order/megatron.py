"""Megatron's order of several microbatches, as a baseline: the forward of a microbatch beside the backward of
the one before, layer by layer in a fixed pattern (1F1B with overlapped all-to-alls). Each dispatch and
combine of one travels beside computation of the other.

Megatron can also delay weight gradients (`delay_wgrad_compute`): `with_delayed_weight_gradients`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lancet_kernels.graph.program.program import Kind, Phase, Program
from lancet_kernels.schedules.order.weight_gradients import weight_gradients
from lancet_kernels.schedules.time.clock import INFINITY, Clock, link_of

DELAYED = 24
"""The most weight gradients that wait at once: those of two or three layers, whose activations stay alive."""


@dataclass(frozen=True)
class Block:
    """Positions of the instructions of a layer in one microbatch and phase; ahead: of the gathers that are
    sent before them, behind: of the sums of gradients that are sent after them."""

    microbatch: int
    phase: Phase
    positions: list[int]
    ahead: list[int]
    behind: list[int]

    @property
    def alone(self) -> list[int]:
        """All its positions, one after the other."""
        return [*self.ahead, *self.positions, *self.behind]


def paired_order(program: Program, blocks: Sequence[Block], ends: Sequence[int] = ()) -> list[int]:
    """Positions in Megatron's order; the blocks of the first forward and of the last backward are alone.

    Args: blocks: of all microbatches, in the order of their phases. ends: positions behind all blocks.
    """
    by: dict[tuple[int, Phase], list[Block]] = {}
    for block in blocks:
        by.setdefault((block.microbatch, block.phase), []).append(block)
    last = max(m for m, _ in by)
    positions = [i for block in by[0, Phase.FORWARD] for i in block.alone]
    for m in range(last):
        for back, forth in zip(by[m, Phase.BACKWARD], by[m + 1, Phase.FORWARD], strict=True):
            positions += (*back.ahead, *forth.ahead)
            positions += _in_turns(list(_pieces(program, back)), list(_pieces(program, forth)))
            positions += (*back.behind, *forth.behind)
    return [*positions, *(i for block in by[last, Phase.BACKWARD] for i in block.alone), *ends]


def _pieces(program: Program, block: Block) -> Iterator[list[int]]:
    """A block cut at its all-to-alls: computation, message, computation, message, computation. A block
    without messages is one piece."""
    piece: list[int] = []
    for i in block.positions:
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


def with_delayed_weight_gradients(program: Program, ms: Sequence[float], order: Sequence[int]) -> list[int]:
    """The order with its weight gradients delayed: these run whenever computation would wait for a message,
    the oldest first, and at the latest before what reads them (their sums, the optimizer).

    Args: ms: durations by position. order: positions in a valid order.
    """
    delayed = frozenset(weight_gradients(program))
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
