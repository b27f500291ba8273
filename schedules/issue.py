"""Moves communication in an order to right behind its inputs.

The runtime issues in program order, so a message would wait for unrelated computation in front of it. Right
behind its inputs it is issued as early as possible.

Example: A, B, X with X an all-to-all that reads A only: A, X, B.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lancet_kernels.graph.program import Kind, Program
from lancet_kernels.schedules.ordering import ordered


def issue_early(program: Program, order: Sequence[int], *, fixed: Collection[str] = ()) -> list[int]:
    """Move each message up; computations, all-reduces, and other messages each keep their order.

    Args:
        order: a valid order, as positions.
        fixed: names of messages that stay behind the computation before them (blocking ones).
    """
    kinds = [instruction.kind for instruction in program.instructions]
    sums = [i for i in order if kinds[i] is Kind.ALL_REDUCE]
    other_messages = [i for i in order if kinds[i].is_communication and kinds[i] is not Kind.ALL_REDUCE]
    fixed_messages = {i for i in order if kinds[i].is_communication and program.instructions[i].name in fixed}
    # A fixed message keeps its place among the computations.
    in_place = [i for i in order if kinds[i] is Kind.COMPUTE or i in fixed_messages]
    place = {i: k for k, i in enumerate(order)}
    chains = [
        _without(in_place, fixed_messages),
        sums,
        other_messages,
        *_behind_computation(in_place, fixed_messages),
    ]
    return ordered(
        program, lambda i: (kinds[i] is Kind.COMPUTE, kinds[i] is Kind.ALL_REDUCE, place[i]), chains
    )


def _without(positions: Sequence[int], left_out: Collection[int]) -> list[int]:
    return [i for i in positions if i not in left_out]


def _behind_computation(in_place: Sequence[int], fixed_messages: Collection[int]) -> list[list[int]]:
    """Pairs (last computation before it, fixed message)."""
    pairs, last = [], None
    for i in in_place:
        if i not in fixed_messages:
            last = i
        elif last is not None:
            pairs.append([last, i])
    return pairs
