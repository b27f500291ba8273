"""The fastest order of a Program within a memory limit: all scheduling methods are simulated, the best one
wins.

The result is never predicted to be slower than Algorithm 1 or than the original order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lancet_kernels.graph.costs.costs import Cost, durations
from lancet_kernels.graph.program.program import Program
from lancet_kernels.schedules.order.list_schedule import FREE, LIMITED, ListScheduler, Work
from lancet_kernels.schedules.order.weight_gradients import greedy_order, order_by_slots
from lancet_kernels.schedules.time.clock import INFINITY
from lancet_kernels.schedules.time.peak_memory import Storages, alive_bytes
from lancet_kernels.schedules.time.simulate import Times, lower_bound_ms, run

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


def best_order(program: Program, cost: Cost, *, memory_limit_bytes: float | None = None) -> Ordered:
    """The fastest of the original order, early communication, Algorithm 1, and the list schedules.

    Under a memory limit, list schedules are made for one limit after the other, from the original peak up to
    the given limit, each from the best order so far: what remains of an order that is good already leaves
    more room than what remains of the original one. Every candidate of a tighter limit counts for a wider
    one, so that more memory is never worse.

    If even the original order exceeds the memory limit, the limit is the peak of the original order.
    """
    ms = durations(program, cost)
    work = Work(program, ms)

    def simulated(order: list[int], method: str) -> Ordered:
        return Ordered(work.storages, order, method, run(program, ms, order))

    original = simulated(list(range(len(program))), "unchanged order")
    free = [
        original,
        simulated(order_by_slots(program, {}), "early communication"),
        simulated(greedy_order(program, ms), "weight gradient greedy"),
        *(simulated(ListScheduler(work, policy, None).schedule(), str(policy)) for policy in FREE),
    ]
    limit = INFINITY if memory_limit_bytes is None else memory_limit_bytes
    bound = lower_bound_ms(program, ms)
    best = base = original
    rest = work
    for peaks in LIMITS:
        room = int(peaks * original.peak_memory_bytes)
        if peaks > 1 and room > limit:
            break
        if base is not best:
            base = best
            rest = Work(program.reordered(base.order), [ms[i] for i in base.order])
        fitting = [c for c in free if c.peak_memory_bytes <= room]
        scheduled = []
        for policy in LIMITED:
            order = ListScheduler(rest, policy, room).schedule()
            scheduled.append(simulated([base.order[i] for i in order], str(policy)))
        best = _fastest([best, *fitting, *scheduled])
        if len(fitting) == len(free) or best.iteration_ms <= bound * (1 + 1e-9):
            break
    best = _fastest([best, *(c for c in free if c.peak_memory_bytes <= limit)])
    if memory_limit_bytes is None:
        return best
    return replace(best, without_limit_ms=_fastest([best, *free]).iteration_ms)


def _fastest(candidates: Sequence[Ordered]) -> Ordered:
    return min(candidates, key=lambda c: c.iteration_ms)
