"""Where in an order is communication issued? As early as its inputs allow.

When a message starts on the link depends on its inputs and on the messages before it, not on the place it
has among computation. A runtime that issues in program order, though, lets it wait for the computation in
front of it: so that nothing is lost there, messages stand right behind what they need.

Example: A, B, X with X an all-to-all that needs A only: A, X, B.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lancet_kernels.graph.program import Kind, Program
from lancet_kernels.schedules.ordering import ordered


def issue_early(program: Program, order: Sequence[int], *, fixed: Collection[str] = ()) -> list[int]:
    """The same order of computation, of all-to-alls and of all-reduces, with each message moved up.

    Args:
        order: a valid order, as positions.
        fixed: names of messages that stay behind the computation in front of them (blocking ones).
    """
    kinds = [instruction.kind for instruction in program.instructions]
    sums = [i for i in order if kinds[i] is Kind.ALL_REDUCE]
    others = [i for i in order if kinds[i].is_communication and kinds[i] is not Kind.ALL_REDUCE]
    stays = {i for i in order if kinds[i].is_communication and program.instructions[i].name in fixed}
    # A message that stays is no computation, but keeps its place among it.
    in_place = [i for i in order if kinds[i] is Kind.COMPUTE or i in stays]
    place = {i: k for k, i in enumerate(order)}
    chains = [_without(in_place, stays), sums, others, *_behind_computation(in_place, stays)]
    return ordered(
        program, lambda i: (kinds[i] is Kind.COMPUTE, kinds[i] is Kind.ALL_REDUCE, place[i]), chains
    )


def _without(positions: Sequence[int], left_out: Collection[int]) -> list[int]:
    return [i for i in positions if i not in left_out]


def _behind_computation(in_place: Sequence[int], stays: Collection[int]) -> list[list[int]]:
    """Pairs of each message that stays and the last computation before it."""
    pairs, last = [], None
    for i in in_place:
        if i not in stays:
            last = i
        elif last is not None:
            pairs.append([last, i])
    return pairs
