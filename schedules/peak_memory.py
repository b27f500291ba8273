"""How many bytes are alive at the worst moment? A storage lives from its producer's start to its last
reader's end.

Program inputs (parameters, optimizer state) and outputs stay. A weight gradient that waits keeps the
activations it reads alive, and an all-to-all in flight keeps its buffers: both are counted, because readers
end when the simulation says they do.
"""

from __future__ import annotations

from collections.abc import Sequence

from lancet_kernels.graph.program import Program


def resident_bytes(program: Program) -> int:
    """What is allocated before the first instruction: the storages of all inputs."""
    return sum(program.tensors[s].bytes for s in {program.storage[t] for t in program.inputs})


def peak_memory(program: Program, start: Sequence[float], end: Sequence[float]) -> int:
    """Bytes at the worst moment, for start and end times by position.

    What ends at a moment is freed before what starts then is allocated.
    """
    resident = {program.storage[t] for t in program.inputs}
    kept = {program.storage[t] for t in program.outputs}
    born: dict[str, float] = {}
    last: dict[str, float] = {}
    for i, instruction in enumerate(program.instructions):
        for t in instruction.outputs:
            s = program.storage[t]
            born[s] = min(born.get(s, start[i]), start[i])
        for t in (*instruction.inputs, *instruction.outputs):
            s = program.storage[t]
            last[s] = max(last.get(s, 0.0), end[i])
    changes: list[tuple[float, int, int]] = []
    for s, moment in born.items():
        size = program.tensors[s].bytes
        if s not in resident and size:
            changes.append((moment, 1, size))
            if s not in kept:
                # A storage that lives for no time at all still counts: it is freed after it is made.
                changes.append((last[s], 0 if last[s] > moment else 2, -size))
    alive = peak = resident_bytes(program)
    for _, _, change in sorted(changes):
        alive += change
        peak = max(peak, alive)
    return peak


class AliveBytes:
    """Bytes alive while instructions are issued one after another."""

    def __init__(self, program: Program):
        self.program = program
        self.alive = resident_bytes(program)
        keep = {program.storage[t] for t in (*program.inputs, *program.outputs)}
        self.touching: list[list[str]] = []
        self.readers: dict[str, int] = {}
        self.born: set[str] = {program.storage[t] for t in program.inputs}
        for instruction in program.instructions:
            touched = {program.storage[t] for t in (*instruction.inputs, *instruction.outputs)} - keep
            self.touching.append(sorted(touched))
            for s in touched:
                self.readers[s] = self.readers.get(s, 0) + 1

    def allocate(self, i: int) -> None:
        for t in self.program.instructions[i].outputs:
            s = self.program.storage[t]
            if s not in self.born:
                self.born.add(s)
                self.alive += self.program.tensors[s].bytes

    def release(self, i: int) -> None:
        for s in self.touching[i]:
            self.readers[s] -= 1
            if not self.readers[s]:
                self.alive -= self.program.tensors[s].bytes

    def net_release(self, i: int) -> int:
        """Bytes fewer alive once instruction i has run."""
        made = {self.program.storage[t] for t in self.program.instructions[i].outputs} - self.born
        freed = sum(self.program.tensors[s].bytes for s in self.touching[i] if self.readers[s] == 1)
        return freed - sum(self.program.tensors[s].bytes for s in made)
