"""The fastest order of a Program within a memory limit: all scheduling methods are simulated, the best one
wins.

The result is never predicted to be slower than Algorithm 1 or than the original order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lancet_kernels.graph.costs.costs import Cost, durations
from lancet_kernels.graph.program.program import Program
from lancet_kernels.schedules.order.list_schedule import FREE, LIMITED, ListScheduler, Policy, Work
from lancet_kernels.schedules.order.weight_gradients import greedy_order, order_by_slots
from lancet_kernels.schedules.time.peak_memory import Storages, alive_bytes
from lancet_kernels.schedules.time.simulate import Times, run


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

    If even the original order exceeds the memory limit, the limit is the peak of the original order.
    """
    ms = durations(program, cost)
    work = Work(program, ms)

    def simulated(order: list[int], method: str) -> Ordered:
        return Ordered(work.storages, order, method, run(program, ms, order))

    def list_schedules(policies: Sequence[Policy], limit: float | None) -> Iterator[Ordered]:
        return (simulated(ListScheduler(work, policy, limit).schedule(), str(policy)) for policy in policies)

    original = simulated(list(range(len(program))), "unchanged order")
    candidates = [
        original,
        simulated(order_by_slots(program, {}), "early communication"),
        simulated(greedy_order(program, ms), "weight gradient greedy"),
        *list_schedules(FREE, None),
    ]
    candidates.sort(key=lambda c: c.iteration_ms)
    if memory_limit_bytes is None:
        return candidates[0]
    limit = max(memory_limit_bytes, original.peak_memory_bytes)
    fitting = [next(c for c in candidates if c.peak_memory_bytes <= limit)]
    if fitting[0] is not candidates[0]:
        fitting += list_schedules(LIMITED, limit)
    best = min(fitting, key=lambda c: c.iteration_ms)
    return replace(best, without_limit_ms=min(best.iteration_ms, candidates[0].iteration_ms))
