"""Can a schedule that moves any ready work beat Algorithm 1? List scheduling by critical path, dW as filler.

Beyond the paper. Whenever compute is free, the ready instruction with the longest path behind it runs.
What no all-to-all waits for (weight gradients, optimizer steps, the reassembly of activations for the
backward pass) is filler: it runs when nothing else is ready, which is exactly while an all-to-all is
exposed, and the one that fits the gap best goes first. All-to-alls start the moment they can.

The result is never predicted worse than the better of Algorithm 1 and the original order: `best_order`
simulates all of them and takes the best one that respects the memory limit.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lancet_kernels.graph.costs import Cost, durations
from lancet_kernels.graph.program import Kind, Phase, Program
from lancet_kernels.graph.reachability import bitset
from lancet_kernels.schedules.issue import issue_early
from lancet_kernels.schedules.peak_memory import AliveBytes, peak_memory
from lancet_kernels.schedules.simulate import Times, run
from lancet_kernels.schedules.weight_gradients import greedy_order, order_by_slots


@dataclass(frozen=True)
class Ordered:
    """An order that was found: positions, who found it, what it is predicted to take."""

    order: list[int]
    method: str
    times: Times

    @property
    def iteration_ms(self) -> float:
        return self.times.iteration_ms

    def peak_memory_bytes(self, program: Program) -> int:
        """Needs a sweep over all tensors, so it is not known in advance."""
        return peak_memory(program, self.times.start, self.times.end)


def best_order(program: Program, cost: Cost, *, memory_limit_bytes: float | None = None) -> Ordered:
    """The fastest of the original order, Algorithm 1, and the list schedules, its communication issued early.

    Within the memory limit where the original order is; where it is not, the limit is the original's peak.
    """
    ms = durations(program, cost)
    original = measure(program, ms, list(range(len(program))), "original order")
    candidates = [
        original,
        measure(program, ms, order_by_slots(program, {}), "early communication"),
        measure(program, ms, greedy_order(program, ms), "weight gradient greedy"),
        *_list_schedules(program, ms, None),
    ]
    candidates.sort(key=lambda c: c.iteration_ms)
    best = _within(program, ms, candidates, original, memory_limit_bytes)
    return replace(best, order=issue_early(program, best.order))


def _within(
    program: Program,
    ms: Sequence[float],
    candidates: list[Ordered],
    original: Ordered,
    memory_limit_bytes: float | None,
) -> Ordered:
    """The first candidate within the limit, or a list schedule that kept an eye on it."""
    if memory_limit_bytes is None:
        return candidates[0]
    limit = max(memory_limit_bytes, original.peak_memory_bytes(program))
    fastest = next(c for c in candidates if c.peak_memory_bytes(program) <= limit)
    if fastest is candidates[0]:
        return fastest
    careful = [c for c in _list_schedules(program, ms, limit) if c.peak_memory_bytes(program) <= limit]
    return min([fastest, *careful], key=lambda c: c.iteration_ms)


def _list_schedules(program: Program, ms: Sequence[float], limit: float | None) -> Iterator[Ordered]:
    work = _Work(program, ms)
    for oldest_first in (False, True):
        for refuse_beyond in (2.0, 1.0, float("inf")):
            order = _ListScheduler(work, oldest_first, refuse_beyond, limit).schedule()
            fill = "oldest first" if oldest_first else "best fit"
            refuse = f"refuse beyond {refuse_beyond:g}" if refuse_beyond < float("inf") else "refuse nothing"
            yield measure(program, ms, order, f"list schedule, {fill}, {refuse}")


def measure(program: Program, ms: Sequence[float], order: list[int], method: str) -> Ordered:
    """Simulate an order."""
    return Ordered(order, method, run(program, ms, order))


def list_schedule(program: Program, cost: Cost, *, memory_limit_bytes: float | None = None) -> Program:
    """The program in its `best_order`."""
    return program.reordered(best_order(program, cost, memory_limit_bytes=memory_limit_bytes).order)


def list_order(
    program: Program,
    ms: Sequence[float],
    *,
    oldest_first: bool = False,
    refuse_beyond: float = 2.0,
    memory_limit_bytes: float | None = None,
) -> list[int]:
    """One list schedule, as positions.

    Args:
        ms: durations by position.
        oldest_first: fillers in the program's order instead of by best fit. Best fit hides more; oldest first
            completes the buckets of gradient all-reduces earlier, which counts where those are long.
        refuse_beyond: a filler longer than this many times the gap is kept for a later one, if there is one.
        memory_limit_bytes: while more than this is alive, fillers that free memory go before all else.
    """
    return _ListScheduler(_Work(program, ms), oldest_first, refuse_beyond, memory_limit_bytes).schedule()


def critical_path(program: Program, ms: Sequence[float]) -> list[float]:
    """For each instruction, the longest path from its start to the end of the program, in milliseconds.

    All-reduces count too; the optimizer behind them is what they delay.
    """
    length = [0.0] * len(program)
    for i in reversed(range(len(program))):
        length[i] = ms[i] + max((length[j] for j in program.dependents[i]), default=0.0)
    return length


@dataclass
class _Reduce:
    """An all-reduce under way: when it could start, and the milliseconds it still needs the link for."""

    position: int
    ready_at: float
    left: float


class _Work:
    """What all list schedules of a program share: critical paths, the urgent messages, what is filler."""

    def __init__(self, program: Program, ms: Sequence[float]):
        self.program, self.ms = program, ms
        self.priority = critical_path(program, ms)
        self.urgent = bitset([i for i, x in enumerate(program.instructions) if _is_urgent(x.kind)])
        self.needed_by_none = [not d & self.urgent for d in program.reachability.descendants]
        self.is_filler = [
            unneeded or _waits_for_backward(program, i) for i, unneeded in enumerate(self.needed_by_none)
        ]


class _ListScheduler:
    """Plays the two resources forward in time and fixes, step by step, what goes next."""

    def __init__(
        self,
        work: _Work,
        oldest_first: bool,
        refuse_beyond: float,
        limit: float | None,
    ):
        self.program, self.ms = work.program, work.ms
        self.oldest_first, self.refuse_beyond = oldest_first, refuse_beyond
        self.pending = [len(before) for before in self.program.dependencies]
        self.priority, self.is_filler = work.priority, work.is_filler
        self.needed_by_none = work.needed_by_none
        self.ready: list[tuple[float, int]] = []
        self.fillers: set[int] = set()
        self.urgent: list[tuple[float, int, float]] = []
        self.reduces: deque[_Reduce] = deque()
        self.order: list[int] = []
        self.now = self.link_now = 0.0
        self.link: tuple[float, int] | None = None
        self.unsent = work.urgent
        self.memory = AliveBytes(self.program) if limit is not None else None
        self.limit = limit

    def schedule(self) -> list[int]:
        for i, count in enumerate(self.pending):
            if not count:
                self._make_ready(i, 0.0)
        while len(self.order) < len(self.program):
            self._advance_link()
            i = self._next_compute()
            if i is not None:
                self._issue(i)
                # The link works on while this runs: what it finishes by then becomes ready.
                self.now += self.ms[i]
                self._done(i, self.now)
            elif self.link is not None:
                self.now = self.link[0]
            elif self.reduces:
                self.now = max(self.link_now, self.reduces[0].ready_at) + self.reduces[0].left
        return self.order

    def _issue(self, i: int) -> None:
        self.order.append(i)
        if self.memory is not None:
            self.memory.allocate(i)

    def _done(self, i: int, moment: float) -> None:
        if self.memory is not None:
            self.memory.release(i)
        for j in self.program.dependents[i]:
            self.pending[j] -= 1
            if not self.pending[j]:
                self._make_ready(j, moment)

    def _make_ready(self, i: int, moment: float) -> None:
        kind = self.program.instructions[i].kind
        if kind is Kind.ALL_REDUCE:
            self._issue(i)
            self.reduces.append(_Reduce(i, moment, self.ms[i]))
        elif _is_urgent(kind):
            heapq.heappush(self.urgent, (-self.priority[i], i, moment))
        elif self.is_filler[i]:
            self.fillers.add(i)
        else:
            heapq.heappush(self.ready, (-self.priority[i], i))

    def _advance_link(self) -> None:
        """Finish what the link has finished by now, and start the most urgent message that is ready."""
        while True:
            if self.link is not None:
                if self.link[0] > self.now:
                    return
                self.link_now, i = self.link
                self.link = None
                self._done(i, self.link_now)
            elif self.urgent:
                begin = max(self.urgent[0][2], self.link_now)
                if not self._reduce_until(begin):
                    _, i, _ = heapq.heappop(self.urgent)
                    self._issue(i)
                    self.unsent &= ~(1 << i)
                    self.link = (begin + self.ms[i], i)
            elif not self._reduce_until(self.now):
                return

    def _reduce_until(self, moment: float) -> bool:
        """All-reduces use the link while nothing urgent does. Did one finish by this moment?"""
        if not self.reduces:
            self.link_now = max(self.link_now, moment)
            return False
        head = self.reduces[0]
        end = max(self.link_now, head.ready_at) + head.left
        if end <= moment:
            self.reduces.popleft()
            self.link_now = end
            self._done(head.position, end)
            return True
        head.left -= max(0.0, moment - max(self.link_now, head.ready_at))
        self.link_now = max(self.link_now, moment)
        return False

    def _next_compute(self) -> int | None:
        if self.memory is not None and self.fillers and self.memory.alive > self.limit:
            freeing = max(self.fillers, key=lambda i: (self.memory.net_release(i), -i))
            if self.memory.net_release(freeing) > 0 or not self.ready:
                return self._take(freeing)
        if self.ready:
            return heapq.heappop(self.ready)[1]
        if not self.fillers:
            return None
        if self.link is None:
            return self._take(max(self.fillers, key=lambda i: (self.priority[i], -i)))
        gap = self.link[0] - self.now
        fitting = [i for i in self.fillers if self.ms[i] <= self.refuse_beyond * gap or not self._later(i)]
        if not fitting:
            return None
        if self.oldest_first:
            return self._take(min(fitting))
        return self._take(min(fitting, key=lambda i: (abs(gap - self.ms[i]), i)))

    def _later(self, filler: int) -> bool:
        """Will another all-to-all come that this filler could overlap?"""
        if self.needed_by_none[filler]:
            return bool(self.unsent)
        return bool(self.unsent & ~self.program.reachability.descendants[filler])

    def _take(self, filler: int) -> int:
        self.fillers.discard(filler)
        return filler


def _is_urgent(kind: Kind) -> bool:
    return kind.is_communication and kind is not Kind.ALL_REDUCE


def _waits_for_backward(program: Program, i: int) -> bool:
    """A forward computation whose results only the backward pass reads."""
    instruction = program.instructions[i]
    if instruction.phase is not Phase.FORWARD or instruction.kind is not Kind.COMPUTE:
        return False
    readers = [program.instructions[j] for j in program.dependents[i]]
    return bool(readers) and all(r.phase is not Phase.FORWARD for r in readers)
