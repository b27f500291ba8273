"""How long does a partitioned range take as a pipeline? P(i, n, k) of Lancet, section 5.3.

Simulated by `schedules.time.clock`: a part of an instruction starts when its inputs are ready and the
preceding instruction on the same resource has ended, in stage order. The time includes a launch for every
part, and the reassembly of the tensors that are read after the range.

Example: compute 4, all-to-all 4, compute 4, no overhead, two parts of 2 each: compute 0-2, 2-4; link 2-4,
4-6; compute 4-6, 6-8. P = 8 instead of 12.
"""

from __future__ import annotations

from dataclasses import dataclass

from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.program.forms import CARRIED, Forms
from lancet_kernels.graph.program.program import Kind, Program
from lancet_kernels.graph.rules.part_instruction import can_be_cut, is_cut, part_instruction
from lancet_kernels.schedules.partition.axes import AxisInference, range_signature
from lancet_kernels.schedules.partition.ranges import outgoing, pipeline_order, reassembly_instruction
from lancet_kernels.schedules.time.clock import INFINITY, Clock, link_of

IMPOSSIBLE = float("inf")


@dataclass(frozen=True)
class PartTime:
    """Start and end of one part of an instruction (part None: it is not cut), in milliseconds from the start
    of the pipeline."""

    position: int
    part: int | None
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Pipeline:
    """The simulated times of a partitioned range. `end_ms` is P(i, n, k), with reassembly."""

    times: tuple[PartTime, ...]
    end_ms: float


def simulate_pipeline(
    program: Program, first: int, last: int, forms: Forms, parts: int, cost: Cost
) -> Pipeline:
    """Start and end of every part of positions first..last (both included)."""
    clock: Clock[tuple[int, int | None]] = Clock()
    part_ms = {i: _part_ms(program, i, forms, parts, cost) for i in range(first, last + 1)}
    cut = {i: is_cut(program.instructions[i], forms) for i in part_ms}
    carried = {i: any(forms.get(t) == CARRIED for t in program.instructions[i].outputs) for i in part_ms}
    order = list(pipeline_order(program, first, last, forms, parts))
    for i, part in order:
        whole = parts - 1 if part is None else part
        # A gather (`Instruction.after`) waits for the first part that reads the unit before its own.
        behind = program.index.get(program.instructions[i].after)
        needed = [(j, 0 if j == behind else whole) for j in program.dependencies[i] if j >= first]
        after: list[tuple[int, int | None]] = [(j, of if cut[j] else None) for j, of in needed]
        if carried[i] and part:
            after.append((i, part - 1))
        if program.instructions[i].kind is Kind.COMPUTE:
            clock.compute((i, part), part_ms[i], after)
        else:
            # Issued as soon as its inputs are ready (`schedules.order.ordering`), not after its whole stage.
            link = link_of(program.instructions[i])
            clock.send((i, part), part_ms[i], after, link=link, issued_at=0.0)
    clock.catch_up(INFINITY)
    times = [PartTime(i, part, clock.start[i, part], clock.end[i, part]) for i, part in order]
    finished = max(t.end_ms for t in times)
    reassembly_ms = sum(
        cost(reassembly_instruction(program, t, forms[t], parts), program.tensors)
        for t in outgoing(program, first, last, forms).reassembled
    )
    return Pipeline(tuple(times), finished + reassembly_ms)


def _part_ms(program: Program, i: int, forms: Forms, parts: int, cost: Cost) -> float:
    instruction = program.instructions[i]
    if parts == 1 or not is_cut(instruction, forms):
        return cost(instruction, program.tensors)
    return cost(*part_instruction(instruction, program.tensors, forms, 0, parts))


class PipelineCosts:
    """P(i, n, k) for ranges of one Program; ranges of the same structure are simulated once."""

    def __init__(self, program: Program, cost: Cost):
        self.program, self.cost = program, cost
        self.inference = AxisInference(program)
        self.simulated = 0
        self._signatures: dict[tuple[int, int], int] = {}
        self._numbers: dict[tuple, int] = {}
        self._simulated_ms: dict[tuple[int, int], float] = {}

    def milliseconds(self, first: int, last: int, parts: int) -> float:
        """P(first, last, parts); infinite if the range cannot be cut into that many parts. parts=1: uncut."""
        key = self._signature(first, last), parts
        if key not in self._simulated_ms:
            self._simulated_ms[key] = self._simulate(first, last, parts)
        return self._simulated_ms[key]

    def forms(self, first: int, last: int) -> Forms | None:
        return self.inference.forms(first, last)

    def _simulate(self, first: int, last: int, parts: int) -> float:
        forms = self.inference.forms(first, last) if parts > 1 else {}
        if forms is None or not can_be_cut(self.program.tensors, forms, parts):
            return IMPOSSIBLE
        self.simulated += 1
        return simulate_pipeline(self.program, first, last, forms, parts, self.cost).end_ms

    def _signature(self, first: int, last: int) -> int:
        key = first, last
        if key not in self._signatures:
            signature, _ = range_signature(self.program, first, last)
            self._signatures[key] = self._numbers.setdefault(signature, len(self._numbers))
        return self._signatures[key]
