"""What can happen when programs on several ranks store into each other's memory? All of it, step by step.

A `System` is what every rank launches: launches, each a list of tasks in the order in which its programs
claim them, each a list of steps. `explore` walks every interleaving, breadth first, and returns the shortest
way to something wrong: a reading of anything but what was meant, a store onto what is still needed, or a
state from which nothing moves.

Memory. A store lies in flight, unordered, from its step until another step lands it. So does a signal, and
it lands after the stores that it covers (all, if it is a release; none, if it is relaxed). Nothing else is
ordered: neither two signals, nor a store after an earlier signal, nor anything by the end of a launch.

Everything may land by itself, at any time. To merge states, a signal here lands when a wait needs it,
together with the stores that it covers; and to read a place to which a store is in flight, or to store to one
that is still needed, is an error at once: that store could have stayed away, or landed, just then. To land
sooner makes no difference, since that only takes away what is in flight to stumble over; if words only grow,
which is checked: a second signal to the same word while one is in flight is an error, as is a smaller one.
(Landings at any time were explored, too, until 2026-11-27: the same 17 of 17 mistakes were found either way.)

What a program does without waiting (store, signal, claim) commutes with all that others do, so it is taken at
once, with the step before it. A reading is taken with the wait before it: later it could only find more, or
what was written over it, which is caught as such. Steps of their own are every wait and every pause. Claims
go in list order; equal programs are interchangeable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

LOW = 32  # a signal is epoch << LOW | count, as in device.word

# Steps are (kind, argument, text).
WAIT = "wait"  # ((place, at least), ...): all of them
PAUSE = "pause"  # time may pass here
READ = "read"  # ((place, tag), ...): must find exactly that
SEND = "send"  # bit mask of one message

Step = tuple[str, object, str]
Rank = tuple[int, int, tuple[tuple[int, int], ...]]  # launch, tasks claimed, (task, step) of every program
State = tuple[tuple[Rank, ...], tuple[int, ...], int]  # ranks, memory, messages in flight
IDLE = (-1, 0)


class Wrong(Exception):
    """Something that must never happen has happened; args[0] says what."""


@dataclass
class Message:
    """A store or a signal. covers: bit mask of what lands before it."""

    place: int
    value: int
    text: str
    signal: bool = False
    covers: int = 0


@dataclass
class System:
    """What to explore.

    Attributes:
        launches: [rank][launch][task], the steps of each task.
        messages: all stores and signals; a SEND is a bit mask of them.
        place_names, show: how to name a place and a value.
        needed_until: [place][value], who reads it, and in which of its launches for the last time.
        programs: of each rank.
        stores_to, signals_to: made from messages.
    """

    launches: list[list[list[list[Step]]]]
    messages: list[Message]
    place_names: list[str]
    needed_until: dict[int, dict[int, tuple[int, int]]]
    show: Callable[[int], str]
    programs: int = 1
    stores_to: list[int] = field(default_factory=list)
    signals_to: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stores_to, self.signals_to = ([0] * len(self.place_names) for _ in range(2))
        for number, message in enumerate(self.messages):
            (self.signals_to if message.signal else self.stores_to)[message.place] |= 1 << number

    def begin(self) -> State:
        memory, flight, ranks = [0] * len(self.place_names), [0], []
        for rank in range(len(self.launches)):
            start: Rank = (-1, 0, (IDLE,) * self.programs)
            ranks.append(start)
            ranks[rank] = self._advance(rank, start, None, ranks, memory, flight, None)
        return tuple(ranks), tuple(memory), flight[0]

    def finished(self, state: State) -> bool:
        return all(launch == len(self.launches[rank]) for rank, (launch, _, _) in enumerate(state[0]))

    def next(self, state: State, lines: list[str] | None = None) -> Iterator[State]:
        """All states one step away. With `lines`, clears it and tells there what the step is."""
        ranks, memory, flight = state
        for number, rank in enumerate(ranks):
            launch, _, programs = rank
            for who, (task, step) in enumerate(programs):
                if task < 0 or (who and programs[who - 1] == programs[who]):
                    continue
                kind, argument, text = self.launches[number][launch][task][step]
                lands = self._lands(argument, memory, flight) if kind == WAIT else 0
                if lands is None:
                    continue
                if lines is not None:
                    lines.clear()
                after, in_flight, others = list(memory), [flight], list(ranks)
                for bit, message in self._in(lands):
                    in_flight[0] = self._land(bit, message, ranks, after, in_flight[0], lines)
                if lines is not None:
                    lines.append(f"PE {number}: {text}")
                others[number] = self._advance(number, rank, who, others, after, in_flight, lines)
                yield tuple(others), tuple(after), in_flight[0]

    def _in(self, mask: int) -> Iterator[tuple[int, Message]]:
        while mask:
            bit = mask & -mask
            mask ^= bit
            yield bit, self.messages[bit.bit_length() - 1]

    def _lands(self, conditions, memory, flight: int) -> int | None:
        """The signals that must land for a wait to end; None if it cannot end."""
        lands = 0
        for place, least in conditions:
            if memory[place] < least:
                coming = flight & self.signals_to[place]
                if not coming or self.messages[coming.bit_length() - 1].value < least:
                    return None
                lands |= coming
        return lands

    def waits(self, state: State) -> list[str]:
        """What every program is waiting for, for a report of a deadlock."""
        return [
            f"PE {number} {self.launches[number][launch][task][step][2]}"
            for number, (launch, _, programs) in enumerate(state[0])
            for task, step in programs
            if task >= 0
        ]

    def _land(self, bit, message, ranks, memory, flight, lines) -> int:
        for covered, store in self._in(message.covers & flight):
            flight = self._land(covered, store, ranks, memory, flight, lines)
        if lines is not None:
            lines.append(f"      lands: {message.text}")
        if not message.signal:
            self._check_overwrite(message, ranks, memory)
        memory[message.place] = message.value
        return flight & ~bit

    def _check_overwrite(self, message: Message, ranks, memory) -> None:
        reader = self.needed_until.get(message.place, {}).get(memory[message.place])
        if reader and ranks[reader[0]][0] <= reader[1]:
            old = self.show(memory[message.place])
            raise Wrong(f"overwrite before release: {old} is still needed by PE {reader[0]} ({message.text})")

    def _advance(self, number, rank: Rank, mover, ranks, memory, flight, lines) -> Rank:
        """Let program `mover` go on behind its wait, and all that needs no waiting after it. -> the rank."""
        launch, claimed, programs = rank
        programs = list(programs)
        ready = [] if mover is None else [mover]
        behind = mover
        while True:
            while ready:
                who = ready.pop()
                task, step = programs[who]
                if task >= 0:
                    step += who == behind
                    steps = self.launches[number][launch][task]
                    ranks[number] = (launch, claimed, ())
                    step = self._run(number, steps, step, ranks, memory, flight, lines)
                    if step < len(steps):
                        programs[who] = (task, step)
                        continue
                behind = None
                programs[who] = IDLE
                if claimed < len(self.launches[number][launch]):
                    programs[who] = (claimed, 0)
                    claimed += 1
                    ready.append(who)
            if any(task >= 0 for task, _ in programs):
                break
            launch, claimed = launch + 1, 0
            if launch == len(self.launches[number]):
                break
            ready = list(range(self.programs))[::-1]
        return launch, claimed, tuple(sorted(programs))

    def _run(self, number, steps, step, ranks, memory, flight, lines) -> int:
        """Steps from here to the next that waits. -> where that is, or the number of steps."""
        while step < len(steps) and steps[step][0] not in (WAIT, PAUSE):
            kind, argument, text = steps[step]
            if lines is not None:
                lines.append(f"PE {number}: {text}")
            if kind == READ:
                for place, tag in argument:
                    self._check_read(number, place, tag, memory, flight[0])
            else:
                self._check_send(argument, ranks, memory, flight[0])
                flight[0] |= argument
            step += 1
        return step

    def _check_send(self, bit: int, ranks, memory, flight: int) -> None:
        message = self.messages[bit.bit_length() - 1]
        if not message.signal:
            self._check_overwrite(message, ranks, memory)
            return
        earlier = flight & self.signals_to[message.place] & ~message.covers
        if earlier or memory[message.place] >= message.value:
            raise Wrong(f"a word does not grow from signal to signal: {message.text}")

    def _check_read(self, number: int, place: int, tag: int, memory, flight: int) -> None:
        found, where = memory[place], self.place_names[place]
        if found != tag:
            raise Wrong(
                f"read before arrival: PE {number} finds {self.show(found)} in {where}, not {self.show(tag)}"
            )
        if flight & self.stores_to[place]:
            raise Wrong(f"read before arrival: a store to PE {number}'s {where} may still be in flight")


@dataclass(frozen=True)
class Result:
    """How many states there are; and, if something is wrong, what, and the shortest steps that lead there."""

    states: int
    wrong: str = ""
    steps: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join((*self.steps, f"WRONG: {self.wrong}")) if self.wrong else f"{self.states} states"


def explore(system: System, most: int = 10_000_000) -> Result:
    """Visit every state that can be reached, or stop at the first that is wrong."""
    start = system.begin()
    came_from: dict[State, State | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        moved = False
        try:
            for following in system.next(state):
                moved = True
                if following not in came_from:
                    came_from[following] = state
                    queue.append(following)
        except Wrong as wrong:
            return Result(len(came_from), str(wrong), _tell(system, came_from, state))
        if not moved and not system.finished(state):
            wrong = "deadlock: " + "; ".join(system.waits(state))
            return Result(len(came_from), wrong, _tell(system, came_from, state))
        if len(came_from) > most:
            raise AssertionError(f"more than {most} states: make the system smaller")
    return Result(len(came_from))


def _tell(system: System, came_from: dict[State, State | None], last: State) -> tuple[str, ...]:
    """The steps from the beginning to `last`, and, if a step after it goes wrong, that one."""
    path = [last]
    while (earlier := came_from[path[-1]]) is not None:
        path.append(earlier)
    path.reverse()
    told: list[str] = []
    lines: list[str] = []
    for state, following in pairwise(path):
        next(candidate for candidate in system.next(state, lines) if candidate == following)
        told += lines
    try:
        for _ in system.next(last, lines):
            pass
    except Wrong:
        told += lines
    return tuple(told)
