"""How many bytes are alive at the worst moment? That follows from the order in which instructions are issued.

A storage is allocated when its producer is issued and freed behind the last instruction that touches it, as
a caching allocator does it. Program inputs (parameters, optimizer state) and outputs stay. A weight gradient
that waits keeps the activations it reads alive. A message takes its result's memory when it is issued, and
holds on to what it sends until somebody waits for it: its first reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from lancet_kernels.graph.program import Program

_NEVER = -(1 << 60)


class Storages:
    """Which instruction of a Program allocates, touches and keeps which storage; views are their storage."""

    def __init__(self, program: Program):
        self.program = program
        storage, self.bytes = program.storage, {t: spec.bytes for t, spec in program.tensors.items()}
        self.resident = {storage[t] for t in program.inputs}
        self.kept = self.resident | {storage[t] for t in program.outputs}
        self.born: list[list[str]] = []
        self.touched: list[set[str]] = []
        self.held: list[set[str]] = []
        """What a message sends, and does not let go before it is waited for."""
        made = set(self.resident)
        for instruction in program.instructions:
            outputs = {storage[t] for t in instruction.outputs}
            self.born.append(sorted(outputs - made))
            made |= outputs
            self.touched.append({storage[t] for t in instruction.inputs} | outputs)
            self.held.append(self.touched[-1] if instruction.kind.is_communication else set())

    @cached_property
    def resident_bytes(self) -> int:
        """What is allocated before the first instruction: the storages of all inputs."""
        return sum(self.bytes[s] for s in self.resident)

    def touches(self, order: Sequence[int]) -> list[set[str]]:
        """By position, the storages that are needed until then in this order, without those that stay. The
        first reader of a message's results needs what was sent, too."""
        found: list[set[str]] = [set() for _ in order]
        arriving: dict[int, set[str]] = {}
        for i in order:
            found[i] |= self.touched[i] - self.kept
            for j in self.program.dependencies[i]:
                found[i] |= arriving.pop(j, set())
            if self.held[i]:
                arriving[i] = self.held[i] - self.kept
        return found


def peak_memory(program: Program, order: Sequence[int] | None = None) -> int:
    """Bytes at the worst moment, for a valid order of positions (None: as it is)."""
    return int(max(alive_bytes(Storages(program), order), default=0))


def alive_bytes(storages: Storages, order: Sequence[int] | None = None) -> list[int]:
    """Bytes alive while each instruction of an order runs: what it allocates included, what it frees, too."""
    order = range(len(storages.program)) if order is None else order
    touches = storages.touches(order)
    last = {s: i for i in order for s in touches[i]}
    alive, found = storages.resident_bytes, []
    for i in order:
        alive += sum(storages.bytes[s] for s in storages.born[i])
        found.append(alive)
        alive -= sum(storages.bytes[s] for s in touches[i] if last[s] == i)
    return found


class MemoryBudget:
    """Says of each instruction whether it can be issued now without ever getting over a limit.

    What makes it sure (as in the banker's algorithm): were everything that is left issued in the order of the
    Program, no moment would need more than the limit. That holds at first, and `admits` accepts only what
    keeps it so; the first instruction that is left is therefore always possible.

    Args: limit_bytes: at least the peak of the Program's own order.
    """

    def __init__(self, storages: Storages, limit_bytes: float):
        self.storages, self.limit = storages, limit_bytes
        length = len(storages.program)
        self.alive = storages.resident_bytes
        self.first = 0
        """The first position that is left."""
        self._profile = np.array(alive_bytes(storages), dtype=np.int64)
        self._is_left = [True] * length
        self._touches = storages.touches(range(length))
        self._left: dict[str, list[int]] = {}
        """Of each storage, the positions left that touch it, ascending."""
        for i, touched in enumerate(self._touches):
            for s in touched:
                self._left.setdefault(s, []).append(i)

    def admits(self, i: int, reserve: float = 0.0) -> bool:
        """Can instruction i be issued now? A `reserve` in bytes stays free, unless it is taken already."""
        more = sum(self.storages.bytes[s] for s in self.storages.born[i])
        if self.alive + more > self.limit:
            return False
        window = self._profile[self.first : i]
        if not len(window):
            return True
        most = int(window.max())
        allowed = max(self.limit - reserve, most)
        if most + more <= allowed:
            return True
        changed = window.copy()
        self._hoist(changed, self.first, i)
        return int(changed.max()) <= allowed

    def issue(self, i: int) -> None:
        """Instruction i is issued now."""
        self._hoist(self._profile, 0, i)
        self.alive += sum(self.storages.bytes[s] for s in self.storages.born[i])
        for s in self._touches[i]:
            self._left[s].remove(i)
            if not self._left[s]:
                self.alive -= self.storages.bytes[s]
        self._profile[i] = _NEVER
        self._is_left[i] = False
        while self.first < len(self._is_left) and not self._is_left[self.first]:
            self.first += 1

    def frees(self, i: int) -> int:
        """Bytes fewer alive once instruction i has run."""
        freed = sum(self.storages.bytes[s] for s in self._touches[i] if self._left[s] == [i])
        return freed - sum(self.storages.bytes[s] for s in self.storages.born[i])

    def _hoist(self, profile: np.ndarray, offset: int, i: int) -> None:
        """What changes, at the positions before i, when i is issued before them all."""
        end = i - offset
        for s in self.storages.born[i]:
            if s in self.storages.kept or self._left[s] != [i]:
                profile[:end] += self.storages.bytes[s]
        for s in self._touches[i]:
            left = self._left[s]
            if left[-1] != i or (len(left) == 1 and s in self.storages.born[i]):
                continue
            # Until now it lived until i; from now on until the one before.
            before = left[-2] + 1 - offset if len(left) > 1 else 0
            profile[max(0, before) : end] -= self.storages.bytes[s]
