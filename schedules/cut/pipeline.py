"""How long does a partitioned range take as a pipeline? P(i, n, k) of Lancet, section 5.3.

Simulated by `schedules.time.clock`: a part of an instruction starts when its inputs are ready and the
preceding instruction on the same resource has ended, in stage order. The time includes a launch for every
part, and the reassembly of the tensors that are read after the range.

Example: compute 4, all-to-all 4, compute 4, no overhead, two parts of 2 each: compute 0-2, 2-4; link 2-4,
4-6; compute 4-6, 6-8. P = 8 instead of 12.
"""

from __future__ import annotations

from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.costs.part_instruction import can_be_cut, is_cut, part_instruction
from lancet_kernels.graph.program.forms import CARRIED, Forms
from lancet_kernels.graph.program.program import Kind, Program
from lancet_kernels.schedules.cut.axes import AxisInference
from lancet_kernels.schedules.cut.ranges import (
    PartitionRange,
    pipeline_order,
    reassembled,
    reassembly_instruction,
)
from lancet_kernels.schedules.time.clock import INFINITY, Clock, link_of

IMPOSSIBLE = INFINITY


def pipeline_ms(program: Program, first: int, last: int, forms: Forms, parts: int, cost: Cost) -> float:
    """P(first, last, parts), with reassembly, of positions first..last (both included)."""
    clock: Clock[tuple[int, int | None]] = Clock()
    part_ms = {i: _part_ms(program, i, forms, parts, cost) for i in range(first, last + 1)}
    cut = {i: is_cut(program.instructions[i], forms) for i in part_ms}
    carried = {i: any(forms.get(t) == CARRIED for t in program.instructions[i].outputs) for i in part_ms}
    for i, part in pipeline_order(program, first, last, forms, parts):
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
    reassembly_ms = sum(
        cost(reassembly_instruction(program, t, forms[t], parts), program.tensors)
        for t in reassembled(program, first, last, forms)
    )
    return max(clock.end.values()) + reassembly_ms


def _part_ms(program: Program, i: int, forms: Forms, parts: int, cost: Cost) -> float:
    instruction = program.instructions[i]
    if parts == 1 or not is_cut(instruction, forms):
        return cost(instruction, program.tensors)
    return cost(*part_instruction(instruction, program.tensors, forms, 0, parts))


class PipelineCosts:
    """P(i, n, k) for ranges of one Program; ranges of the same structure and costs are simulated once."""

    def __init__(self, program: Program, cost: Cost):
        self.program, self.cost = program, cost
        self.inference = AxisInference(program)
        self._costs = tuple((x.flops, x.bytes, x.milliseconds) for x in program.instructions)
        self._simulated_ms: dict[tuple[int, tuple[object, ...], int], float] = {}

    def milliseconds(self, first: int, last: int, parts: int) -> float:
        """P(first, last, parts); infinite if the range cannot be cut into that many parts. parts=1: uncut."""
        key = self.inference.structure(first, last), self._costs[first : last + 1], parts
        if key not in self._simulated_ms:
            self._simulated_ms[key] = self._simulate(first, last, parts)
        return self._simulated_ms[key]

    def cut(self, first: int, last: int, parts: int) -> PartitionRange:
        """The range, which can be cut, as part of a plan."""
        names = self.program.instructions[first].name, self.program.instructions[last].name
        forms = self.inference.forms(first, last)
        assert forms is not None, f"{names}: chosen, and cannot be cut"
        return PartitionRange(*names, parts, dict(forms))

    def _simulate(self, first: int, last: int, parts: int) -> float:
        forms = self.inference.forms(first, last) if parts > 1 else {}
        if forms is None or not can_be_cut(self.program.tensors, forms, parts):
            return IMPOSSIBLE
        return pipeline_ms(self.program, first, last, forms, parts, self.cost)
