"""List scheduling by critical path, with weight gradients as filler. Goes beyond the paper's Algorithm 1,
which moves weight gradients only.

Whenever compute is idle, the ready instruction with the longest path to the end of the program runs.
Instructions that no all-to-all depends on (weight gradients, optimizer steps, the reassembly of activations
for the backward pass) are fillers: they run when nothing else is ready, while an all-to-all is exposed; the
filler that fits the gap best goes first. A message is sent when the link is about to become idle, the one
with the longest path first; gradient all-reduces only when no other message is ready.

Under a memory limit a `MemoryBudget` must admit each instruction: after any instruction that it admits, the
remaining ones can run in the Program's own order within the limit. Messages that read only parameters
(all-gathers) are then sent shortly before they are needed, because gathering early takes memory that deferred
instructions could use.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from lancet_kernels.graph.program import Kind, Phase, Program, bitset
from lancet_kernels.schedules.order.ordering import Ready, sums_gradients
from lancet_kernels.schedules.time.peak_memory import MemoryBudget, Storages
from lancet_kernels.schedules.time.simulate import INFINITY, Clock, critical_path, link_of


@dataclass(frozen=True)
class Policy:
    """Options of a list schedule.

    Attributes:
        oldest_first: fillers run in program order instead of by best fit. Best fit hides more; oldest first
            completes the buckets of gradient all-reduces earlier, which matters if all-reduces are long.
        refuse_beyond: a filler longer than this many times the gap is saved for a later gap, if there is one.
        ahead: how early a message may be sent before its latest start, in durations of the longest message.
        in_order: instructions other than fillers run in program order instead of by longest path. The copies
            of a duplexed step have equally long paths, and would otherwise not alternate.
    """

    oldest_first: bool = False
    refuse_beyond: float = 2.0
    ahead: float = INFINITY
    in_order: bool = False

    def __str__(self) -> str:
        kind = "list schedule in order" if self.in_order else "list schedule"
        fill = "oldest first" if self.oldest_first else "best fit"
        refuse = (
            f"refuse beyond {self.refuse_beyond:g}" if self.refuse_beyond < INFINITY else "refuse nothing"
        )
        ahead = f", messages {self.ahead:g} ahead" if self.ahead < INFINITY else ""
        return f"{kind}, {fill}, {refuse}{ahead}"


FREE = [Policy(True, refuse, in_order=in_order) for in_order in (True, False) for refuse in (2.0, INFINITY)]
"""The policies that are tried without a memory limit, the one that is best most often first. Five others were
best by 0.1 % at most: best fit that refuses beyond 2, or in order; oldest first that refuses beyond 1;
messages 8 ahead. (18 programs of 1,551 to 4,844 instructions on p3dn, p4de and dgx-h100; three with FSDP,
where messages 2 ahead gain up to 3 %; simulated, 2026-11-23.)"""
FREE += [Policy(refuse_beyond=refuse) for refuse in (1.0, INFINITY)]
FREE += [Policy(ahead=2.0)]
# Not tried: fillers by longest path, which weighs the sum behind a bucket's last weight gradient; those that
# are summed before those that are not. They gained 0.12 % at most, and lost as often. (gpt2-s-moe, 6 layers,
# on 16 GPUs of p3dn and p4de and 64 of dgx-h100; simulated, 2026-11-24.)
AGAIN = [Policy(True, refuse, in_order=True) for refuse in (2.0, INFINITY)]
"""The policies that are tried once more, from the best order so far. They gained up to 0.2 % of the
iteration. (14 programs of 1,552 to 9,939 instructions on p3dn and p4de; simulated, 2026-11-24.)"""
LIMITED = [Policy(refuse_beyond=INFINITY), Policy(ahead=2.0)]
LIMITED += [Policy(True, INFINITY, ahead=ahead) for ahead in (INFINITY, 2.0)]
LIMITED += [Policy(True, INFINITY, ahead=8.0, in_order=True)]
"""The policies that are tried within a memory limit. Twelve others together gained
0.2 % of the communication in the mean. (9 programs of 1,900 to 5,800 instructions with FSDP, links of 10, 5
and 2 GB/s; simulated, 2026-11-24.)"""


class Work:
    """Shared by all list schedules of a program: critical paths, and which instructions are urgent messages,
    fillers, or due by a certain time."""

    def __init__(self, program: Program, ms: Sequence[float]):
        self.program, self.ms = program, ms
        self.priority = critical_path(program, ms)
        instructions = program.instructions
        self.is_urgent = [x.kind.is_communication and not sums_gradients(x) for x in instructions]
        self.urgent = bitset([i for i, urgent in enumerate(self.is_urgent) if urgent])
        self.needed_by_none = [not d & self.urgent for d in program.descendants]
        self.is_filler = [
            unneeded or _waits_for_backward(program, i) for i, unneeded in enumerate(self.needed_by_none)
        ]
        self.storages = Storages(program)
        self.is_free = [
            x.kind is Kind.COMPUTE and not ms[i] and not self.storages.born[i]
            for i, x in enumerate(instructions)
        ]
        """Views and waits, which take neither time nor memory."""
        self.is_main = [x.kind is Kind.COMPUTE and not self.is_filler[i] for i, x in enumerate(instructions)]
        """Is it computation other than filler? The time of these measures the progress of a schedule."""
        messages = [i for i, x in enumerate(instructions) if x.kind.is_communication]
        self.link_of = {i: link_of(instructions[i]) for i in messages}
        """The link of each message, by position."""
        self.longest_message = max((ms[i] for i in messages), default=0.0)
        self.latest_start = self._latest_starts()

    def in_order(self, order: Sequence[int]) -> Work:
        """The same of the program in another order."""
        return Work(self.program.reordered(order), [self.ms[i] for i in order])

    def _latest_starts(self) -> list[float]:
        """By position of each urgent message: after how many milliseconds of main computation it must be sent
        at the latest, so that it and all later messages arrive before their first readers run."""
        passed, elapsed = [], 0.0
        for i, ms in enumerate(self.ms):
            passed.append(elapsed)
            elapsed += ms if self.is_main[i] else 0.0
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


class Fillers:
    """The ready fillers, in each order in which one is asked for. Args: oldest_first: as in `Policy`."""

    def __init__(self, ms: Sequence[float], priority: Sequence[float], oldest_first: bool) -> None:
        self._ms, self._priority, self._oldest_first = ms, priority, oldest_first
        self._by_age: list[int] = []
        self._by_path: list[tuple[float, int]] = []
        self._shorter: list[tuple[float, int]] = []
        self._longer: list[tuple[float, int]] = []

    def __iter__(self) -> Iterator[int]:
        """Oldest first."""
        return iter(self._by_age)

    def _queues(self, i: int) -> Iterator[tuple[list, object]]:
        yield self._by_age, i
        yield self._by_path, (-self._priority[i], i)
        if not self._oldest_first:
            yield self._longer, (self._ms[i], i)
            yield self._shorter, (-self._ms[i], i)

    def add(self, i: int) -> None:
        for queue, entry in self._queues(i):
            insort(queue, entry)

    def discard(self, i: int) -> None:
        for queue, entry in self._queues(i):
            place = bisect_left(queue, entry)
            if place == len(queue) or queue[place] != entry:
                return
            del queue[place]

    def by_path(self) -> Iterator[int]:
        """Longest path to the end first."""
        return (i for _, i in self._by_path)

    def by_fit(self, gap: float) -> Iterator[int]:
        """Oldest first, or those whose time is nearest to the gap."""
        if self._oldest_first:
            return iter(self._by_age)
        longer = bisect_left(self._longer, (gap, -1))
        shorter = bisect_right(self._shorter, (-gap, len(self._ms)))
        above = ((ms - gap, i) for ms, i in islice(self._longer, longer, None))
        below = ((gap + minus_ms, i) for minus_ms, i in islice(self._shorter, shorter, None))
        return (i for _, i in heapq.merge(above, below))


class ListScheduler:
    """Simulates compute and links forward in time, and chooses the next instruction at each step."""

    MOST_TRIES = 8
    """The most candidates that are tried against the memory budget at one position."""

    def __init__(self, work: Work, policy: Policy, limit: float | None):
        self.work, self.policy = work, policy
        self.program, self.ms = work.program, work.ms
        self.priority = [-float(i) for i in range(len(work.ms))] if policy.in_order else work.priority
        self.clock: Clock[int] = Clock()
        self.budget = None if limit is None else MemoryBudget(work.storages, limit)
        self.dependencies = Ready(self.program)
        self.ready: list[tuple[float, int]] = []
        self.fillers = Fillers(self.ms, self.priority, policy.oldest_first)
        self.messages: list[tuple[float, int]] = []
        self.sums: deque[int] = deque()
        self.order: list[int] = []
        self.is_issued = [False] * len(self.program)
        self.unsent = work.urgent
        self.main_ms = 0.0
        self.loaded_until = dict.fromkeys(work.link_of.values(), 0.0)
        """By link, when all messages sent so far will have arrived."""
        self.all_loaded_until = min(self.loaded_until.values(), default=INFINITY)

    def schedule(self) -> list[int]:
        length, sent, arrived = len(self.program), self.clock.sent, 0
        self._make_ready(self.dependencies.at_first)
        while len(self.order) < length:
            self.clock.catch_up()
            while arrived < len(sent):
                self._make_ready(self.dependencies.done(sent[arrived]))
                arrived += 1
            if len(self.order) == length:
                break  # only views and waits came after the last message
            i = self._next_compute()
            if self._send_before(self.clock.now + (0.0 if i is None else self.ms[i])):
                # Sending took memory: choose again.
                if i is not None:
                    self._enqueue(i)
            elif i is not None:
                self._compute(i)
            elif not self.clock.is_idle:
                self.clock.wait()
            else:
                self._issue_first()
        return self.order

    def _make_ready(self, ready: list[int]) -> None:
        """Queue what is ready; what is free is issued at once, with all that is free behind it."""
        is_free = self.work.is_free
        for i in ready:  # grows
            if is_free[i]:
                self._issue(i)
                ready += self.dependencies.done(i)
            else:
                self._enqueue(i)

    def _enqueue(self, i: int) -> None:
        if self.work.is_urgent[i]:
            heapq.heappush(self.messages, (-self.priority[i], i))
        elif i in self.work.link_of:
            self.sums.append(i)
        elif self.work.is_filler[i]:
            self.fillers.add(i)
        else:
            heapq.heappush(self.ready, (-self.priority[i], i))

    def _issue(self, i: int) -> None:
        self.order.append(i)
        self.is_issued[i] = True
        if self.budget is not None:
            self.budget.issue(i)

    def _compute(self, i: int) -> None:
        self._issue(i)
        self.clock.compute(i, self.ms[i], ())
        if self.work.is_main[i]:
            self.main_ms += self.ms[i]
        self._make_ready(self.dependencies.done(i))

    def _send(self, i: int) -> None:
        self._issue(i)
        link = self.work.link_of[i]
        is_urgent = self.program.instructions[i].kind is not Kind.ALL_REDUCE
        self.clock.send(i, self.ms[i], (), link=link, is_urgent=is_urgent)
        self.unsent &= ~(1 << i)
        self.loaded_until[link] = max(self.loaded_until[link], self.clock.now) + self.ms[i]
        self.all_loaded_until = min(self.loaded_until.values())

    def _send_before(self, moment: float) -> bool:
        """Send messages on every link that would be idle before `moment`. -> was any sent?"""
        sent = False
        while self.all_loaded_until <= moment and (self.messages or self.sums):
            message = self._next_message(moment)
            if message is None:
                break
            self._send(message)
            sent = True
        return sent

    def _next_message(self, moment: float) -> int | None:
        """The most urgent message that may be sent; without one, a gradient all-reduce."""
        message = self._first_of(self.messages, lambda i: self._may_go(i, moment))
        if message is None and self.sums and self._may_go(self.sums[0], moment):
            message = self.sums.popleft()
        return message

    def _may_go(self, i: int, moment: float) -> bool:
        if self.loaded_until[self.work.link_of[i]] > moment:
            return False
        early = self.work.latest_start[i] - self.policy.ahead * self.work.longest_message
        if self.policy.ahead < INFINITY and self.work.is_urgent[i] and self.main_ms < early:
            return False
        return self.budget is None or self.budget.admits(i)

    def _issue_first(self) -> None:
        """Without a message in flight or a candidate, issue the next instruction in program order."""
        i = self._first()
        assert self.dependencies.is_ready(i), "the first remaining instruction depends only on earlier ones"
        self._take(i)
        if i in self.work.link_of:
            self._send(i)
        else:
            self._compute(i)

    def _first(self) -> int:
        if self.budget is not None:
            return self.budget.first
        return self.is_issued.index(False)

    def _take(self, i: int) -> int:
        """Remove an instruction from the queue that it waits in, and return it."""
        self.fillers.discard(i)
        if i in self.sums:
            self.sums.remove(i)
        for heap in (self.ready, self.messages):
            if (-self.priority[i], i) in heap:
                heap.remove((-self.priority[i], i))
                heapq.heapify(heap)
        return i

    def _next_compute(self) -> int | None:
        if not self.ready:
            return self._filler_for_gap()
        urgent = self._first_of(self.ready, lambda i: self.budget is None or self.budget.admits(i))
        return self._make_room() if urgent is None else urgent

    def _first_of(self, heap: list[tuple[float, int]], may_go: Callable[[int], bool]) -> int | None:
        """Take the instruction with the longest path of those that may go, if it is among the first few."""
        aside: list[tuple[float, int]] = []
        first = None
        while heap and first is None and len(aside) < self.MOST_TRIES:
            entry = heapq.heappop(heap)
            if may_go(entry[1]):
                first = entry[1]
            else:
                aside.append(entry)
        for entry in aside:
            heapq.heappush(heap, entry)
        return first

    def _make_room(self) -> int | None:
        """A filler that frees memory, or the first remaining instruction; None: wait for a message."""
        assert self.budget is not None  # without one, the most urgent is always admitted
        budget = self.budget
        freeing = (i for i in self.fillers if budget.frees(i) > 0)
        for i in islice(freeing, self.MOST_TRIES):
            if budget.admits(i):
                self.fillers.discard(i)
                return i
        first = self._first()
        if self.dependencies.is_ready(first) and self.program.instructions[first].kind is Kind.COMPUTE:
            return self._take(first)
        return None

    def _filler_for_gap(self) -> int | None:
        """The filler that best fits the time until the next message arrives."""
        until = self.clock.busy_until
        if until == INFINITY:
            candidates = self.fillers.by_path()
        else:
            gap = until - self.clock.now
            most = self.policy.refuse_beyond * gap
            by_fit = self.fillers.by_fit(gap)
            candidates = (i for i in by_fit if self.ms[i] <= most or not self._later(i))
        for i in islice(candidates, self.MOST_TRIES):
            if self.budget is None or self.budget.admits(i):
                self.fillers.discard(i)
                return i
        return None

    def _later(self, filler: int) -> bool:
        """Is there an unsent message that this filler could overlap instead?"""
        if self.work.needed_by_none[filler]:
            return bool(self.unsent)
        return bool(self.unsent & ~self.program.descendants[filler])


def _waits_for_backward(program: Program, i: int) -> bool:
    """Is it a forward computation whose results only the backward pass reads?"""
    instruction = program.instructions[i]
    if instruction.phase is not Phase.FORWARD or instruction.kind is not Kind.COMPUTE:
        return False
    readers = [program.instructions[j] for j in program.dependents[i]]
    return bool(readers) and all(r.phase is not Phase.FORWARD for r in readers)
