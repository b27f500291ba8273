"""Orders of a chain of microbatches: what runs beside what.

none        one microbatch after the other; nothing overlaps an all-to-all
megatron    the forward of a microbatch beside the backward of the one before, layer by layer in a fixed
            pattern: each dispatch and combine of one beside computation of the other
lancet      the same microbatches, with the weight gradients held back to fill what is still exposed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lancet_kernels.graph.program.program import Kind, Phase
from lancet_kernels.predict.step import Block, ModelStep
from lancet_kernels.schedules.time.clock import INFINITY, Clock, link_of

HELD_BACK = 24
"""The most weight gradients that wait at once: those of two or three layers, whose activations stay alive."""


@dataclass(frozen=True)
class Order:
    """positions: of the step's Program, in order of issue. blocking: names of messages that computation waits
    for."""

    positions: tuple[int, ...]
    blocking: frozenset[str] = frozenset()


def in_turn(step: ModelStep) -> Order:
    """One microbatch after the other; computation waits for every all-to-all."""
    blocking = frozenset(i.name for i in step.program.instructions if i.kind is Kind.ALL_TO_ALL)
    return Order(tuple(range(len(step.program))), blocking)


def megatron(step: ModelStep) -> Order:
    """Forward of one microbatch beside the backward of the one before; the blocks of the first forward and of
    the last backward alone."""
    by: dict[tuple[int, Phase], list[Block]] = {}
    for block in step.blocks:
        by.setdefault((block.microbatch, block.phase), []).append(block)
    last = max(m for m, _ in by)
    positions = _alone(by[0, Phase.FORWARD])
    for m in range(last):
        for back, forth in zip(by[m, Phase.BACKWARD], by[m + 1, Phase.FORWARD], strict=True):
            positions += (*back.ahead, *forth.ahead)
            positions += _pair(list(_pieces(step, back)), list(_pieces(step, forth)))
            positions += back.behind
    return Order((*positions, *_alone(by[last, Phase.BACKWARD]), *step.ends))


def _alone(blocks: Sequence[Block]) -> list[int]:
    return [i for block in blocks for i in (*block.ahead, *block.positions, *block.behind)]


def _pieces(step: ModelStep, block: Block) -> Iterator[list[int]]:
    """A block cut at its all-to-alls: computation, message, computation, message, computation. A block
    without messages is one piece."""
    piece: list[int] = []
    for i in block.positions:
        if step.program.instructions[i].kind is Kind.ALL_TO_ALL:
            yield piece
            yield [i]
            piece = []
        else:
            piece.append(i)
    yield piece


def _pair(back: list[list[int]], forth: list[list[int]]) -> Iterator[int]:
    """Pieces of a backward and a forward block in turns, beginning with the backward's: while the message of
    one travels, the other computes. A message of the forward is issued behind the backward's next piece: the
    host may have to wait for its sizes.

    Example: B1 b1 F1 B2 f1 b2 F2 B3 f2 F3, with messages b1, f1, ... in small letters.
    """
    for k in range(0, max(len(back), len(forth)), 2):
        for piece in (*back[k : k + 1], *forth[max(0, k - 1) : k], *back[k + 1 : k + 2], *forth[k : k + 1]):
            yield from piece


def lancet(step: ModelStep, ms: Sequence[float]) -> Order:
    """The fixed pattern without its weight gradients; these run whenever computation would wait for a
    message, the oldest first, and at the latest before their sums are sent.

    Args: ms: durations by position.
    """
    program = step.program
    held = frozenset(weight_gradients(step))
    backbone = megatron(step).positions
    # Sums of gradients, and the optimizer, wait for these.
    due = {i: [j for j in program.dependencies[i] if j in held] for i in backbone}
    clock: Clock[int] = Clock()
    positions: list[int] = []
    waiting: deque[int] = deque()
    done: set[int] = set()

    def issue(i: int) -> None:
        instruction = program.instructions[i]
        positions.append(i)
        done.add(i)
        if instruction.kind is Kind.COMPUTE:
            clock.compute(i, ms[i], program.dependencies[i])
        else:
            clock.send(i, ms[i], program.dependencies[i], link=link_of(instruction), issued_at=0.0)

    def is_ready(i: int) -> bool:
        clock.catch_up()
        return all(clock.end.get(j, INFINITY) <= clock.now for j in program.dependencies[i])

    for i in backbone:
        if i in held:
            waiting.append(i)
            if len(waiting) > HELD_BACK:
                issue(waiting.popleft())
            continue
        for j in due[i]:
            if j not in done:
                waiting.remove(j)
                issue(j)
        if program.instructions[i].kind is Kind.COMPUTE:
            while waiting and not is_ready(i) and is_ready(waiting[0]):
                issue(waiting.popleft())
        issue(i)
    for i in waiting:
        issue(i)
    return Order(tuple(positions))


def weight_gradients(step: ModelStep) -> list[int]:
    """Positions of the matrix products whose results nothing but sums of gradients reads."""
    program = step.program
    return [
        i
        for i, instruction in enumerate(program.instructions)
        if instruction.phase is Phase.BACKWARD
        and instruction.flops
        and instruction.kind is Kind.COMPUTE
        and all(
            program.instructions[reader].kind is not Kind.COMPUTE
            and program.instructions[reader].op.startswith("lancet_prediction.")
            for t in instruction.outputs
            for reader in program.consumers[t]
        )
    ]
