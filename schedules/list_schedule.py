"""Can a schedule that moves any ready work beat Algorithm 1? List scheduling by critical path, dW as filler.

Beyond the paper. Whenever compute is free, the ready instruction with the longest path behind it runs.
What no all-to-all waits for (weight gradients, optimizer steps, the reassembly of activations for the
backward pass) is filler: it runs when nothing else is ready, which is exactly while an all-to-all is
exposed, and the one that fits the gap best goes first. Messages go when the link is about to fall free, the
one with the longest path behind it first; sums of gradients when no other is ready.

Under a memory limit every instruction has to be admitted by a `MemoryBudget`: whatever is issued, what is
left can go on in the Program's own order without exceeding the limit. Messages that need nothing but
parameters (all-gathers) then wait until they are nearly due: what is gathered early takes memory from what
could be deferred.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lancet_kernels.graph.program import Kind, Phase, Program
from lancet_kernels.graph.reachability import bitset
from lancet_kernels.schedules.clock import INFINITY, Clock, link_of
from lancet_kernels.schedules.lower_bound import critical_path
from lancet_kernels.schedules.ordering import Ready
from lancet_kernels.schedules.peak_memory import MemoryBudget, Storages
from lancet_kernels.schedules.weight_gradients import sums_gradients


@dataclass(frozen=True)
class Policy:
    """How a list schedule decides.

    Attributes:
        oldest_first: fillers in the program's order instead of by best fit. Best fit hides more; oldest first
            completes the buckets of gradient all-reduces earlier, which counts where those are long.
        refuse_beyond: a filler longer than this many times the gap is kept for a later one, if there is one.
        ahead: how long before its latest start a message may go that could go at any time, in durations of
            the longest message.
        reserve: bytes that only messages may use, in sizes of the largest message.
        in_order: what is no filler in the program's order instead of by the longest path behind it. Copies of
            a step have paths as long as each other, and would go side by side instead of in turns.
    """

    oldest_first: bool = False
    refuse_beyond: float = 2.0
    ahead: float = INFINITY
    reserve: float = 0.0
    in_order: bool = False

    def __str__(self) -> str:
        kind = "list schedule in order" if self.in_order else "list schedule"
        fill = "oldest first" if self.oldest_first else "best fit"
        refuse = (
            f"refuse beyond {self.refuse_beyond:g}" if self.refuse_beyond < INFINITY else "refuse nothing"
        )
        ahead = f", messages {self.ahead:g} ahead" if self.ahead < INFINITY else ""
        return f"{kind}, {fill}, {refuse}{ahead}" + (f", reserve {self.reserve:g}" if self.reserve else "")


FREE = [Policy(oldest, refuse) for oldest in (False, True) for refuse in (2.0, 1.0, INFINITY)]
"""Without a memory limit."""
FREE += [Policy(ahead=2.0), Policy(ahead=8.0)]
FREE += [Policy(oldest, refuse, in_order=True) for oldest in (False, True) for refuse in (2.0, INFINITY)]
LIMITED = [Policy(ahead=ahead, reserve=reserve) for ahead in (2.0, 8.0) for reserve in (0.0, 2.0)]


class Work:
    """What all list schedules of a program share: critical paths, what is urgent, what is filler, what is due
    when."""

    def __init__(self, program: Program, ms: Sequence[float]):
        self.program, self.ms = program, ms
        self.priority = critical_path(program, ms)
        instructions = program.instructions
        self.is_urgent = [x.kind.is_communication and not sums_gradients(x) for x in instructions]
        self.urgent = bitset([i for i, urgent in enumerate(self.is_urgent) if urgent])
        self.needed_by_none = [not d & self.urgent for d in program.reachability.descendants]
        self.is_filler = [
            unneeded or _waits_for_backward(program, i) for i, unneeded in enumerate(self.needed_by_none)
        ]
        self.storages = Storages(program)
        self.is_free = [
            x.kind is Kind.COMPUTE and not ms[i] and not self.storages.born[i]
            for i, x in enumerate(instructions)
        ]
        """Views and waits: taking neither time nor memory."""
        messages = [i for i, x in enumerate(instructions) if x.kind.is_communication]
        self.links = {link_of(instructions[i]) for i in messages}
        self.longest_message = max((ms[i] for i in messages), default=0.0)
        self.largest_message = max((self._bytes_made(i) for i in messages), default=0)
        self.latest_start = self._latest_starts()

    def _bytes_made(self, i: int) -> int:
        return sum(self.storages.bytes[s] for s in self.storages.born[i])

    def is_main(self, i: int) -> bool:
        """Computation that is no filler: by it we tell how far a schedule is."""
        return self.program.instructions[i].kind is Kind.COMPUTE and not self.is_filler[i]

    def _latest_starts(self) -> list[float]:
        """By position of each urgent message: the milliseconds of main computation after which it has to be
        on the link, so that it and all later ones arrive before their first readers' turn."""
        passed, elapsed = [], 0.0
        for i, ms in enumerate(self.ms):
            passed.append(elapsed)
            elapsed += ms if self.is_main(i) else 0.0
        latest = [INFINITY] * len(self.ms)
        due = {
            i: passed[min(after)]
            for i, after in enumerate(self.program.dependents)
            if self.is_urgent[i] and after
        }
        next_start = INFINITY
        for i in sorted(due, key=lambda i: (due[i], i), reverse=True):
            next_start = latest[i] = min(next_start, due[i]) - self.ms[i]
        return latest


class ListScheduler:
    """Plays compute and links forward in time and fixes, step by step, what goes next."""

    MOST_TRIES = 8
    """How many candidates are offered to the memory budget before something else is done."""

    def __init__(self, work: Work, policy: Policy, limit: float | None):
        self.work, self.policy = work, policy
        self.program, self.ms = work.program, work.ms
        self.priority = [-float(i) for i in range(len(work.ms))] if policy.in_order else work.priority
        self.clock: Clock[int] = Clock()
        self.budget = None if limit is None else MemoryBudget(work.storages, limit)
        self.reserve = policy.reserve * work.largest_message
        self.dependencies = Ready(self.program)
        self.free: deque[int] = deque()
        self.ready: list[tuple[float, int]] = []
        self.fillers: set[int] = set()
        self.messages: list[tuple[float, int]] = []
        self.sums: deque[int] = deque()
        self.order: list[int] = []
        self.is_issued = [False] * len(self.program)
        self.unsent = work.urgent
        self.arrived = 0
        self.main_ms = 0.0
        self.loaded_until: dict[str, float] = {}
        """By link, when all that was sent is through."""

    def schedule(self) -> list[int]:
        for start in self.dependencies.at_first:
            self._make_ready(start)
        while len(self.order) < len(self.program):
            self._receive()
            i = self._next_compute()
            if self._send_before(self.clock.now + (0.0 if i is None else self.ms[i])):
                # What was sent took memory, or made something ready.
                self._put_back(i)
            elif i is not None:
                self._compute(i)
            elif not self.clock.is_idle:
                self.clock.wait()
            else:
                self._issue_first()
        return self.order

    def _receive(self) -> None:
        """Take note of the messages that are through by now."""
        self.clock.catch_up()
        for i in self.clock.sent[self.arrived :]:
            self._done(i)
        self.arrived = len(self.clock.sent)

    def _make_ready(self, i: int) -> None:
        if self.work.is_free[i]:
            self.free.append(i)
        elif self.work.is_urgent[i]:
            heapq.heappush(self.messages, (-self.priority[i], i))
        elif self.program.instructions[i].kind.is_communication:
            self.sums.append(i)
        elif self.work.is_filler[i]:
            self.fillers.add(i)
        else:
            heapq.heappush(self.ready, (-self.priority[i], i))

    def _put_back(self, i: int | None) -> None:
        if i is not None:
            self._make_ready(i)

    def _issue(self, i: int) -> None:
        self.order.append(i)
        self.is_issued[i] = True
        if self.budget is not None:
            self.budget.issue(i)

    def _done(self, i: int) -> None:
        for j in self.dependencies.done(i):
            self._make_ready(j)

    def _compute(self, i: int) -> None:
        self._issue(i)
        self.clock.compute(i, self.ms[i], ())
        if self.work.is_main(i):
            self.main_ms += self.ms[i]
        self._done(i)

    def _send(self, i: int) -> None:
        self._issue(i)
        instruction = self.program.instructions[i]
        link, is_urgent = link_of(instruction), instruction.kind is not Kind.ALL_REDUCE
        self.clock.send(i, self.ms[i], (), link=link, is_urgent=is_urgent)
        self.unsent &= ~(1 << i)
        self.loaded_until[link] = max(self.loaded_until.get(link, 0.0), self.clock.now) + self.ms[i]

    def _send_before(self, moment: float) -> bool:
        """Give work to every link that would be without before `moment`. -> was there any?"""
        sent = False
        while True:
            found = self._next_message(moment)
            if found is None:
                return sent
            self._send(found)
            sent = True

    def _next_message(self, moment: float) -> int | None:
        """The most urgent message that may go; if there is none, a sum of gradients."""
        if all(self.loaded_until.get(link, 0.0) > moment for link in self.work.links):
            return None
        aside: list[tuple[float, int]] = []
        found = None
        while self.messages and found is None and len(aside) < self.MOST_TRIES:
            entry = heapq.heappop(self.messages)
            if self._may_go(entry[1], moment):
                found = entry[1]
            else:
                aside.append(entry)
        for entry in aside:
            heapq.heappush(self.messages, entry)
        if found is None and self.sums and self._may_go(self.sums[0], moment):
            found = self.sums.popleft()
        return found

    def _may_go(self, i: int, moment: float) -> bool:
        if self.loaded_until.get(link_of(self.program.instructions[i]), 0.0) > moment:
            return False
        early = self.work.latest_start[i] - self.policy.ahead * self.work.longest_message
        if self.policy.ahead < INFINITY and self.work.is_urgent[i] and self.main_ms < early:
            return False
        return self.budget is None or self.budget.admits(i)

    def _issue_first(self) -> None:
        """Nothing is under way and nothing is wanted: go on with the program's own order."""
        i = self._first()
        assert self.dependencies.is_ready(i), "the first instruction that is left waits for nothing"
        self._take(i)
        if self.program.instructions[i].kind.is_communication:
            self._send(i)
        else:
            self._compute(i)

    def _first(self) -> int:
        if self.budget is not None:
            return self.budget.first
        return self.is_issued.index(False)

    def _take(self, i: int) -> int:
        """Remove an instruction from wherever it waits."""
        self.fillers.discard(i)
        if i in self.sums:
            self.sums.remove(i)
        for heap in (self.ready, self.messages):
            if (-self.priority[i], i) in heap:
                heap.remove((-self.priority[i], i))
                heapq.heapify(heap)
        return i

    def _next_compute(self) -> int | None:
        if self.free:
            return self.free.popleft()
        if self.ready:
            found = self._most_urgent()
            return self._make_room() if found is None else found
        return self._filler_for_gap()

    def _most_urgent(self) -> int | None:
        """The admitted instruction with the longest path behind it."""
        aside: list[tuple[float, int]] = []
        found = None
        while self.ready and found is None and len(aside) < self.MOST_TRIES:
            entry = heapq.heappop(self.ready)
            if self.budget is None or self.budget.admits(entry[1], self.reserve):
                found = entry[1]
            else:
                aside.append(entry)
        for entry in aside:
            heapq.heappush(self.ready, entry)
        return found

    def _make_room(self) -> int | None:
        """What frees memory, or the first instruction that is left; None: there is only waiting."""
        assert self.budget is not None  # without one, the most urgent is always admitted
        budget = self.budget
        freeing = [i for i in self.fillers if budget.frees(i) > 0]
        for i in heapq.nsmallest(self.MOST_TRIES, freeing):
            if budget.admits(i):
                return self._take(i)
        first = self._first()
        if self.dependencies.is_ready(first) and self.program.instructions[first].kind is Kind.COMPUTE:
            return self._take(first)
        return None

    def _filler_for_gap(self) -> int | None:
        """The filler that fits best what is left until the next message is through."""
        until = self.clock.busy_until
        if until == INFINITY:
            chosen = heapq.nlargest(self.MOST_TRIES, self.fillers, key=lambda i: (self.priority[i], -i))
        else:
            gap = until - self.clock.now
            most = self.policy.refuse_beyond * gap
            fitting = [i for i in self.fillers if self.ms[i] <= most or not self._later(i)]
            key = None if self.policy.oldest_first else lambda i: (abs(gap - self.ms[i]), i)
            chosen = heapq.nsmallest(self.MOST_TRIES, fitting, key=key)
        for i in chosen:
            if self.budget is None or self.budget.admits(i):
                return self._take(i)
        return None

    def _later(self, filler: int) -> bool:
        """Will another message come that this filler could overlap?"""
        if self.work.needed_by_none[filler]:
            return bool(self.unsent)
        return bool(self.unsent & ~self.program.reachability.descendants[filler])


def _waits_for_backward(program: Program, i: int) -> bool:
    """A forward computation whose results only the backward pass reads."""
    instruction = program.instructions[i]
    if instruction.phase is not Phase.FORWARD or instruction.kind is not Kind.COMPUTE:
        return False
    readers = [program.instructions[j] for j in program.dependents[i]]
    return bool(readers) and all(r.phase is not Phase.FORWARD for r in readers)
