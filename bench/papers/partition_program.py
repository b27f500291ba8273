"""One device's forward and backward of partitioned operators as a Program, for the clock and its pictures.

Each step of a phase is an instruction, each tile that travels beside it a message, started before it and
waited for behind it; all-reduces and redistributions are waited for at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from lancet_kernels.graph.program.program import Instruction, Kind, Phase, Program, TensorSpec
from lancet_kernels.graph.rules.slices import BACKWARD, FORWARD, GRADIENT, Partition
from lancet_kernels.schedules.linears.partition_costs import phase_times, redistributions
from lancet_kernels.schedules.linears.segments import Problem


class _Writer:
    """Instructions one after another; what comes next reads what is `needed`."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.needed: list[str] = ["input"]

    def add(self, name: str, kind: Kind, phase: Phase, ms: float) -> str:
        """-> its output. Computation and what is waited for is needed by all that follows."""
        self.instructions.append(
            Instruction(name, name, tuple(self.needed), (name,), kind, phase, milliseconds=ms)
        )
        return name

    def step(self, name: str, phase: Phase, ms: float, travelling: Sequence[tuple[str, float]]) -> None:
        tiles = [self.add(f"{name}, {t}", Kind.POINT_TO_POINT, phase, shift) for t, shift in travelling]
        self.needed = [self.add(name, Kind.COMPUTE, phase, ms), *tiles]

    def waited(self, name: str, kind: Kind, phase: Phase, ms: float) -> None:
        if ms:
            self.needed = [self.add(name, kind, phase, ms)]

    def program(self, name: str) -> Program:
        tensors = {t: TensorSpec(t, (1,)) for i in self.instructions for t in i.outputs}
        tensors["input"] = TensorSpec("input", (1,))
        return Program(name, tuple(self.instructions), tensors, ("input",), tuple(self.needed))


def partition_program(problem: Problem, partitions: Sequence[Partition], name: str = "partition") -> Program:
    """One layer under the given partitions, in order of its operators; times are the cost model's."""
    writer, cluster = _Writer(), problem.cluster
    placed = list(zip(problem.operators, partitions, strict=True))

    def phase_of(n: int, which: str) -> None:
        operator, partition = placed[n]
        if which not in operator.products:
            return
        phase = Phase.FORWARD if which == FORWARD else Phase.BACKWARD
        times = phase_times(cluster, operator, partition, operator.products[which])
        for t, travelling in enumerate(times.travelling):
            place = f" {t}" if len(times.travelling) > 1 else ""
            writer.step(f"{operator.name} {which}{place}", phase, times.step_ms, travelling)
        writer.waited(f"sum of {operator.name} {which}", Kind.ALL_REDUCE, phase, times.collective_ms)

    def edges(phase: Phase, n: int) -> None:
        """Those by which something comes to operator n."""
        back = phase is Phase.BACKWARD
        for ends in problem.edges:
            if ends[not back] == n:
                (one, before), (other, after) = (placed[end] for end in ends)
                ms = redistributions(cluster, one, [before], other, [after])[int(back)].item()
                source, target = (other, one) if back else (one, other)
                name = f"{source.name} to {target.name}"
                writer.waited(name, Kind.OTHER_COMMUNICATION, phase, ms)

    for n in range(len(placed)):
        edges(Phase.FORWARD, n)
        phase_of(n, FORWARD)
    for n in reversed(range(len(placed))):
        edges(Phase.BACKWARD, n)
        phase_of(n, BACKWARD)
        phase_of(n, GRADIENT)
    return writer.program(name)
