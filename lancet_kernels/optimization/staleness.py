"""Has the routing of a run moved so far from that of the first step that another plan would be faster?

All ranks of an expert group wait for the one that gets most rows, so that exchanges and experts take longer,
and what computes beside them does not. The plans that were candidates for the step are simulated with these
longer times; nothing is measured, captured or planned again.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from lancet_kernels.graph.costs.costs import works_on_received_rows
from lancet_kernels.graph.program.program import Kind
from lancet_kernels.layer.routing_counts import RoutingCounts, busiest
from lancet_kernels.ops.comm.groups import group_of, group_size, is_of_processes
from lancet_kernels.optimization.step import ModelStep
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.time.simulate import Timeline, run

WORTH = 1.02
"""A plan is stale if routing makes another faster by this factor: trials of equal plans differ as much."""

Planned = Sequence[tuple[Plan, Timeline]]


class Staleness:
    """Counts the rows of the first call of a planned step and of each `every`-th one (0: none), where ranks
    can get different ones: not those that a rank stands for.

    Args: planned: the candidates with their timelines, the one that runs first.
    """

    def __init__(self, step: ModelStep, planned: Planned, every: int) -> None:
        group = step.groups.expert
        differ = bool(group) and is_of_processes(group_of(group))
        self._step, self._planned, self._every = step, planned, every if differ else 0
        self._calls = 0
        self._last: RoutingCounts | None = None
        self._at_first = 0.0
        self._said = ""

    def counting(self) -> AbstractContextManager[None]:
        """The context of a call. Collective in a call behind one that was counted, which warns once."""
        if not self._every or len(self._planned) < 2 or _is_captured():
            return contextlib.nullcontext()
        if self._last is not None:
            before = self._said
            if self.stale() and not before:
                warnings.warn(self._said, stacklevel=4)
        self._calls += 1
        if self._calls > 1 and self._calls % self._every:
            return contextlib.nullcontext()
        self._last = RoutingCounts(self._step.model, self._step.groups)
        return self._last.counting()

    def stale(self) -> str:
        """Which plan would be faster now, and why; "": none. Collective in a call behind one that counted."""
        if self._last is not None:
            counts, self._last = self._last.by_layer(), None
            if counts:
                now = busiest(counts, group_size(self._step.groups.expert))
                self._at_first = self._at_first or now
                self._said = faster(self._planned, self._at_first, now)
        return self._said


def faster(planned: Planned, before: float, now: float) -> str:
    """Which of the plans has become faster than the first one, in a sentence; "": none.

    Args: before, now: rows of the busiest rank relative to the mean, in the first step and now.
    """
    at_first, _ = _gain(planned, 1.0)
    gain, plan = _gain(planned, now / before)
    # Where the first plan was predicted slower all along, trials or the caller chose it nevertheless.
    gain /= max(1.0, at_first)
    if gain <= WORTH:
        return ""
    return (
        f"the busiest rank gets {now:.2f} times the mean of rows, {before:.2f} times in the first step: "
        f"{plan.report.chosen or plan.strategy} is predicted {1 - 1 / gain:.0%} faster than this plan; "
        "call optimize() again"
    )


def _gain(planned: Planned, longer: float) -> tuple[float, Plan]:
    """How much faster than the first plan the best of the others is, and this one."""
    own, *others = (_milliseconds(plan, timeline, longer) for plan, timeline in planned)
    best = min(range(len(others)), key=others.__getitem__)
    return own / others[best], planned[1 + best][0]


def _milliseconds(plan: Plan, timeline: Timeline, longer: float) -> float:
    program = timeline.program
    ms = [
        t * (longer if i.kind is Kind.ALL_TO_ALL or works_on_received_rows(i) else 1.0)
        for i, t in zip(program.instructions, timeline.durations_ms, strict=True)
    ]
    return run(program, ms, timeline.times.order, blocking=frozenset(plan.blocking)).iteration_ms


def _is_captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
