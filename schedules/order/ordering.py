"""Topological orders of a Program: which instructions are ready, the valid order by a given key, and one with
its messages issued early."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from lancet_kernels.graph.program.program import Kind, Program


class Ready:
    """Tracks which instructions are ready, as others are done.

    Args: chains: sequences of positions that keep their order, in addition to the dependencies.
    """

    def __init__(self, program: Program, chains: Iterable[Sequence[int]] = ()) -> None:
        self._dependents: Sequence[Sequence[int]] = program.dependents
        self._missing = [len(before) for before in program.dependencies]
        self._next: dict[int, list[int]] = {}
        for chain in chains:
            for before, after in pairwise(chain):
                self._next.setdefault(before, []).append(after)
                self._missing[after] += 1
        self.at_first = [i for i, missing in enumerate(self._missing) if not missing]

    def is_ready(self, i: int) -> bool:
        """Is everything done that the instruction at position i depends on?"""
        return not self._missing[i]

    def done(self, i: int) -> Iterator[int]:
        """Mark i as done. -> the positions that become ready by that."""
        for j in (*self._dependents[i], *self._next.get(i, ())):
            self._missing[j] -= 1
            if not self._missing[j]:
                yield j


def ordered(program: Program, key: Callable[[int], Any], chains: Iterable[Sequence[int]] = ()) -> list[int]:
    """The valid order in which the next instruction is always the ready one with the smallest key.

    Args:
        key: of a position. chains: as in `Ready`; together with the dependencies they must be acyclic.
    """
    ready = Ready(program, chains)
    heap = [(key(i), i) for i in ready.at_first]
    heapq.heapify(heap)
    order = []
    while heap:
        _, i = heapq.heappop(heap)
        order.append(i)
        for j in ready.done(i):
            heapq.heappush(heap, (key(j), j))
    assert len(order) == len(program), "chains and dependencies must be acyclic"
    return order


def issue_early(program: Program, order: Sequence[int], *, fixed: Collection[str] = ()) -> list[int]:
    """Move each message up to right behind its inputs; computations, all-reduces, and other messages keep
    their order.

    The runtime issues in program order, so a message would wait for unrelated computation in front of it.
    Example: A, B, X with X an all-to-all that reads A only: A, X, B.

    Args:
        order: a valid order, as positions.
        fixed: names of messages that stay behind the computation before them (blocking ones).
    """
    kinds = [instruction.kind for instruction in program.instructions]
    place = {i: k for k, i in enumerate(order)}
    computations: list[int] = []
    sums: list[int] = []
    other_messages: list[int] = []
    chains = [computations, sums, other_messages]
    for i in order:
        if kinds[i] is Kind.COMPUTE:
            computations.append(i)
            continue
        (sums if kinds[i] is Kind.ALL_REDUCE else other_messages).append(i)
        if program.instructions[i].name in fixed:
            chains.append([*computations[-1:], i])
    return ordered(
        program, lambda i: (kinds[i] is Kind.COMPUTE, kinds[i] is Kind.ALL_REDUCE, place[i]), chains
    )
