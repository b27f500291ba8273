"""What occupies compute and the links at what time? The one clock that all predictions come from.

Compute runs what it is given, in that order. A message goes onto a link when it was issued (the computation
in front of it is done), what it needs is there, and the link is free. Nothing that travels is interrupted.
When a link falls free, the message of the highest priority that could go is next; within a priority they
keep the order in which they were issued. Gradient all-reduces have the lowest: they wait for all others, but
one that is under way delays whoever comes meanwhile until its bucket is through.

Example, one link: R (all-reduce, 5 ms) issued at 1, X (all-to-all, 2 ms) at 3: R 1-6, X 6-8. With S
(all-reduce) issued at 2, too: X goes before S.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lancet_kernels.graph.program import Instruction

COMPUTE, LINK = "compute", "communication"
"""Resources; LINK is the link of messages that name none in their attribute `link`."""

INFINITY = float("inf")

Key = TypeVar("Key", bound=Hashable)


def link_of(instruction: Instruction) -> str:
    """The link that a message travels on."""
    return instruction.attributes.get("link", LINK)


@dataclass
class _Link(Generic[Key]):
    """Messages that wait (urgent, others); the one under way and when it is through; when it was last
    free."""

    waiting: tuple[deque[Key], deque[Key]] = field(default_factory=lambda: (deque(), deque()))
    under_way: Key | None = None
    until: float = INFINITY
    free_at: float = 0.0


@dataclass
class _Message(Generic[Key]):
    ms: float
    after: tuple[Key, ...]
    issued_at: float


class Clock(Generic[Key]):
    """Time passes by `compute`, `wait` and `finish`; messages are handed over by `send`.

    Instructions and messages go by a key of the caller's.

    Attributes:
        now: milliseconds, when compute is free.
        start, end: of what has begun and what is over, in milliseconds, by key.
        sent: messages in the order in which they were through.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.start: dict[Key, float] = {}
        self.end: dict[Key, float] = {}
        self.sent: list[Key] = []
        self._messages: dict[Key, _Message[Key]] = {}
        self._links: dict[str, _Link[Key]] = {}

    def compute(self, key: Key, ms: float, after: Iterable[Key]) -> None:
        """Run an instruction, as soon as what it needs is there."""
        for k in after:
            self.finish(k)
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
        """Hand a message to a link (issued now, unless it says when)."""
        self._messages[key] = _Message(ms, tuple(after), self.now if issued_at is None else issued_at)
        self._links.setdefault(link, _Link()).waiting[not is_urgent].append(key)

    def finish(self, key: Key) -> None:
        """Wait until an instruction is over or a message is through."""
        while key not in self.end:
            moved = self._step(INFINITY)
            assert moved, "a valid order waits for nothing that was not issued"
        self.now = max(self.now, self.end[key])

    def wait(self) -> None:
        """Until the next message is through. There must be one."""
        before = len(self.sent)
        while len(self.sent) == before:
            moved = self._step(INFINITY)
            assert moved, "there is a message to wait for"
        self.now = max(self.now, self.end[self.sent[-1]])

    def catch_up(self, moment: float | None = None) -> None:
        """Let the links do what they do until a moment (None: now)."""
        while self._step(self.now if moment is None else moment):
            pass

    @property
    def busy_until(self) -> float:
        """When the next message under way is through; infinite if nothing is under way."""
        return min((link.until for link in self._links.values()), default=INFINITY)

    @property
    def is_idle(self) -> bool:
        """Is no message under way or waiting?"""
        return len(self.sent) == len(self._messages)

    def _step(self, until: float) -> bool:
        """The next thing that happens on a link: a message is through (at `until` or before), or one starts
        (before). -> was there one?"""
        first, first_link, first_queue = INFINITY, None, None
        for link in self._links.values():
            if link.under_way is not None:
                if link.until <= until and link.until <= first:
                    first, first_link, first_queue = link.until, link, None
                continue
            for queue in link.waiting:
                if queue:
                    moment = max(link.free_at, self._ready_at(queue[0]))
                    if moment < until and moment < first:
                        first, first_link, first_queue = moment, link, queue
        if first_link is None:
            return False
        if first_queue is None:
            self._arrive(first_link)
        else:
            key = first_queue.popleft()
            self.start[key] = first
            first_link.under_way, first_link.until = key, first + self._messages[key].ms
        return True

    def _arrive(self, link: _Link[Key]) -> None:
        assert link.under_way is not None
        self.end[link.under_way] = link.free_at = link.until
        self.sent.append(link.under_way)
        link.under_way, link.until = None, INFINITY

    def _ready_at(self, key: Key) -> float:
        """When a message could go, were its link free; infinite while one that it needs is not through."""
        message = self._messages[key]
        ready = message.issued_at
        for k in message.after:
            ready = max(ready, self.end.get(k, INFINITY))
        return ready
