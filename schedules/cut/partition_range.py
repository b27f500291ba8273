"""Choice of ranges of the forward pass to cut, and of their numbers of parts (Lancet, section 5.1).

    T(n) = min over i < n and k <= K of T(i) + P(i, n, k)

where T(n) is the best time of the first n instructions and P(i, n, k) that of instructions i to n as a
pipeline of k parts (section 5.3). It runs over groups of consecutive instructions instead of single ones
(gamma), over ranges up to a longest one (iota), and up to a most number of parts (rho).

P is simulated by `schedules.time.simulate`: a part of an instruction starts when its inputs are ready and the
preceding instruction on the same resource has ended, in stage order. The time includes a launch for every
part, and the reassembly of the tensors that are read after the range.

Example: compute 4, all-to-all 4, compute 4, no overhead, two parts of 2 each: compute 0-2, 2-4; link 2-4,
4-6; compute 4-6, 6-8. P = 8 instead of 12.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.costs import Cost, durations
from lancet_kernels.graph.costs.part_instruction import can_be_cut, is_cut, part_instruction
from lancet_kernels.graph.ops import is_gate
from lancet_kernels.graph.program import Kind, Phase, Program
from lancet_kernels.graph.rules.rules import CARRIED, Forms
from lancet_kernels.schedules.cut.ranges import (
    AxisInference,
    PartitionRange,
    pipeline_order,
    reassembled,
    reassembly_instruction,
)
from lancet_kernels.schedules.time.simulate import INFINITY, Clock, link_of

IMPOSSIBLE = INFINITY


class PipelineCosts:
    """P(i, n, k) for ranges of one Program; ranges of the same structure and costs are simulated once."""

    def __init__(self, program: Program, cost: Cost):
        self.program, self.cost = program, cost
        self.inference = AxisInference(program)
        self._costs = tuple((x.flops, x.bytes, x.milliseconds) for x in program.instructions)
        self._simulated_ms: dict[tuple[int, tuple[object, ...], int], float] = {}
        self._parts_ms: dict[tuple[object, ...], float] = {}

    def milliseconds(self, first: int, last: int, parts: int) -> float:
        """P(first, last, parts) of positions first..last (both included), with reassembly; infinite if the
        range cannot be cut into that many parts. parts=1: uncut."""
        key = self.inference.structure(first, last), self._costs[first : last + 1], parts
        if key not in self._simulated_ms:
            self._simulated_ms[key] = self._pipeline_ms(first, last, parts)
        return self._simulated_ms[key]

    def cut(self, first: int, last: int, parts: int) -> PartitionRange:
        """A range that can be cut, as part of a plan."""
        names = self.program.instructions[first].name, self.program.instructions[last].name
        forms = self.inference.forms(first, last)
        assert forms is not None, f"{names}: chosen, and cannot be cut"
        return PartitionRange(*names, parts, forms)

    def _pipeline_ms(self, first: int, last: int, parts: int) -> float:
        forms = self.inference.forms(first, last) if parts > 1 else {}
        if forms is None or not can_be_cut(self.program.tensors, forms, parts):
            return IMPOSSIBLE
        program, instructions = self.program, self.program.instructions
        clock: Clock[tuple[int, int | None]] = Clock()
        positions = range(first, last + 1)
        part_ms = {i: self._part_ms(i, forms, parts) for i in positions}
        cut = {i: is_cut(instructions[i], forms) for i in positions}
        carried = {i: any(forms.get(t) == CARRIED for t in instructions[i].outputs) for i in positions}
        needed = {i: [j for j in program.dependencies[i] if j >= first] for i in positions}
        # A gather (`Instruction.after`) waits for the first part that reads the unit before its own.
        behind = {i: program.index.get(instructions[i].after) for i in positions}
        for i, part in pipeline_order(program, first, last, forms, parts):
            whole = parts - 1 if part is None else part
            after: list[tuple[int, int | None]] = [
                (j, (0 if j == behind[i] else whole) if cut[j] else None) for j in needed[i]
            ]
            if carried[i] and part:
                after.append((i, part - 1))
            if instructions[i].kind is Kind.COMPUTE:
                clock.compute((i, part), part_ms[i], after)
            else:
                # Issued as soon as its inputs are ready, not after its whole stage.
                clock.send((i, part), part_ms[i], after, link=link_of(instructions[i]), issued_at=0.0)
        clock.catch_up(INFINITY)
        reassembly_ms = sum(
            self.cost(reassembly_instruction(program, t, forms[t], parts), program.tensors)
            for t in reassembled(program, first, last, forms)
        )
        return max(clock.end.values()) + reassembly_ms

    def _part_ms(self, i: int, forms: Forms, parts: int) -> float:
        """The first part of an instruction; ranges share instructions."""
        instruction, tensors = self.program.instructions[i], self.program.tensors
        if parts == 1 or not is_cut(instruction, forms):
            return self.cost(instruction, tensors)
        key = i, parts, tuple(map(forms.get, (*instruction.inputs, *instruction.outputs)))
        if key not in self._parts_ms:
            self._parts_ms[key] = self.cost(*part_instruction(instruction, tensors, forms, 0, parts))
        return self._parts_ms[key]


WHOLE_FORWARD_LAYERS = 4
"""The most MoE layers of a forward for which one range over all of them is tried as well."""
GROUPS_BETWEEN_MOE_LAYERS = 5
"""The paper's choice of gamma, where it is not given (section 7, hyper parameters)."""


@dataclass(frozen=True)
class PartitionOptions:
    """The paper's three hyper-parameters.

    most_parts (rho): no instruction is cut into more parts.
    group_ms (gamma): consecutive instructions are grouped until they take this long.
    longest_range_ms (iota): no range takes longer than this before it is cut.
    None: a fifth of the time between two MoE layers; the time from one MoE layer to the next.
    """

    most_parts: int = 8
    group_ms: float | None = None
    longest_range_ms: float | None = None

    def __post_init__(self):
        if self.most_parts < 1:
            raise UserError("rho", got=self.most_parts, expected="at least 1 part", do="raise LANCET_RHO")
        for name, value in (("gamma", self.group_ms), ("iota", self.longest_range_ms)):
            if value is not None and not value > 0:
                raise UserError(
                    name, got=value, expected="milliseconds > 0", do=f"raise LANCET_{name.upper()}"
                )

    @classmethod
    def from_environment(
        cls,
        most_parts: int | None = None,
        group_ms: float | None = None,
        longest_range_ms: float | None = None,
    ) -> PartitionOptions:
        """What is given; where None, LANCET_RHO (parts), LANCET_GAMMA, LANCET_IOTA (milliseconds); else the
        default. Raises: UserError: a variable that counts is not a number, or out of range."""
        if most_parts is None:
            most_parts = _number("LANCET_RHO", int, cls.most_parts)
        if group_ms is None:
            group_ms = _number("LANCET_GAMMA", float, None)
        if longest_range_ms is None:
            longest_range_ms = _number("LANCET_IOTA", float, None)
        return cls(most_parts, group_ms, longest_range_ms)


def _number(variable: str, convert: Callable, default):
    text = os.environ.get(variable)
    if text is None or not text.strip():
        return default
    try:
        return convert(text)
    except ValueError:
        raise UserError(
            variable, got=text, expected=f"a number ({convert.__name__})", do="correct or unset it"
        ) from None


def forward_length(program: Program) -> int:
    """The number of instructions before the first one of another phase."""
    phases = (i for i, x in enumerate(program.instructions) if x.phase is not Phase.FORWARD)
    return next(phases, len(program))


def choose_ranges(
    costs: PipelineCosts, options: PartitionOptions
) -> tuple[tuple[PartitionRange, ...], float]:
    """The ranges of the forward pass with the least T(N), the predicted time of the forward pass, and T(N).

    A gate that needs the whole batch has no valid cut, so a range around it costs infinitely much: ranges
    then start behind the gate.
    """
    program = costs.program
    length = forward_length(program)
    ms = durations(program, costs.cost)[:length]
    moe_layers = max(1, program_gates(program, length))
    group_ms = options.group_ms or sum(ms) / moe_layers / GROUPS_BETWEEN_MOE_LAYERS
    longest_ms = options.longest_range_ms or sum(ms) / moe_layers
    groups = group_instructions(program, ms, group_ms)
    compute_ms = [
        0.0 if x.kind.is_communication else t for x, t in zip(program.instructions, ms, strict=False)
    ]
    group_total, group_compute = ([sum(of[a : b + 1]) for a, b in groups] for of in (ms, compute_ms))
    best = [0.0] + [IMPOSSIBLE] * len(groups)
    choice: list[tuple[int, int]] = [(0, 1)] * (len(groups) + 1)
    for n in range(1, len(groups) + 1):
        total = compute = 0.0
        for i in reversed(range(n)):
            total += group_total[i]
            compute += group_compute[i]
            if total > longest_ms and i < n - 1:
                break
            # Cutting never makes computation shorter, so this range cannot beat what is known.
            if best[i] + compute >= best[n]:
                continue
            has_communication = total > compute
            for k in range(1, options.most_parts + 1 if has_communication else 2):
                time = best[i] + costs.milliseconds(groups[i][0], groups[n - 1][1], k)
                if time < best[n]:
                    best[n], choice[n] = time, (i, k)
    ranges = []
    n = len(groups)
    while n:
        i, k = choice[n]
        if k > 1:
            ranges.append(costs.cut(groups[i][0], groups[n - 1][1], k))
        n = i
    return tuple(reversed(ranges)), best[-1]


def whole_forward(
    costs: PipelineCosts, most_parts: int, longest_range_ms: float | None
) -> PartitionRange | None:
    """One range with every all-to-all of the forward pass in it; None where there is no valid one.

    The dynamic program chains ranges, each no longer than from one MoE layer to the next: messages left over
    at the end of one range do not overlap the next one. One range for all keeps the link busy throughout. It
    is tried for few layers only: its parts are many.
    """
    program = costs.program
    length = forward_length(program)
    sends = [i for i in program.positions(Kind.ALL_TO_ALL) if i < length]
    ms = durations(program, costs.cost)[:length]
    too_long = longest_range_ms is not None and sum(ms) > longest_range_ms
    if too_long or len(sends) < 4 or program_gates(program, length) > WHOLE_FORWARD_LAYERS:
        return None
    # A longer range is no easier to cut, so the first that works is found by halving.
    starts = range(sends[0] + 1)
    first = bisect_left(starts, True, key=lambda i: costs.inference.forms(i, sends[-1]) is not None)
    if first > sends[0]:
        return None
    ends = range(sends[-1], length)
    behind = bisect_left(ends, True, key=lambda i: costs.inference.forms(first, i) is None)
    best_ms, best = IMPOSSIBLE, None
    for parts in (k for k in (2, 4, 8) if k <= most_parts):
        for last in ends[:behind]:
            instruction = program.instructions[last]
            if last > sends[-1] and not (instruction.flops and instruction.kind is Kind.COMPUTE):
                continue
            time = costs.milliseconds(first, last, parts) + sum(ms[last + 1 :])
            if time < best_ms:
                best_ms, best = time, costs.cut(first, last, parts)
    return best


def program_gates(program: Program, length: int) -> int:
    """MoE layers in the first `length` instructions: gates, or pairs of all-to-alls where there is no
    gate."""
    instructions = program.instructions[:length]
    gates = sum(map(is_gate, instructions))
    return gates or sum(i.kind is Kind.ALL_TO_ALL for i in instructions) // 2


def group_instructions(program: Program, ms: list[float], group_ms: float) -> list[tuple[int, int]]:
    """(first, last) of consecutive instructions that take about `group_ms` together.

    Gates and all-to-alls have groups of their own, so that a range can start or end right beside them.
    """
    groups: list[tuple[int, int]] = []
    first, total = 0, 0.0
    instructions = program.instructions[: len(ms)]
    alone = [i.kind is Kind.ALL_TO_ALL or is_gate(i) for i in instructions]
    for i, one_ms in enumerate(ms):
        total += one_ms
        if any(alone[i : i + 2]) or i + 1 == len(ms) or total >= group_ms:
            groups.append((first, i))
            first, total = i + 1, 0.0
    return groups
