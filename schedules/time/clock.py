"""Discrete-event simulation of one compute resource and of links. All predictions use this clock.

Compute runs instructions in the order in which they are passed to it. A message starts on its link once it is
issued (the computation before it is done), its inputs are ready, and the link is idle. A message in flight is
never interrupted. When a link becomes idle, the ready message with the highest priority is next; messages of
equal priority keep their order of issue. Gradient all-reduces have the lowest priority: they wait for all
other messages, but one in flight delays messages that become ready meanwhile.

Example, one link: R (all-reduce, 5 ms) issued at 1, X (all-to-all, 2 ms) at 3: R 1-6, X 6-8. With S
(all-reduce) issued at 2, too: X goes before S.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lancet_kernels.graph.program.program import Instruction

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
        """Process the next event of any link: a message arrives (at `until` or before), or starts (before
        `until`). -> was there an event?"""
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
            self._arrive(first_link)
        else:
            key = first_queue.popleft()
            self.start[key] = first
            first_link.in_flight, first_link.until = key, first + self._messages[key].ms
        return True

    def _arrive(self, link: _Link[Key]) -> None:
        assert link.in_flight is not None
        self.end[link.in_flight] = link.free_at = link.until
        self.sent.append(link.in_flight)
        link.in_flight, link.until = None, INFINITY

    def _ready_at(self, key: Key) -> float:
        """When a message can start if its link is idle; infinite while one of its inputs has not ended."""
        message = self._messages[key]
        ready = message.issued_at
        for k in message.after:
            ready = max(ready, self.end.get(k, INFINITY))
        return ready
