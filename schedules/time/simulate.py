"""Simulates an ordered Program: when does each instruction start and end?

Example: A (compute 2) feeds X (all-to-all 3); B (compute 1) is independent; C (compute 1) needs X. In the
order A X B C: A 0-2, X 2-5, B 2-3, C 5-6. The iteration takes 6 ms, of which 2 (3 to 5) are exposed.

The clock of all predictions is a discrete-event simulation of one compute resource and of links.

Compute runs in the given order; an instruction starts when the one before it and its inputs are done. A
message starts on its link once it is issued (the computation before it is done), its inputs are ready, and
the link is idle. A message in flight is never interrupted. When a link becomes idle, the ready message with
the highest priority is next; messages of equal priority keep their order of issue. Gradient all-reduces wait
for all other messages, but one in flight delays messages that become ready meanwhile.

Example, one link: R (all-reduce, 5 ms) issued at 1, X (all-to-all, 2 ms) at 3: R 1-6, X 6-8. With S
(all-reduce) issued at 2, too: X goes before S.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from lancet_kernels.graph.costs.costs import Cost, durations
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program
from lancet_kernels.schedules.time.peak_memory import Storages, peak_bytes

COMPUTE, LINK = "compute", "communication"
"""Names of resources; LINK is the default link of messages without the attribute `link`."""

INFINITY = float("inf")

Key = TypeVar("Key", bound=Hashable)


def link_of(instruction: Instruction) -> str:
    """The link that a message travels on."""
    return instruction.attributes.get("link", LINK)


@dataclass
class _Link(Generic[Key]):
    """Waiting messages (urgent, others); the message in flight, and when it arrives; when the link last
    became idle."""

    waiting: tuple[deque[Key], deque[Key]] = field(default_factory=lambda: (deque(), deque()))
    in_flight: Key | None = None
    until: float = INFINITY
    free_at: float = 0.0


@dataclass
class _Message(Generic[Key]):
    ms: float
    after: tuple[Key, ...]
    issued_at: float


class Clock(Generic[Key]):
    """`compute`, `wait` and `finish` advance the time; `send` issues messages.

    The caller identifies instructions and messages by keys.

    Attributes:
        now: milliseconds; when compute becomes idle.
        start, end: milliseconds by key, of everything that has started, and that has ended.
        sent: the messages that have arrived, in order of arrival.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.start: dict[Key, float] = {}
        self.end: dict[Key, float] = {}
        self.sent: list[Key] = []
        self._messages: dict[Key, _Message[Key]] = {}
        self._links: dict[str, _Link[Key]] = {}
        self._quiet_until = -INFINITY
        """No message starts or arrives before."""

    def compute(self, key: Key, ms: float, after: Iterable[Key], *, issued_at: float = 0.0) -> None:
        """Run an instruction as soon as it is issued and everything in `after` has ended."""
        for k in after:
            ended = self.end.get(k)
            if ended is None:
                self.finish(k)
            elif ended > self.now:
                self.now = ended
        if issued_at > self.now:
            self.now = issued_at
        self.start[key] = self.now
        self.now += ms
        self.end[key] = self.now

    def send(
        self,
        key: Key,
        ms: float,
        after: Iterable[Key],
        *,
        link: str = LINK,
        is_urgent: bool = True,
        issued_at: float | None = None,
    ) -> None:
        """Issue a message on a link, at `issued_at` (None: now)."""
        self._messages[key] = _Message(ms, tuple(after), self.now if issued_at is None else issued_at)
        self._links.setdefault(link, _Link()).waiting[not is_urgent].append(key)
        self._quiet_until = -INFINITY

    def finish(self, key: Key) -> None:
        """Wait until an instruction has ended or a message has arrived."""
        while key not in self.end:
            moved = self._step(INFINITY)
            assert moved, "in a valid order, everything that is waited for has been issued"
        self.now = max(self.now, self.end[key])

    def wait(self) -> None:
        """Wait until the next message arrives. There must be one."""
        before = len(self.sent)
        while len(self.sent) == before:
            moved = self._step(INFINITY)
            assert moved, "there is a message to wait for"
        self.now = max(self.now, self.end[self.sent[-1]])

    def catch_up(self, moment: float | None = None) -> None:
        """Advance the links to a moment (None: now)."""
        until = self.now if moment is None else moment
        while self._quiet_until <= until and self._step(until):
            pass

    @property
    def busy_until(self) -> float:
        """When the next message in flight arrives; infinite if none is in flight."""
        return min((link.until for link in self._links.values()), default=INFINITY)

    @property
    def is_idle(self) -> bool:
        """Is no message in flight or waiting?"""
        return len(self.sent) == len(self._messages)

    def _step(self, until: float) -> bool:
        """Process the next event: a message arrives (at `until` or before), or starts (before `until`).
        -> was there one?"""
        first, first_link, first_queue = INFINITY, None, None
        quiet_until = INFINITY
        for link in self._links.values():
            if link.in_flight is not None:
                quiet_until = min(quiet_until, link.until)
                if link.until <= until and link.until <= first:
                    first, first_link, first_queue = link.until, link, None
                continue
            for queue in link.waiting:
                if queue:
                    moment = max(link.free_at, self._ready_at(queue[0]))
                    quiet_until = min(quiet_until, moment)
                    if moment < until and moment < first:
                        first, first_link, first_queue = moment, link, queue
        if first_link is None:
            # What is computed meanwhile makes no waiting message ready: its inputs were issued before it.
            self._quiet_until = quiet_until
            return False
        self._quiet_until = -INFINITY
        if first_queue is None:
            assert first_link.in_flight is not None
            self.end[first_link.in_flight] = first_link.free_at = first
            self.sent.append(first_link.in_flight)
            first_link.in_flight, first_link.until = None, INFINITY
        else:
            key = first_queue.popleft()
            self.start[key] = first
            first_link.in_flight, first_link.until = key, first + self._messages[key].ms
        return True

    def _ready_at(self, key: Key) -> float:
        """When a message can start if its link is idle; infinite while one of its inputs has not ended."""
        message = self._messages[key]
        return max([message.issued_at, *(self.end.get(k, INFINITY) for k in message.after)])


class Event(NamedTuple):
    """The interval in which an instruction occupies a resource, in milliseconds from the start."""

    name: str
    resource: str
    start_ms: float
    end_ms: float
    kind: Kind
    phase: Phase


@dataclass(frozen=True)
class Times:
    """Start and end by position; the simulated order; its messages, in the order in which they arrived.

    Of several microbatches that share sums of gradients: of the last one, which sums. before: of each of the
    others, as many as `others`.
    """

    start: Mapping[int, float]
    end: Mapping[int, float]
    order: Sequence[int]
    messages: Sequence[int]
    before: Times | None = None
    others: int = 0

    @cached_property
    def compute(self) -> list[int]:
        """The computations, in order."""
        messages = set(self.messages)
        return [i for i in self.order if i not in messages]

    def mean(self, of: Callable[[Times], float]) -> float:
        """The mean over the microbatches."""
        if self.before is None:
            return of(self)
        return (of(self) + self.others * of(self.before)) / (1 + self.others)

    @cached_property
    def iteration_ms(self) -> float:
        """Milliseconds of one microbatch, in the mean."""
        return self.mean(lambda one: one.last_ms)

    @property
    def last_ms(self) -> float:
        """Milliseconds of the last microbatch."""
        return max(self.end.values(), default=0.0)

    @property
    def exposed_ms(self) -> float:
        """Communication time during which compute idles, of one microbatch in the mean."""
        return self.mean(lambda one: sum(one.exposed.values()))

    @cached_property
    def exposed(self) -> dict[int, float]:
        """By position of each message: milliseconds of it during which compute idles.

        Where messages of several links are exposed at once, the one that started first counts.
        """
        covered = [(self.start[i], self.end[i]) for i in self.compute]
        exposed, until = {}, 0.0
        for i in sorted(self.messages, key=lambda i: self.start[i]):
            start, end = max(self.start[i], until), self.end[i]
            if end > start:
                first = bisect_left(covered, start, key=lambda interval: interval[1])
                last = bisect_left(covered, end, key=lambda interval: interval[0])
                hidden = sum(min(end, b) - max(start, a) for a, b in covered[first:last])
                exposed[i] = end - start - hidden
            until = max(until, end)
        return exposed


@dataclass(frozen=True)
class Timeline:
    """A simulated iteration; its events are of the last microbatch, which sums gradients."""

    program: Program
    times: Times
    storages: Storages | None = field(default=None, repr=False)
    """The storages of the program, if they are there already."""

    @property
    def iteration_ms(self) -> float:
        return self.times.iteration_ms

    @cached_property
    def exposed_ms(self) -> float:
        return self.times.exposed_ms

    @property
    def durations_ms(self) -> list[float]:
        """Durations by position; of sums that microbatches share, the share of one."""
        start, end = self.times.start, self.times.end
        return [(end[i] - start[i]) / x.microbatches for i, x in enumerate(self.program.instructions)]

    @cached_property
    def peak_memory_bytes(self) -> int:
        return peak_bytes(self.storages or Storages(self.program), self.times.order)

    @cached_property
    def events(self) -> list[Event]:
        """One event per instruction, without those that take no time (views)."""
        instructions, start, end = self.program.instructions, self.times.start, self.times.end
        places = [(i, COMPUTE) for i in self.times.compute]
        places += [(i, link_of(instructions[i])) for i in self.times.messages]
        return [
            Event(
                instructions[i].name, resource, start[i], end[i], instructions[i].kind, instructions[i].phase
            )
            for i, resource in places
            if end[i] > start[i]
        ]


def simulate(program: Program, cost: Cost, *, blocking: Collection[str] = ()) -> Timeline:
    """Simulate a Program in its own order. `blocking` names communication that nothing overlaps: it starts
    when all compute before it is done, and compute behind it waits for its end."""
    times = run(program, durations(program, cost), range(len(program)), blocking=blocking)
    return Timeline(program, times)


@dataclass(frozen=True)
class Host:
    """The host that issues instructions one after the other. ms: what issuing takes, by position. waits:
    messages that it does not issue before their inputs are there, because it must know their sizes."""

    ms: Sequence[float]
    waits: frozenset[int] = frozenset()


def run(
    program: Program,
    ms: Sequence[float],
    order: Sequence[int],
    *,
    blocking: Collection[str] = (),
    host: Host | None = None,
) -> Times:
    """Simulate another valid order of the Program's positions.

    Args: ms: durations by position. host: None issues computation in no time, and messages when the
        computation before them is done; with a host, a message waits for its own inputs only (an event).
    """
    *before, last = _by_microbatch(program, ms)
    times = _run_once(program, last, order, blocking, host)
    if not before:
        return times
    others = program.microbatches - 1
    return replace(times, before=_run_once(program, before[0], order, blocking, host), others=others)


def _by_microbatch(program: Program, ms: Sequence[float]) -> list[Sequence[float]]:
    """Durations in all microbatches but the last, which do not sum, and in the last one; or only these."""
    if program.microbatches == 1:
        return [ms]
    shared = [instruction.microbatches for instruction in program.instructions]
    without_sums = [0.0 if n > 1 else one for n, one in zip(shared, ms, strict=True)]
    return [without_sums, [n * one for n, one in zip(shared, ms, strict=True)]]


def _run_once(
    program: Program,
    ms: Sequence[float],
    order: Sequence[int],
    blocking: Collection[str],
    host: Host | None,
) -> Times:
    clock: Clock[int] = Clock()
    issued = 0.0
    instructions, dependencies, awaited = program.instructions, program.dependencies, program.awaited
    start, end, waits = clock.start, clock.end, program.waits
    for i in order:
        if host is None and not waits[i]:
            # As `Clock.compute` does it, which would take half of a simulation.
            start[i] = clock.now
            end[i] = clock.now = clock.now + ms[i]
            continue
        if host is not None:
            if i in host.waits:
                issued = max(issued, *(clock.end[k] for k in dependencies[i]))
            issued += host.ms[i]
        instruction = instructions[i]
        if instruction.kind is Kind.COMPUTE:
            clock.compute(i, ms[i], awaited[i], issued_at=issued)
            continue
        is_urgent, link = instruction.kind is not Kind.ALL_REDUCE, link_of(instruction)
        is_blocking = instruction.name in blocking
        moment = max(clock.now, issued) if host is None or is_blocking else issued
        clock.send(i, ms[i], dependencies[i], link=link, is_urgent=is_urgent, issued_at=moment)
        if is_blocking:
            clock.finish(i)
    clock.catch_up(INFINITY)
    return Times(clock.start, clock.end, order, clock.sent)


def critical_path(program: Program, ms: Sequence[float]) -> list[float]:
    """For each instruction, the longest path from its start to the end of the program, in milliseconds.

    All-reduces count too, because the optimizer waits for them.
    """
    length = [0.0] * len(program)
    for i in reversed(range(len(program))):
        length[i] = ms[i] + max([length[j] for j in program.dependents[i]], default=0.0)
    return length


def lower_bound_ms(program: Program, ms: Sequence[float]) -> float:
    """max(compute, each link, critical path), in milliseconds, for durations by position; the mean of it over
    microbatches.

    No order is faster: compute is one resource and each link another, and the instructions on a path of
    dependencies run one after the other. Perhaps none is as fast.
    """
    *before, last = (_lower_bound_ms(program, one) for one in _by_microbatch(program, ms))
    return (last + (program.microbatches - 1) * sum(before)) / program.microbatches


def _lower_bound_ms(program: Program, ms: Sequence[float]) -> float:
    busy: dict[str, float] = {}
    for instruction, duration in zip(program.instructions, ms, strict=True):
        resource = COMPUTE if instruction.kind is Kind.COMPUTE else link_of(instruction)
        busy[resource] = busy.get(resource, 0.0) + duration
    return max([*busy.values(), *critical_path(program, ms)], default=0.0)
