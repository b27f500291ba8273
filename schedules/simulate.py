"""When does each instruction of an ordered Program start and end? Two resources: compute and one link.

Compute runs in program order; each instruction starts when the one before it and its inputs are done.
Communication is asynchronous: all-to-alls start when their inputs are ready and the link is free, in
issue order. All-reduces use the link while no all-to-all is ready and give way to one the moment it is
(their buckets travel in pieces), so none ever delays an all-to-all.

Example: A (compute 2) feeds X (all-to-all 3); B (compute 1) is independent; C (compute 1) needs X. In the
order A X B C: A 0-2, X 2-5, B 2-3, C 5-6. The iteration takes 6 ms, of which 2 (3 to 5) are exposed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from lancet_kernels.graph.costs import Cost, durations
from lancet_kernels.graph.program import Kind, Phase, Program
from lancet_kernels.schedules.peak_memory import peak_memory

COMPUTE, LINK = "compute", "communication"


@dataclass(frozen=True)
class Event:
    """One stretch of time in which an instruction occupied a resource, in milliseconds from the start."""

    name: str
    resource: str
    start_ms: float
    end_ms: float
    kind: Kind
    phase: Phase


@dataclass(frozen=True)
class Times:
    """By position in the Program: start, end, and the stretches on the link (all-reduces may have
    several)."""

    start: list[float]
    end: list[float]
    compute: list[int]
    """Compute positions in the order they ran."""
    link: list[tuple[int, float, float]]
    """(position, start, end) of every stretch of communication, in order."""

    @property
    def iteration_ms(self) -> float:
        return max(self.end, default=0.0)

    @property
    def exposed_ms(self) -> float:
        """Communication time during which compute idles."""
        return _uncovered(
            [(s, e) for _, s, e in self.link], [(self.start[i], self.end[i]) for i in self.compute]
        )


@dataclass(frozen=True)
class Timeline:
    """A simulated iteration."""

    program: Program
    times: Times

    @property
    def iteration_ms(self) -> float:
        return self.times.iteration_ms

    @cached_property
    def exposed_ms(self) -> float:
        return self.times.exposed_ms

    @cached_property
    def peak_memory_bytes(self) -> int:
        return peak_memory(self.program, self.times.start, self.times.end)

    @cached_property
    def events(self) -> list[Event]:
        """Every stretch on either resource, without the instructions that take no time (views)."""
        instructions, times = self.program.instructions, self.times
        stretches = [(i, COMPUTE, times.start[i], times.end[i]) for i in times.compute]
        stretches += [(i, LINK, start, end) for i, start, end in times.link]
        return [
            Event(instructions[i].name, resource, start, end, instructions[i].kind, instructions[i].phase)
            for i, resource, start, end in stretches
            if end > start
        ]


def simulate(program: Program, cost: Cost, *, blocking: Collection[str] = ()) -> Timeline:
    """Exact times of a Program in its order. `blocking` names communication that nothing overlaps: it starts
    when all compute before it is done, and compute behind it waits for its end."""
    times = run(program, durations(program, cost), range(len(program)), blocking=blocking)
    return Timeline(program, times)


def run(
    program: Program, ms: Sequence[float], order: Sequence[int], *, blocking: Collection[str] = ()
) -> Times:
    """The same for another valid order of the Program's positions; `ms` are durations by position."""
    pending, waiters = _waits(program, order, blocking)
    kinds = [program.instructions[i].kind for i in order]
    compute = [i for i, k in zip(order, kinds, strict=True) if k is Kind.COMPUTE]
    reduces = [i for i, k in zip(order, kinds, strict=True) if k is Kind.ALL_REDUCE]
    urgent = [i for i, k in zip(order, kinds, strict=True) if k.is_communication and k is not Kind.ALL_REDUCE]
    start, end = [0.0] * len(program), [0.0] * len(program)
    left = {i: ms[i] for i in reduces}
    link: list[tuple[int, float, float]] = []
    c = u = r = 0
    computing = sending = reducing = False
    now = resumed = 0.0
    infinity = float("inf")

    def done(i: int) -> None:
        end[i] = now
        for j in waiters[i]:
            pending[j] -= 1

    while c < len(compute) or u < len(urgent) or r < len(reduces):
        if not computing and c < len(compute) and not pending[compute[c]]:
            start[compute[c]], computing = now, True
        if not sending and u < len(urgent) and not pending[urgent[u]]:
            start[urgent[u]], sending = now, True
            if reducing:
                link.append((reduces[r], resumed, now))
                left[reduces[r]] -= now - resumed
                reducing = False
        if not sending and not reducing and r < len(reduces) and not pending[reduces[r]]:
            if left[reduces[r]] == ms[reduces[r]]:
                start[reduces[r]] = now
            resumed, reducing = now, True
        compute_end = start[compute[c]] + ms[compute[c]] if computing else infinity
        urgent_end = start[urgent[u]] + ms[urgent[u]] if sending else infinity
        reduce_end = resumed + left[reduces[r]] if reducing else infinity
        now = min(compute_end, urgent_end, reduce_end)
        assert now < infinity, "a valid order never runs dry"
        if compute_end <= now:
            done(compute[c])
            c, computing = c + 1, False
        if urgent_end <= now:
            link.append((urgent[u], start[urgent[u]], now))
            done(urgent[u])
            u, sending = u + 1, False
        if reduce_end <= now:
            link.append((reduces[r], resumed, now))
            done(reduces[r])
            r, reducing = r + 1, False
    return Times(start, end, compute, link)


def _waits(
    program: Program, order: Sequence[int], blocking: Collection[str]
) -> tuple[list[int], list[Sequence[int]]]:
    """How many instructions each one waits for, and who waits for it; blocking adds waits in program
    order."""
    pending = [len(before) for before in program.dependencies]
    waiters: list[Sequence[int]] = list(program.dependents)
    if not blocking:
        return pending, waiters
    more: dict[int, list[int]] = {}
    last_compute = last_blocking = None
    for i in order:
        instruction = program.instructions[i]
        before = None
        if instruction.kind is Kind.COMPUTE:
            before, last_compute = last_blocking, i
        elif instruction.name in blocking:
            before, last_blocking = last_compute, i
        if before is not None:
            more.setdefault(before, []).append(i)
            pending[i] += 1
    for i, extra in more.items():
        waiters[i] = (*waiters[i], *extra)
    return pending, waiters


def _uncovered(busy: list[tuple[float, float]], cover: list[tuple[float, float]]) -> float:
    """Total length of `busy` outside `cover`; both are sorted and without overlaps."""
    total, k = 0.0, 0
    for start, end in busy:
        total += end - start
        while k < len(cover) and cover[k][1] <= start:
            k += 1
        n = k
        while n < len(cover) and cover[n][0] < end:
            total -= max(0.0, min(end, cover[n][1]) - max(start, cover[n][0]))
            n += 1
    return total
