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
    """Something that must never happen has happened: what, and what was told of the step before it."""


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
        idle: Rank = (-1, 0, (IDLE,) * self.programs)
        moment = Moment(self, ((idle,) * len(self.launches), (0,) * len(self.place_names), 0))
        for number in range(len(self.launches)):
            moment.advance(number, None)
        return moment.state()

    def finished(self, state: State) -> bool:
        return all(launch == len(self.launches[rank]) for rank, (launch, _, _) in enumerate(state[0]))

    def next(self, state: State) -> Iterator[tuple[State, list[str]]]:
        """All states one step away, each with what is told of the step."""
        for number, (launch, _, programs) in enumerate(state[0]):
            for who, (task, step) in enumerate(programs):
                if task < 0 or (who and programs[who - 1] == programs[who]):
                    continue
                kind, argument, text = self.launches[number][launch][task][step]
                lands = self._lands(argument, state) if kind == WAIT else 0
                if lands is None:
                    continue
                moment = Moment(self, state)
                moment.land(lands)
                moment.told.append(f"PE {number}: {text}")
                moment.advance(number, who)
                yield moment.state(), moment.told

    def _lands(self, conditions, state: State) -> int | None:
        """The signals that must land for a wait to end; None if it cannot end."""
        _, memory, flight = state
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


class Moment:
    """A state while it changes. told: what has happened since."""

    def __init__(self, system: System, state: State) -> None:
        self.system, self.told = system, []
        self.ranks, self.memory, self.flight = list(state[0]), list(state[1]), state[2]

    def state(self) -> State:
        return tuple(self.ranks), tuple(self.memory), self.flight

    def land(self, mask: int) -> None:
        """What is in flight of these messages lands, each behind what it covers."""
        while mask := mask & self.flight:
            bit = mask & -mask
            message = self.system.messages[bit.bit_length() - 1]
            self.flight ^= bit
            self.land(message.covers)
            self.told.append(f"      lands: {message.text}")
            if not message.signal:
                self._check_overwrite(message)
            self.memory[message.place] = message.value

    def _check_overwrite(self, message: Message) -> None:
        value = self.memory[message.place]
        reader = self.system.needed_until.get(message.place, {}).get(value)
        if reader and self.ranks[reader[0]][0] <= reader[1]:
            needed = f"{self.system.show(value)} is still needed by PE {reader[0]}"
            raise Wrong(f"overwrite before release: {needed} ({message.text})", self.told)

    def advance(self, number: int, mover: int | None) -> None:
        """Let program `mover` go on behind its wait, and all that needs no waiting after it."""
        launch, claimed, programs = self.ranks[number]
        programs, launches = list(programs), self.system.launches[number]
        ready = [] if mover is None else [mover]
        behind = mover
        while True:
            while ready:
                who = ready.pop()
                task, step = programs[who]
                if task >= 0:
                    step += who == behind
                    steps = launches[launch][task]
                    self.ranks[number] = (launch, claimed, ())
                    step = self._run(number, steps, step)
                    if step < len(steps):
                        programs[who] = (task, step)
                        continue
                behind = None
                programs[who] = IDLE
                if claimed < len(launches[launch]):
                    programs[who] = (claimed, 0)
                    claimed += 1
                    ready.append(who)
            if any(task >= 0 for task, _ in programs):
                break
            launch, claimed = launch + 1, 0
            if launch == len(launches):
                break
            ready = list(range(self.system.programs))[::-1]
        self.ranks[number] = launch, claimed, tuple(sorted(programs))

    def _run(self, number: int, steps: list[Step], step: int) -> int:
        """Steps from here to the next that waits. -> where that is, or the number of steps."""
        while step < len(steps) and steps[step][0] not in (WAIT, PAUSE):
            kind, argument, text = steps[step]
            self.told.append(f"PE {number}: {text}")
            if kind == READ:
                for place, tag in argument:
                    self._check_read(number, place, tag)
            else:
                self._check_send(argument)
                self.flight |= argument
            step += 1
        return step

    def _check_send(self, bit: int) -> None:
        message = self.system.messages[bit.bit_length() - 1]
        if not message.signal:
            self._check_overwrite(message)
            return
        earlier = self.flight & self.system.signals_to[message.place] & ~message.covers
        if earlier or self.memory[message.place] >= message.value:
            raise Wrong(f"a word does not grow from signal to signal: {message.text}", self.told)

    def _check_read(self, number: int, place: int, tag: int) -> None:
        found, where, show = self.memory[place], self.system.place_names[place], self.system.show
        what = ""
        if found != tag:
            what = f"PE {number} finds {show(found)} in {where}, not {show(tag)}"
        elif self.flight & self.system.stores_to[place]:
            what = f"a store to PE {number}'s {where} may still be in flight"
        if what:
            raise Wrong(f"read before arrival: {what}", self.told)


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
    came_from: dict[State, tuple[State | None, list[str]]] = {start: (None, [])}
    queue = deque([start])

    def wrong(what: str, state: State | None, told: list[str]) -> Result:
        while state is not None:
            state, earlier = came_from[state]
            told = [*earlier, *told]
        return Result(len(came_from), what, tuple(told))

    while queue:
        state = queue.popleft()
        moved = False
        try:
            for following, told in system.next(state):
                moved = True
                if following not in came_from:
                    came_from[following] = state, told
                    queue.append(following)
        except Wrong as error:
            what, told = error.args
            return wrong(what, state, told)
        if not moved and not system.finished(state):
            return wrong("deadlock: " + "; ".join(system.waits(state)), state, [])
        if len(came_from) > most:
            raise AssertionError(f"more than {most} states: make the system smaller")
    return Result(len(came_from))
