"""Which partition of which program moves next? One at a time, in an order that a seed decides.

Every task (a partition, a program, the host code of a PE) is a thread, but only the one that holds the turn
runs. It offers the turn before each operation that others can see. Which task comes next is drawn at random,
with weights that change from time to time, so that some tasks are far behind the others for a while. What
was issued and not yet completed (a TMA load, a store on its way) is drawn in the same way.
"""

from __future__ import annotations

import linecache
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WEIGHTS = (1.0, 1.0, 1.0, 0.1, 0.01)


class EmulationError(AssertionError):
    """What the kernel does is wrong on a GPU, whatever the numbers are."""


class Deadlock(EmulationError):
    """Every task waits, and nothing is on its way."""


class Race(EmulationError):
    """Two accesses of which one writes are not ordered."""


class Misuse(EmulationError):
    """An operation that the hardware does not have, or that needs another one before it."""


class _Stop(BaseException):
    """Ends the other tasks after a failure; kernels cannot catch it."""


@dataclass(eq=False)
class Task:
    """A partition, a program, or the host code of a PE.

    Attributes:
        program: what its partitions share (see `global_memory.Program`).
        ready: what it waits for; None if it can go on. waits_for: the same in words.
        polled: the operation that it repeats while it spins; parked: the version of memory it has looked at.
        acquired: since then no fence for the async proxy. mmas: on their way. copies: groups of such, the
        last of them not committed.
    """

    name: str
    function: Callable[[], Any]
    program: Any
    grid: tuple = (None, None)
    weight: float = 1.0
    ready: Callable[[], bool] | None = None
    waits_for: Callable[[], str] | None = None
    polled: object = None
    parked: int | None = None
    finished: bool = False
    result: Any = None
    thread: threading.Thread | None = None
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    acquired: bool = False
    mmas: list[Any] = field(default_factory=list)
    copies: list[list[Any]] = field(default_factory=lambda: [[]])

    def where(self) -> str:
        """The lines of kernel source where it is, the innermost first."""
        frame = sys._current_frames().get(self.thread.ident) if self.thread else None
        lines = []
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if HERE not in path.parents and not {"triton", "threading.py"} & set(path.parts):
                source = linecache.getline(str(path), frame.f_lineno).strip()
                lines.append(f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}: {source}")
            frame = frame.f_back
        return " < ".join(lines[:3])


class Scheduler:
    """Runs tasks to their end, or raises what one of them raised, or Deadlock.

    patience: how often each task that polls may look again when all others wait; None: until it gives up.
    """

    def __init__(self, seed: int, builder: Any, patience: int | None) -> None:
        self.random = random.Random(seed)
        self.builder, self.patience = builder, patience
        self.tasks: list[Task] = []
        self.operations: list[Any] = []  # issued and not complete: `land` completes it, drawn by its `weight`
        self.current: Task | None = None
        self.version = 0  # of all memory that tasks share
        self.steps = 0
        self._offer = self.random.choice((0.1, 0.3, 0.6))  # how often a step offers the turn
        self._reweigh_at = 0
        self._quiet_version, self._quiet_looks = -1, 0
        self._failure: BaseException | None = None
        self._stopping = False
        self._end = threading.Semaphore(0)

    def spawn(self, name: str, function: Callable[[], Any], program: Any) -> Task:
        task = Task(name, function, program, weight=self.random.choice(WEIGHTS))
        task.thread = threading.Thread(target=self._live, args=(task,), name=name, daemon=True)
        self.tasks.append(task)
        task.thread.start()
        return task

    def run(self) -> None:
        """From outside: until every task is finished."""
        self._pass_turn(self._next())
        self._end.acquire()
        self._stopping = True
        for task in self.tasks:
            while task.thread.is_alive():
                task.turn.release()
                task.thread.join(0.05)
        if self._failure is not None:
            raise self._failure

    def step(self) -> None:
        """Before an operation that other tasks can see."""
        if self._stopping:
            raise _Stop
        self.steps += 1
        if self.random.random() < self._offer:
            self._switch()

    def wait_until(self, ready: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        me = self.current
        self.step()
        while not ready():
            me.ready, me.waits_for = ready, waits_for
            self._switch()
            me.ready = me.waits_for = None

    def join(self, tasks: list[Task], who: str) -> None:
        self.wait_until(lambda: all(task.finished for task in tasks), lambda: f"waits for {who}")

    def changed(self) -> None:
        """Memory or a barrier has changed: tasks that poll may look again."""
        self.version += 1
        self.current.polled = self.current.parked = None

    def polled(self, key: object) -> None:
        """The task looked at a word and changed nothing: the second time it lets the others go on."""
        me = self.current
        if me.polled == key:
            me.parked = self.version
            self._switch()
        me.polled = key

    def land(self, operation: Any) -> None:
        """Complete it now, if it is not complete."""
        if operation in self.operations:
            self.operations.remove(operation)
            operation.land()
            self.version += 1

    def _fail(self, error: BaseException) -> None:
        """The first error counts: our own, where Triton's interpreter has wrapped it."""
        inner: BaseException | None = error
        while inner is not None and not isinstance(inner, EmulationError):
            inner = inner.__cause__
        self._failure = self._failure or inner or error

    def _live(self, task: Task) -> None:
        task.turn.acquire()
        try:
            if not self._stopping:
                task.result = task.function()
        except _Stop:
            pass
        except BaseException as error:
            self._fail(error)
        task.finished = True
        if self._stopping:
            return
        self.version += 1
        following = None
        if self._failure is None:
            try:
                following = self._next()
            except BaseException as error:
                self._fail(error)
        self._pass_turn(following)

    def _switch(self) -> None:
        if self._stopping:
            raise _Stop
        me = self.current
        following = self._next()
        if following is me:
            return
        me.grid = self.builder.grid_dim, self.builder.grid_idx
        self._pass_turn(following)
        me.turn.acquire()
        if self._stopping:
            raise _Stop

    def _pass_turn(self, task: Task | None) -> None:
        if task is None:
            self._end.release()
            return
        self.current = task
        self.builder.grid_dim, self.builder.grid_idx = task.grid
        task.turn.release()

    def _next(self) -> Task | None:
        """Land some operations, then the task that moves; None when all are finished."""
        while True:
            living = [task for task in self.tasks if not task.finished]
            self._reweigh(living)
            able = [
                task
                for task in living
                if task.parked != self.version and (task.ready is None or task.ready())
            ]
            choices = [*able, *self.operations]
            if not choices:
                return self._look_again(living) if living else None
            (choice,) = self.random.choices(choices, [c.weight for c in choices])
            if isinstance(choice, Task):
                return choice
            self.land(choice)

    def _reweigh(self, living: list[Task]) -> None:
        if self.steps >= self._reweigh_at:
            self._reweigh_at = self.steps + self.random.randrange(20, 400)
            for task in living:
                task.weight = self.random.choice(WEIGHTS)

    def _look_again(self, living: list[Task]) -> Task:
        """All wait. Tasks that poll may still give up by itself, but not for ever."""
        if self._quiet_version != self.version:
            self._quiet_version, self._quiet_looks = self.version, 0
        polling = [task for task in living if task.ready is None]
        self._quiet_looks += 1
        impatient = self.patience is not None and self._quiet_looks > self.patience * len(polling)
        if not polling or impatient:
            told = "\n".join(self._tell(task) for task in living)
            raise Deadlock(f"no task can go on, and nothing is on its way:\n{told}")
        task = self.random.choice(polling)
        task.parked = None
        return task

    def _tell(self, task: Task) -> str:
        what = task.waits_for() if task.waits_for else "polls a word that does not change"
        return f"  {task.name} {what}, at {task.where()}"
