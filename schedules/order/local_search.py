"""Local search: moves instructions of a valid order one by one, as long as the simulated step gets no longer.

    order  A B C X D E     (X: an all-to-all that needs A; E needs X)
    move C earlier         what C needs moves with it, and messages and views that it completes follow it
    move C later           what needs C moves with it

A list schedule decides once, going forward; it cannot see that a weight gradient computed now, which delays
an all-to-all by its own time, lets the sum of its bucket travel while the link would idle. `gpt2-bench-moe`
on 2 ranks (1,363 instructions, emulated link, 2-core CPU, 2026-11-24): 733 moves took the best list schedule
of a duplexed step from 1,195 to 1,139 ms (simulated), 2,900 to 1,130; that of a step with partitioned ranges
from 1,263 to 1,253. Shorter moves gained less (0.1 lengths of the order on average: 1,178, 0.25: 1,160);
accepting longer steps now and then (annealing) gained nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

from lancet_kernels.graph.program.program import Program
from lancet_kernels.schedules.time.peak_memory import Storages, alive_bytes
from lancet_kernels.schedules.time.simulate import run

SIMULATED = 1_000_000
"""Instructions that one search may simulate: about half a second, or a second where microbatches share sums,
since each step is then simulated with and without them."""
FEWEST_MOVES, MOST_MOVES = 300, 4000
"""Fewer moves are not worth a search: Programs of more than 3,333 instructions stay as they are."""
PATIENCE = 300
"""The search ends after so many moves in turn that did not make the step shorter."""
SPAN = 0.5
"""The mean length of a move, in lengths of the order."""


def improved(
    program: Program, ms: Sequence[float], order: Sequence[int], storages: Storages, limit_bytes: float | None
) -> list[int]:
    """The order after a local search within a memory limit: its simulated step is at most as long.

    The same arguments give the same order. Args: ms: by position.
    """
    return _LocalSearch(program, ms, order, storages, limit_bytes).run()


class _LocalSearch:
    """One search. place: by position, its place in the order."""

    def __init__(
        self,
        program: Program,
        ms: Sequence[float],
        order: Sequence[int],
        storages: Storages,
        limit_bytes: float | None,
    ) -> None:
        self.program, self.ms, self.storages, self.limit = program, ms, storages, limit_bytes
        self.order, self.place = list(order), [0] * len(order)
        for place, i in enumerate(order):
            self.place[i] = place
        self.iteration_ms = run(program, ms, order).iteration_ms
        communicates = [instruction.kind.is_communication for instruction in program.instructions]
        self.follows = [sends or not ms[i] for i, sends in enumerate(communicates)]
        """Messages and what takes no time: they follow what completes them."""
        self.movable = [i for i, follows in enumerate(self.follows) if not follows]
        self.random = random.Random(0)

    def run(self) -> list[int]:
        moves = min(MOST_MOVES, SIMULATED // max(1, len(self.order)))
        if not self.movable or moves < FEWEST_MOVES:
            return self.order
        weights = [*accumulate(self.ms[i] ** 0.5 for i in self.movable)]
        shorter_at = 0
        for move in range(moves):
            if move - shorter_at > PATIENCE:
                break
            (i,) = self.random.choices(self.movable, cum_weights=weights)
            before = self.iteration_ms
            self._try(*(self._earlier if self.random.random() < 0.5 else self._later)(i, self._span()))
            if self.iteration_ms < before:
                shorter_at = move
        return self.order

    def _span(self) -> int:
        return 1 + int(self.random.expovariate(1 / (SPAN * len(self.order))))

    def _earlier(self, i: int, span: int) -> tuple[int, list[int]]:
        """(place, instructions from there on): i is `span` places earlier, behind what it needs."""
        begin, end = max(0, self.place[i] - span), self.place[i] + 1
        descendants, dependencies = self.program.reachability.descendants, self.program.dependencies
        moved = [j for j in self.order[begin:end] if j == i or descendants[j] >> i & 1]
        if len(moved) == end - begin:
            return begin, moved
        inside = set(moved)
        for j in moved:  # grows
            for follower in self.program.dependents[j]:
                if (
                    self.follows[follower]
                    and follower not in inside
                    and all(self.place[k] < begin or k in inside for k in dependencies[follower])
                ):
                    inside.add(follower)
                    moved.append(follower)
                    end = max(end, self.place[follower] + 1)
        return begin, moved + [j for j in self.order[begin:end] if j not in inside]

    def _later(self, i: int, span: int) -> tuple[int, list[int]]:
        """(place, instructions from there on): i is `span` places later, before what needs it."""
        begin = self.place[i]
        window, descendants = self.order[begin : begin + span + 1], self.program.reachability.descendants[i]
        moved = [j for j in window if j == i or descendants >> j & 1]
        inside = set(moved)
        return begin, [j for j in window if j not in inside] + moved

    def _try(self, begin: int, window: list[int]) -> None:
        """Take the order with this window if the step gets no longer, and it fits."""
        end = begin + len(window)
        if self.order[begin:end] == window:
            return
        order = [*self.order[:begin], *window, *self.order[end:]]
        iteration_ms = run(self.program, self.ms, order).iteration_ms
        if iteration_ms > self.iteration_ms:
            return
        if self.limit is not None and max(alive_bytes(self.storages, order)) > self.limit:
            return
        self.order, self.iteration_ms = order, iteration_ms
        for place, i in enumerate(window, begin):
            self.place[i] = place
