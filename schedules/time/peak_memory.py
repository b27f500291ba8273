"""Peak memory of a Program in a given order of issue.

A storage is allocated when its producer is issued, and freed after the last instruction that reads or writes
it, as a caching allocator does. Program inputs (parameters, optimizer state) and outputs are never freed. A
deferred weight gradient keeps the activations that it reads alive. A message allocates its result when it is
issued, and keeps its send buffer until its first reader waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from lancet_kernels.graph.program.program import Program

_NEVER = -(1 << 60)


class Storages:
    """Which storages each instruction of a Program allocates (`born`), reads or writes (`touched`), and keeps
    alive as a send buffer (`held`). A view counts as its storage."""

    def __init__(self, program: Program):
        self.program = program
        storage, self.bytes = program.storage, {t: spec.bytes for t, spec in program.tensors.items()}
        self.resident = {storage[t] for t in program.inputs}
        self.permanent = self.resident | {storage[t] for t in program.outputs}
        self.born: list[list[str]] = []
        self.touched: list[set[str]] = []
        self.held: list[set[str]] = []
        """Operands of a message, which stay alive until its first reader."""
        allocated = set(self.resident)
        for instruction in program.instructions:
            outputs = {storage[t] for t in instruction.outputs}
            self.born.append(sorted(outputs - allocated))
            allocated |= outputs
            self.touched.append({storage[t] for t in instruction.inputs} | outputs)
            self.held.append(self.touched[-1] if instruction.kind.is_communication else set())

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes allocated before the first instruction: the storages of all inputs."""
        return sum(self.bytes[s] for s in self.resident)

    @cached_property
    def in_order(self) -> tuple[list[set[str]], list[int]]:
        """In the Program's own order: what each instruction touches, and the bytes alive while it runs."""
        order = range(len(self.program))
        return self.touches(order), alive_bytes(self, order)

    def touches(self, order: Sequence[int]) -> list[set[str]]:
        """By position, the storages that must be alive then, without those that are never freed. The first
        reader of a message's result also counts as a reader of its operands."""
        touches: list[set[str]] = [set() for _ in order]
        arriving: dict[int, set[str]] = {}
        for i in order:
            touches[i] |= self.touched[i] - self.permanent
            for j in self.program.dependencies[i]:
                touches[i] |= arriving.pop(j, set())
            if self.held[i]:
                arriving[i] = self.held[i] - self.permanent
        return touches


def peak_memory(program: Program, order: Sequence[int] | None = None) -> int:
    """Peak bytes for a valid order of positions (None: the Program's own)."""
    return int(max(alive_bytes(Storages(program), order), default=0))


def alive_bytes(storages: Storages, order: Sequence[int] | None = None) -> list[int]:
    """Bytes alive while each instruction of an order runs, with what it allocates and what it frees after."""
    order = range(len(storages.program)) if order is None else order
    touches = storages.touches(order)
    last = {s: i for i in order for s in touches[i]}
    alive, profile = storages.resident_bytes, []
    for i in order:
        alive += sum(storages.bytes[s] for s in storages.born[i])
        profile.append(alive)
        alive -= sum(storages.bytes[s] for s in touches[i] if last[s] == i)
    return profile


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
        self._remaining: dict[str, list[int]] = {}
        """By storage, the remaining positions that touch it, ascending."""
        for i, touched in enumerate(self._touches):
            for s in touched:
                self._remaining.setdefault(s, []).append(i)

    def admits(self, i: int) -> bool:
        """Can instruction i be issued now?"""
        more = sum(self.storages.bytes[s] for s in self.storages.born[i])
        if self.alive + more > self.limit:
            return False
        window = self._profile[self.first : i]
        if not len(window):
            return True
        if int(window.max()) + more <= self.limit:
            return True
        changed = window.copy()
        self._hoist(changed, self.first, i)
        return int(changed.max()) <= self.limit

    def issue(self, i: int) -> None:
        """Record that instruction i is issued now."""
        self._hoist(self._profile, 0, i)
        self.alive += sum(self.storages.bytes[s] for s in self.storages.born[i])
        for s in self._touches[i]:
            self._remaining[s].remove(i)
            if not self._remaining[s]:
                self.alive -= self.storages.bytes[s]
        self._profile[i] = _NEVER
        self._is_remaining[i] = False
        while self.first < len(self._is_remaining) and not self._is_remaining[self.first]:
            self.first += 1

    def frees(self, i: int) -> int:
        """By how many bytes instruction i reduces the memory in use."""
        freed = sum(self.storages.bytes[s] for s in self._touches[i] if self._remaining[s] == [i])
        return freed - sum(self.storages.bytes[s] for s in self.storages.born[i])

    def _hoist(self, profile: np.ndarray, offset: int, i: int) -> None:
        """Update the profile at the positions before i for i being issued before all of them."""
        end = i - offset
        for s in self.storages.born[i]:
            if s in self.storages.permanent or self._remaining[s] != [i]:
                profile[:end] += self.storages.bytes[s]
        for s in self._touches[i]:
            remaining = self._remaining[s]
            if remaining[-1] != i or (len(remaining) == 1 and s in self.storages.born[i]):
                continue
            # The storage was needed until i; now it is needed until the position before i that touches it.
            before = remaining[-2] + 1 - offset if len(remaining) > 1 else 0
            profile[max(0, before) : end] -= self.storages.bytes[s]
