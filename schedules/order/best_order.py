"""The fastest order of a Program within a memory limit: all scheduling methods are simulated, the best one
wins, so it is never predicted to be slower than Algorithm 1 or than the original order.

Local search then moves its instructions one by one, as long as the simulated step gets no longer.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, tee

from lancet_kernels.graph.costs.costs import Cost, durations
from lancet_kernels.graph.program import Program
from lancet_kernels.schedules.order.list_schedule import AGAIN, FREE, LIMITED, ListScheduler, Policy, Work
from lancet_kernels.schedules.order.ordering import greedy_order, order_by_slots
from lancet_kernels.schedules.time.peak_memory import Storages, peak_bytes
from lancet_kernels.schedules.time.simulate import INFINITY, Times, lower_bound_ms, run

SIMULATED = 1_000_000
"""Instructions that one search may simulate: about half a second, or a second where microbatches share sums,
since each step is then simulated with and without them."""
FEWEST_MOVES, MOST_MOVES = 300, 4000
"""Fewer moves are not worth a search: Programs of more than 3,333 instructions stay as they are."""
PATIENCE = 300
"""The search ends after so many moves in turn that did not make the step shorter."""
SPAN = 0.5
"""The mean length of a move, in lengths of the order."""


class LocalSearch:
    """A local search from an order, within a memory limit: its simulated step gets no longer. The same
    arguments give the same order. Args: ms: by position. place: by position, its place in the order."""

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
        self.follows = [x.kind.is_communication or not ms[i] for i, x in enumerate(program.instructions)]
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
            direction = self._earlier if self.random.random() < 0.5 else self._later
            self._try(*direction(i, 1 + int(self.random.expovariate(1 / (SPAN * len(self.order))))))
            if self.iteration_ms < before:
                shorter_at = move
        return self.order

    def _earlier(self, i: int, span: int) -> tuple[int, list[int]]:
        """(place, instructions from there on): i is `span` places earlier, behind what it needs."""
        begin, end = max(0, self.place[i] - span), self.place[i] + 1
        descendants, dependencies = self.program.descendants, self.program.dependencies
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
        window, descendants = self.order[begin : begin + span + 1], self.program.descendants[i]
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
        if self.limit is not None and peak_bytes(self.storages, order) > self.limit:
            return
        self.order, self.iteration_ms = order, iteration_ms
        for place, i in enumerate(window, begin):
            self.place[i] = place


SEARCHED = ", then local search"
WORTHWHILE = 1.005
"""A step of at most so many times the lower bound is not searched."""
LIMITS = (1.0, 1.03, 1.1, 1.17, 1.25, 1.4, 1.6, 2.0, 2.5)
"""Memory limits for which list schedules are made, in peaks of the original order."""


@dataclass(frozen=True)
class Ordered:
    """An order: its positions, the scheduling method, the simulated times, and the iteration of the fastest
    order without a memory limit."""

    storages: Storages
    order: list[int]
    method: str
    times: Times
    without_limit_ms: float | None = None

    @property
    def iteration_ms(self) -> float:
        return self.times.iteration_ms

    @cached_property
    def peak_memory_bytes(self) -> int:
        return peak_bytes(self.storages, self.order)


class OrderSearch:
    """Candidates for the best order of a Program; those without a memory limit are computed lazily, once."""

    def __init__(self, program: Program, cost: Cost) -> None:
        self.program, self.cost = program, cost
        self._free_orders: Iterator[Ordered] = self._make_free()

    @cached_property
    def ms(self) -> list[float]:
        """The duration of each instruction."""
        return durations(self.program, self.cost)

    @cached_property
    def work(self) -> Work:
        """State that all list schedules from the original order share."""
        return Work(self.program, self.ms)

    @cached_property
    def original(self) -> Ordered:
        """The order of the Program."""
        return self._simulated(list(range(len(self.program))), "unchanged order")

    @cached_property
    def enough_ms(self) -> float:
        """No order is faster."""
        return lower_bound_ms(self.program, self.ms) * (1 + 1e-9)

    def best(self, memory_limit_bytes: float | None = None, *, search: bool = False) -> Ordered:
        """The fastest of the original order, early communication, Algorithm 1, and the list schedules.

        Under a memory limit, list schedules are made for one limit after the other, from the original peak up
        to the given limit, each from the best order so far, the rest of which leaves more room than that of
        the original one. Every candidate of a tighter limit counts for a wider one, so that more memory is
        never worse. The search ends at the limit that the fastest order without one keeps to, or where no
        order is faster (`lower_bound_ms`).

        If even the original order exceeds the memory limit, the limit is the peak of the original order.

        Args: search: improve the best order by local search, without a limit and for each of these limits.
        """
        limit = INFINITY if memory_limit_bytes is None else memory_limit_bytes
        free: dict[str, Ordered] = {}
        for candidate in chain(self._free(), self._again() if search else ()):
            free[candidate.method] = candidate
            if self._is_enough(candidate) and candidate.peak_memory_bytes <= limit:
                break
        fastest = _fastest(free.values())
        if search:
            fastest = self._improved(fastest, None)
            free[fastest.method] = fastest
        best = base = self.original
        if self._is_enough(fastest) and fastest.peak_memory_bytes <= limit:
            best = fastest
        for peaks in LIMITS:
            room = int(peaks * self.original.peak_memory_bytes)
            if self._is_enough(best) or (peaks > 1 and room > limit):
                break
            fitting = [c for c in free.values() if c.peak_memory_bytes <= room]
            best = _fastest([best, *fitting])
            if best.iteration_ms <= fastest.iteration_ms:
                break
            policies = LIMITED
            if base is self.original:
                tried = {c.method for c in fitting}
                policies = [policy for policy in LIMITED if str(policy) not in tried]
            best = base = _fastest([best, *self._scheduled(base, policies, room)])
            if search:
                best = base = self._improved(best, room)
        best = _fastest([best, *(c for c in free.values() if c.peak_memory_bytes <= limit)])
        if memory_limit_bytes is None:
            return best
        return replace(best, without_limit_ms=_fastest([best, fastest]).iteration_ms)

    def _free(self) -> Iterator[Ordered]:
        """The candidates that are made without a memory limit."""
        self._free_orders, candidates = tee(self._free_orders)
        return candidates

    def _make_free(self) -> Iterator[Ordered]:
        yield self.original
        yield self._simulated(order_by_slots(self.program, {}), "early communication")
        yield self._simulated(greedy_order(self.program, self.ms), "weight gradient greedy")
        yield from self._scheduled(self.original, FREE, None)

    def _again(self) -> Iterator[Ordered]:
        """List schedules from the best of these."""
        yield from self._scheduled(_fastest(self._free()), AGAIN, None)

    def _scheduled(self, base: Ordered, policies: Sequence[Policy], room: int | None) -> Iterator[Ordered]:
        """List schedules within a limit, from another order than the original."""
        is_original = base is self.original
        work = self.work if is_original else self.work.in_order(base.order)
        for policy in policies:
            order = [base.order[i] for i in ListScheduler(work, policy, room).schedule()]
            yield self._simulated(order, str(policy) if is_original else f"{policy}, from {base.method}")

    def _simulated(self, order: list[int], method: str) -> Ordered:
        return Ordered(self.work.storages, order, method, run(self.program, self.ms, order))

    def _improved(self, candidate: Ordered, room: int | None) -> Ordered:
        """The order after local search within a limit, if it may become faster by much."""
        if candidate.iteration_ms <= WORTHWHILE * self.enough_ms:
            return candidate
        order = LocalSearch(self.program, self.ms, candidate.order, self.work.storages, room).run()
        method = candidate.method.removesuffix(SEARCHED) + SEARCHED
        better = self._simulated(order, method)
        return better if better.iteration_ms < candidate.iteration_ms else candidate

    def _is_enough(self, candidate: Ordered) -> bool:
        """Is no order faster?"""
        return candidate.iteration_ms <= self.enough_ms


def _fastest(candidates: Iterable[Ordered]) -> Ordered:
    return min(candidates, key=lambda c: c.iteration_ms)
