"""A partitioned range of a Program: the order of its parts, and which tensors are reassembled.

Parts run in pipeline order (Lancet, section 5.3). `schedules.rewrite.cut` does the partitioning, on the
graph.

Axis inference gives the form of every tensor in a range (Lancet, section 5.2), a constraint satisfaction
problem over the rule table: a tensor has the same form wherever it is used, and each instruction is cut as
its rule allows. Chosen is the solution that cuts most instructions; among equals, the one with the leading
axes. A dynamic program finds it: walking along the range, it keeps the best choice for each way in which the
tensors that later instructions read may be cut: at most 3 for GPT-2, hundreds among the masks and rotations
of some transformers models, of which the best are followed (DeepSeek-V3 with 2 layers: planned in 11 s, else
in 97 s). CP-SAT gives the same answers in three times the time (886 ranges, OR-tools 9.15, 2 CPU cores,
2026-11-26). Ranges of the same structure (the layers of a model) share one solution.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.part_instruction import is_cut, part_name, reads_whole, reassembly
from lancet_kernels.graph.ops import rule_for
from lancet_kernels.graph.program import Instruction, Kind, Program
from lancet_kernels.graph.rules.rules import (
    CARRIED,
    IRREGULAR,
    PARTIAL,
    WHOLE,
    WINDOW,
    Form,
    Forms,
    cut_along,
)

PREFER_CUT = 1000
"""Objective weight of a cut instruction; the index of an axis weighs 1."""
MOST_WAYS = 200
"""The most ways to cut the live tensors that are followed, those of highest worth."""
_NUMBERS = {WHOLE: -1, IRREGULAR: -2, PARTIAL: -3, CARRIED: -4, WINDOW: -5}
"""Cost of a form; that of a cut is its dimension: leading axes are preferred."""


class AxisInference:
    """Infers axes for ranges of one Program."""

    def __init__(self, program: Program):
        self.program = program
        self._numbers: dict[tuple, int] = {}
        self._structures: dict[tuple[int, int], int] = {}
        self._solutions: dict[int, tuple[Form, ...] | None] = {}

    def structure(self, first: int, last: int) -> int:
        """A number that stands for the structure of positions first..last (both included)."""
        key = first, last
        if key not in self._structures:
            signature = _signature(self.program, first, last)
            self._structures[key] = self._numbers.setdefault(signature, len(self._numbers))
        return self._structures[key]

    def forms(self, first: int, last: int) -> Forms | None:
        """The forms of all tensors in positions first..last (both included) that are not whole.

        None: the range has no all-to-all, or one of its all-to-alls cannot be cut because of an op without a
        rule or a gate that needs the whole batch.
        """
        structure = self.structure(first, last)
        inside = self.program.instructions[first : last + 1]
        tensors = list(dict.fromkeys(t for i in inside for t in (*i.inputs, *i.outputs)))
        if structure not in self._solutions:
            self._solutions[structure] = self._solve(first, last, tensors)
        solution = self._solutions[structure]
        if solution is None:
            return None
        return {t: form for t, form in zip(tensors, solution, strict=True) if form != WHOLE}

    def _solve(self, first: int, last: int, tensors: list[str]) -> tuple[Form, ...] | None:
        tables = self._tables(first, last)
        if tables is None:
            return None
        inside = {t for i in range(first, last + 1) for t in self.program.instructions[i].outputs}
        forms = self._best(tables, {t: self._possible(t, t in inside) for t in tensors})
        if forms is None:
            return None
        useful = self._with_an_all_to_all(first, last, forms)
        return tuple(forms[t] if t in useful else WHOLE for t in tensors)

    def _best(
        self, tables: Mapping[int, Sequence[tuple[Form, ...]]], possible: Mapping[str, Collection[Form]]
    ) -> Forms | None:
        """A form of every tensor, of those that are possible; None: there are none. tables: by position."""
        operands = {i: self._operands(i) for i in tables}
        last_use = {t: i for i, tensors in operands.items() for t in tensors}
        # By the forms of live tensors: what the best choice is worth, and the forms it has for all so far.
        live: list[str] = []
        best: dict[tuple[Form, ...], tuple[int, Forms]] = {(): (0, {})}
        for i, tensors in operands.items():
            rows = [(PREFER_CUT, row) for row in tables[i]]
            if self.program.instructions[i].kind is not Kind.ALL_TO_ALL:
                rows.append((0, (WHOLE,) * len(tensors)))
            live = [t for t in dict.fromkeys((*live, *tensors)) if last_use[t] > i]
            following: dict[tuple[Form, ...], tuple[int, Forms]] = {}
            for worth, forms in best.values():
                for gain, row in rows:
                    new = _agreeing(tensors, row, forms, possible)
                    if new is None:
                        continue
                    total = worth + gain - sum(map(_cost, new.values()))
                    extended = {**forms, **new}
                    key = tuple(extended[t] for t in live)
                    if key not in following or following[key][0] < total:
                        following[key] = total, extended
            best = following
            if len(best) > MOST_WAYS:
                best = dict(sorted(best.items(), key=lambda way: -way[1][0])[:MOST_WAYS])
        return best[()][1] if best else None

    def _operands(self, position: int) -> tuple[str, ...]:
        instruction = self.program.instructions[position]
        return *instruction.inputs, *instruction.outputs

    def _possible(self, tensor: str, is_inside: bool) -> list[Form]:
        """The forms of a tensor: parameters are whole; those from before the range are whole or cut."""
        if tensor in self.program.parameter_set:
            return [WHOLE]
        cuts = [WHOLE, WINDOW, *map(cut_along, range(len(self.program.tensors[tensor].shape)))]
        return [*cuts, IRREGULAR, PARTIAL, CARRIED] if is_inside else cuts

    def _with_an_all_to_all(self, first: int, last: int, forms: Forms) -> set[str]:
        """The cut tensors that are connected to an all-to-all through other cut tensors; cutting the rest
        (the transpose of a weight that is read only after the range, say) would not help overlap."""
        graph, seeds = networkx.Graph(), set()
        for instruction in self.program.instructions[first : last + 1]:
            operands = (*instruction.inputs, *instruction.outputs)
            cut = [t for t in operands if forms[t] != WHOLE]
            networkx.add_star(graph, cut)
            if instruction.kind is Kind.ALL_TO_ALL:
                seeds.update(cut)
        groups = networkx.connected_components(graph)
        return {t for group in groups if not seeds.isdisjoint(group) for t in group}

    def _tables(self, first: int, last: int) -> dict[int, list[tuple[Form, ...]]] | None:
        """The ways to cut each instruction; None if an all-to-all has none."""
        program = self.program
        instructions = program.instructions[first : last + 1]
        if not any(i.kind is Kind.ALL_TO_ALL for i in instructions):
            return None
        rules = [rule_for(i) for i in instructions]
        only_experts = all(rule is not None and rule.in_experts for rule in rules)
        tables = {}
        for i, (instruction, rule) in enumerate(zip(instructions, rules, strict=True), first):
            table = rule.assignments(instruction, program.tensors, only_experts=only_experts) if rule else []
            if not table and instruction.kind is Kind.ALL_TO_ALL:
                return None
            tables[i] = table
        return tables


def _cost(form: Form) -> int:
    return _NUMBERS[form] if form.dimension is None else form.dimension


def _agreeing(
    tensors: Sequence[str], row: Sequence[Form], forms: Forms, possible: Mapping[str, Collection[Form]]
) -> Forms | None:
    """The forms that a row of a table gives to tensors without one; None if it contradicts others."""
    new: dict[str, Form] = {}
    for t, form in zip(tensors, row, strict=True):
        if form not in possible[t] or forms.get(t, new.get(t, form)) != form:
            return None
        if t not in forms:
            new[t] = form
    return new


def _signature(program: Program, first: int, last: int) -> tuple:
    """The structure of a range, without names.

    Ranges with equal signatures have the same ops, shapes, attributes and data flow, and the same tensors are
    read after them; costs may differ.
    """
    number: dict[str, int] = {}
    rows = []
    for i in range(first, last + 1):
        instruction = program.instructions[i]
        operands = []
        for t in (*instruction.inputs, *instruction.outputs):
            spec = program.tensors[t]
            number.setdefault(t, len(number))
            operands.append((number[t], spec.shape, spec.dtype, t in program.parameter_set))
        outside = tuple(is_needed_behind(program, t, last) for t in instruction.outputs)
        attributes = tuple(sorted((k, repr(v)) for k, v in instruction.attributes.items()))
        what = instruction.op, instruction.kind, len(instruction.inputs)
        rows.append((what, tuple(operands), outside, attributes))
    return tuple(rows)


@dataclass(frozen=True)
class PartitionRange:
    """Instructions first..last (names, both included), cut into `parts`; forms: of tensors that are not whole
    in a part."""

    first: str
    last: str
    parts: int
    forms: Forms


@dataclass
class PipelineStage:
    """Consecutive computation, or consecutive communication. Parts run stage by stage.

    in_parts: positions that run once per part, and uncut ones that these read. behind: positions that run
    once, after all parts of the stage, because they read its results as a whole.
    """

    in_parts: list[int]
    behind: list[int]


def range_names(ranges: Sequence[PartitionRange]) -> tuple[tuple[object, ...], ...]:
    """An identifier of ranges within one Program: first and last name, number of parts."""
    return tuple((r.first, r.last, r.parts) for r in ranges)


def stages(program: Program, first: int, last: int, forms: Forms) -> list[PipelineStage]:
    """The stages of positions first..last.

    Example: compute, compute, all-to-all, compute give three stages of 2, 1 and 1 instructions. A new stage
    begins where a part reads a whole result of the current stage (a sum over the batch).
    """
    result = [PipelineStage([], [])]
    sends: bool | None = None
    """Is the current stage communication? None: it has no cut instruction so far."""
    partial: set[str] = set()
    """Tensors that the current stage computes part by part."""
    late: set[str] = set()
    """Results of the instructions that run after all parts of the current stage."""
    for i in range(first, last + 1):
        instruction = program.instructions[i]
        inputs = instruction.inputs
        if not is_cut(instruction, forms):
            if late.intersection(inputs) or partial.intersection(inputs):
                result[-1].behind.append(i)
                late.update(instruction.outputs)
            else:
                result[-1].in_parts.append(i)
            continue
        needs_whole = any(t in late or (t in partial and reads_whole(instruction, t, forms)) for t in inputs)
        kind = instruction.kind.is_communication
        if needs_whole or (sends is not None and sends != kind):
            result.append(PipelineStage([], []))
            partial, late = set(), set()
        sends = kind
        result[-1].in_parts.append(i)
        partial.update(instruction.outputs)
    return result


def pipeline_order(
    program: Program, first: int, last: int, forms: Forms, parts: int
) -> Iterator[tuple[int, int | None]]:
    """(position, part) in the order of Fig. 9: stage by stage, in each stage part by part.

    The part is None for an instruction that is not cut; it runs once, with the first part, or after all parts
    of the instructions that it reads.
    """
    for stage in stages(program, first, last, forms):
        in_parts = [(i, is_cut(program.instructions[i], forms)) for i in stage.in_parts]
        for part in range(parts):
            for i, cut in in_parts:
                if cut:
                    yield i, part
                elif part == 0:
                    yield i, None
        for i in stage.behind:
            yield i, None


def reassembled(program: Program, first: int, last: int, forms: Forms) -> set[str]:
    """The tensors that parts of a range are joined to, because they are needed whole, after the range or
    inside it. A view that is needed whole is repeated on the joined tensor instead, which is free."""
    in_range = program.instructions[first : last + 1]
    in_parts = {t for i in in_range for t in i.outputs if forms.get(t, WHOLE).is_made_in_parts}
    pending = [t for t in in_parts if is_needed_behind(program, t, last)]
    pending += [t for i in in_range for t in i.inputs if t in in_parts and reads_whole(i, t, forms)]
    joined: set[str] = set()
    repeated: set[int] = set()
    while pending:
        t = pending.pop()
        i = program.producer[t]
        if not program.instructions[i].is_free:
            joined.add(t)
        elif i not in repeated:
            repeated.add(i)
            pending += [source for source in program.instructions[i].inputs if source in in_parts]
    return joined


def is_needed_behind(program: Program, tensor: str, last: int) -> bool:
    """Is the tensor read behind position `last`, or an output of the program?"""
    return program.consumers[tensor][-1:] > [last] or tensor in program.output_set


def reassembly_instruction(program: Program, tensor: str, form: Form, parts: int) -> Instruction:
    """The instruction that joins the parts of a tensor."""
    flops, traffic = reassembly(program.tensors[tensor], form, parts)
    first = parts - 1 if form == CARRIED else 0
    return Instruction(
        f"reassemble {tensor}",
        "lancet.reassemble",
        tuple(part_name(tensor, p) for p in range(first, parts)),
        (tensor,),
        phase=program.instructions[program.producer[tensor]].phase,
        flops=flops,
        bytes=traffic,
        attributes={"form": str(form), "parts": parts},
    )


def positions(program: Program, planned: PartitionRange) -> tuple[int, int]:
    """First and last position of a range. Raises: UserError if it is not in the program."""
    first, last = program.index.get(planned.first, -1), program.index.get(planned.last, -1)
    if not 0 <= first <= last:
        raise UserError(
            "partition range",
            got=f"{planned.first} to {planned.last}",
            expected=f"instructions of {program.name}",
            do="plan again for this program",
        )
    return first, last
