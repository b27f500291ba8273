"""Peak memory of a Program in a given order of issue, and what recomputation (activation checkpointing)
saves.

A storage is allocated when its producer is issued, and freed after the last instruction that reads or writes
it, as a caching allocator does. Program inputs (parameters, optimizer state) and outputs are never freed. A
deferred weight gradient keeps the activations that it reads alive. A message allocates its result when it is
issued, and keeps its send buffer until its first reader waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.program import Kind, Program, original_name


@dataclass(frozen=True)
class Recomputation:
    """The recomputed instructions of a Program.

    Attributes:
        instructions: their number; all_to_alls: how many of them are all-to-alls.
        compute_ms, link_ms: their time on the device and on the link.
        peak_memory_gb: of the Program in its own order. saved_gb: how much higher that would be if the
            backward read the results of the forward.
    """

    instructions: int
    all_to_alls: int
    compute_ms: float
    link_ms: float
    peak_memory_gb: float
    saved_gb: float

    @classmethod
    def of(cls, program: Program, cost: Cost) -> Recomputation | None:
        """None: nothing is recomputed."""
        recomputed = [i for i in program.instructions if original_name(i.name) is not None]
        if not recomputed:
            return None
        ms = {i.name: cost(i, program.tensors) for i in recomputed}
        link_ms, peak = sum(ms[i.name] for i in recomputed if i.kind.is_communication), peak_memory(program)
        return cls(
            len(recomputed),
            sum(i.kind is Kind.ALL_TO_ALL for i in recomputed),
            sum(ms.values()) - link_ms,
            link_ms,
            peak / 1e9,
            (peak_memory(_with_saved_activations(program)) - peak) / 1e9,
        )

    def text(self) -> str:
        """One line."""
        return (
            f"Recomputed in the backward (activation checkpointing): {self.instructions} instructions, "
            f"{self.all_to_alls} of them all-to-alls: {self.compute_ms:.2f} ms of computation and "
            f"{self.link_ms:.2f} ms on the link, for {self.saved_gb:.3g} GB less of "
            f"{self.peak_memory_gb + self.saved_gb:.3g} GB in the original order."
        )


def _with_saved_activations(program: Program) -> Program:
    """The Program whose backward reads the results of the forward in place of recomputed ones."""
    result_of: dict[str, str] = {}
    instructions = []
    for instruction in program.instructions:
        original = original_name(instruction.name)
        if original is None:
            inputs = tuple(dict.fromkeys(result_of.get(t, t) for t in instruction.inputs))
            instructions.append(replace(instruction, inputs=inputs, after=""))
        else:
            outputs = program.instructions[program.index[original]].outputs
            result_of.update(zip(instruction.outputs, outputs, strict=True))
    tensors = {
        t: replace(spec, alias_of=result_of.get(spec.alias_of, spec.alias_of)) if spec.alias_of else spec
        for t, spec in program.tensors.items()
        if t not in result_of
    }
    return replace(program, instructions=tuple(instructions), tensors=tensors)


_NEVER = -(1 << 60)


class Storages:
    """Which storages each instruction of a Program allocates (`born`), reads or writes (`touched`), and keeps
    alive as a send buffer (`held`). Storages are numbers; `owners` has the tensors that own them, and `bytes`
    their sizes. A view counts as its storage."""

    def __init__(self, program: Program):
        self.program = program
        owner = program.storage
        number = {s: n for n, s in enumerate(dict.fromkeys(owner.values()))}
        of = {t: number[s] for t, s in owner.items()}
        self.owners = list(number)
        self.bytes = [program.tensors[s].bytes for s in number]
        self.resident = {of[t] for t in program.inputs}
        self.permanent = self.resident | {of[t] for t in program.outputs}
        self.born: list[list[int]] = []
        self.touched: list[set[int]] = []
        self.held: list[set[int]] = []
        """Operands of a message, which stay alive until its first reader."""
        allocated = set(self.resident)
        for instruction in program.instructions:
            outputs = {of[t] for t in instruction.outputs}
            self.born.append(sorted(outputs - allocated))
            allocated |= outputs
            self.touched.append({of[t] for t in instruction.inputs} | outputs)
            self.held.append(self.touched[-1] if instruction.kind.is_communication else set())
        self.born_bytes = [sum(self.bytes[s] for s in born) for born in self.born]
        """By position, the bytes that an instruction allocates."""

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes allocated before the first instruction: the storages of all inputs."""
        return sum(self.bytes[s] for s in self.resident)

    @cached_property
    def in_order(self) -> tuple[list[set[int]], list[int]]:
        """In the Program's own order: what each instruction touches, and the bytes alive while it runs."""
        order = range(len(self.program))
        return self.touches(order), alive_bytes(self, order)

    @cached_property
    def touching(self) -> list[list[int]]:
        """By storage, the positions that touch it in the Program's own order, ascending."""
        touching: list[list[int]] = [[] for _ in self.bytes]
        for i, touched in enumerate(self.in_order[0]):
            for s in touched:
                touching[s].append(i)
        return touching

    def touches(self, order: Sequence[int]) -> list[set[int]]:
        """By position, the storages that must be alive then, without those that are never freed. The first
        reader of a message's result also counts as a reader of its operands."""
        touches: list[set[int]] = [set() for _ in order]
        arriving: dict[int, set[int]] = {}
        for i in order:
            touches[i] |= self.touched[i] - self.permanent
            for j in self.program.dependencies[i]:
                if j in arriving:
                    touches[i] |= arriving.pop(j)
            if self.held[i]:
                arriving[i] = self.held[i] - self.permanent
        return touches

    def last_places(self, place: np.ndarray) -> np.ndarray:
        """By storage, the place in an order of the last instruction that needs it; -1: never freed.

        Args: place: of each position in the order.
        """
        (storages, positions), (buffers, senders), (messages, readers) = self._pairs
        last = np.full(len(self.bytes), -1, dtype=np.int64)
        np.maximum.at(last, storages, place[positions])
        first_reader = np.full(len(place), -1, dtype=np.int64)
        first_reader[messages] = len(place)
        np.minimum.at(first_reader, messages, place[readers])
        np.maximum.at(last, buffers, first_reader[senders])
        return last

    @cached_property
    def _pairs(self) -> list[np.ndarray]:
        """As two rows each: (storage, position) of temporary storages that are touched; (storage, message) of
        temporary send buffers; (message, instruction that waits for it)."""
        touched, held = (
            [(s, i) for i, storages in enumerate(positions) for s in storages - self.permanent]
            for positions in (self.touched, self.held)
        )
        readers = [(i, j) for i, sent in enumerate(self.held) if sent for j in self.program.dependents[i]]
        return [np.array(pairs, dtype=np.int64).reshape(-1, 2).T for pairs in (touched, held, readers)]


def peak_memory(program: Program, order: Sequence[int] | None = None) -> int:
    """Peak bytes for a valid order of positions (None: the Program's own)."""
    return peak_bytes(Storages(program), order)


def peak_bytes(storages: Storages, order: Sequence[int] | None = None) -> int:
    """The same, from a Program's storages."""
    return int(max(alive_bytes(storages, order), default=0))


def alive_bytes(storages: Storages, order: Sequence[int] | None = None) -> list[int]:
    """Bytes alive while each instruction of an order runs, with what it allocates and what it frees after."""
    length = len(storages.program)
    places = np.arange(length)
    at = places if order is None else np.array(order, dtype=np.int64)
    place = np.empty(length, dtype=np.int64)
    place[at] = places
    last = storages.last_places(place)
    is_freed = last >= 0
    freed = np.zeros(length + 1, dtype=np.int64)
    np.add.at(freed, last[is_freed] + 1, np.array(storages.bytes, dtype=np.int64)[is_freed])
    born = np.array(storages.born_bytes, dtype=np.int64)[at]
    return (storages.resident_bytes + np.cumsum(born) - np.cumsum(freed)[:length]).tolist()


class MemoryBudget:
    """Decides whether an instruction can be issued now without exceeding a memory limit later.

    Invariant (as in the banker's algorithm): if all remaining instructions were issued in Program order,
    memory would stay within the limit. It holds at the start, and `admits` accepts only instructions that
    keep it; so the first remaining instruction can always be issued.

    Args: limit_bytes: at least the peak of the Program's own order.
    """

    def __init__(self, storages: Storages, limit_bytes: float):
        self.storages, self.limit = storages, limit_bytes
        length = len(storages.program)
        self.alive = storages.resident_bytes
        self.first = 0
        """The first remaining position."""
        self._touches, alive = storages.in_order
        self._profile = np.array(alive, dtype=np.int64)
        self._is_remaining = [True] * length
        self._remaining = [list(positions) for positions in storages.touching]
        """By storage, the remaining positions that touch it, ascending."""

    def admits(self, i: int) -> bool:
        """Can instruction i be issued now?"""
        more = self.storages.born_bytes[i]
        if self.alive + more > self.limit:
            return False
        if i <= self.first:
            return True
        window = self._profile[self.first : i]
        if int(window.max()) + more <= self.limit:
            return True
        changed = window.copy()
        self._hoist(changed, self.first, i)
        return int(changed.max()) <= self.limit

    def issue(self, i: int) -> None:
        """Record that instruction i is issued now."""
        if i > self.first:
            self._hoist(self._profile[self.first :], self.first, i)
        self.alive += self.storages.born_bytes[i]
        for s in self._touches[i]:
            remaining = self._remaining[s]
            remaining.remove(i)
            if not remaining:
                self.alive -= self.storages.bytes[s]
        self._profile[i] = _NEVER
        self._is_remaining[i] = False
        while self.first < len(self._is_remaining) and not self._is_remaining[self.first]:
            self.first += 1

    def frees(self, i: int) -> int:
        """By how many bytes instruction i reduces the memory in use."""
        freed = sum(self.storages.bytes[s] for s in self._touches[i] if len(self._remaining[s]) == 1)
        return freed - self.storages.born_bytes[i]

    def _hoist(self, profile: np.ndarray, offset: int, i: int) -> None:
        """Update the profile, which begins at position `offset`, before i for i being issued first."""
        end, sizes = i - offset, self.storages.bytes
        for s in self.storages.born[i]:
            if s in self.storages.permanent or len(self._remaining[s]) > 1:
                profile[:end] += sizes[s]
        for s in self._touches[i]:
            remaining = self._remaining[s]
            if remaining[-1] != i or (len(remaining) == 1 and s in self.storages.born[i]):
                continue
            # The storage is needed until the position before i that touches it, instead of until i.
            before = remaining[-2] + 1 - offset if len(remaining) > 1 else 0
            profile[max(0, before) : end] -= sizes[s]
