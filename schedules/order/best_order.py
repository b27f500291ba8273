"""The fastest order of a Program within a memory limit: all scheduling methods are simulated, the best one
wins.

The result is never predicted to be slower than Algorithm 1 or than the original order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from lancet_kernels.graph.costs.costs import Cost, durations
from lancet_kernels.graph.program.program import Program
from lancet_kernels.schedules.order.list_schedule import AGAIN, FREE, LIMITED, ListScheduler, Policy, Work
from lancet_kernels.schedules.order.local_search import improved
from lancet_kernels.schedules.order.weight_gradients import greedy_order, order_by_slots
from lancet_kernels.schedules.time.clock import INFINITY
from lancet_kernels.schedules.time.peak_memory import Storages, alive_bytes
from lancet_kernels.schedules.time.simulate import Times, lower_bound_ms, run

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
        return int(max(alive_bytes(self.storages, self.order), default=0))


def best_order(
    program: Program, cost: Cost, *, memory_limit_bytes: float | None = None, search: bool = False
) -> Ordered:
    """The fastest of the original order, early communication, Algorithm 1, and the list schedules.

    Under a memory limit, list schedules are made for one limit after the other, from the original peak up to
    the given limit, each from the best order so far: what remains of an order that is good already leaves
    more room than what remains of the original one. Every candidate of a tighter limit counts for a wider
    one, so that more memory is never worse. The search ends at the limit that the fastest order without one
    keeps to, or where no order is faster (`lower_bound_ms`).

    If even the original order exceeds the memory limit, the limit is the peak of the original order.

    Args: search: improve the best order by local search, without a limit and for each of these limits.
    """
    return OrderSearch(program, cost).best(memory_limit_bytes, search=search)


class OrderSearch:
    """Candidates for the best order of one Program; those without a memory limit are made once, as they are
    asked for."""

    def __init__(self, program: Program, cost: Cost) -> None:
        self.program, self.cost = program, cost
        self._free_orders: list[Ordered] = []
        self._more_free_orders = self._make_free()

    @cached_property
    def ms(self) -> list[float]:
        """The duration of each instruction."""
        return durations(self.program, self.cost)

    @cached_property
    def work(self) -> Work:
        """What all list schedules from the original order share."""
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
        """The best order within a limit, as of `best_order`."""
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
                # The same order again.
                done = {c.method for c in fitting}
                policies = [policy for policy in LIMITED if str(policy) not in done]
            best = base = _fastest([best, *self._scheduled(base, policies, room)])
            if search:
                best = base = self._improved(best, room)
        best = _fastest([best, *(c for c in free.values() if c.peak_memory_bytes <= limit)])
        if memory_limit_bytes is None:
            return best
        return replace(best, without_limit_ms=_fastest([best, fastest]).iteration_ms)

    def _free(self) -> Iterator[Ordered]:
        """The candidates that are made without a memory limit."""
        yield from self._free_orders
        for candidate in self._more_free_orders:
            self._free_orders.append(candidate)
            yield candidate

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
        order = improved(self.program, self.ms, candidate.order, self.work.storages, room)
        method = candidate.method.removesuffix(SEARCHED) + SEARCHED
        better = self._simulated(order, method)
        return better if better.iteration_ms < candidate.iteration_ms else candidate

    def _is_enough(self, candidate: Ordered) -> bool:
        """Is no order faster?"""
        return candidate.iteration_ms <= self.enough_ms


def _fastest(candidates: Iterable[Ordered]) -> Ordered:
    return min(candidates, key=lambda c: c.iteration_ms)
