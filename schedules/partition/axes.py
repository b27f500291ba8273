"""Axis inference: the form, and the axis of the cut, of every tensor in a partitioned range (Lancet, section
5.2)

A constraint satisfaction problem over the rule table: one variable per tensor, so that a tensor has the same
form wherever it is used, and one table constraint per instruction. CP-SAT chooses the solution that cuts most
instructions; among equals, the one with the leading axes.

Ranges of the same structure (the layers of a model) share one solution.
"""

from __future__ import annotations

from lancet_kernels.graph.program.forms import (
    CARRIED,
    IRREGULAR,
    PARTIAL,
    WHOLE,
    WINDOW,
    Form,
    Forms,
    cut_along,
)
from lancet_kernels.graph.program.program import Kind, Program
from lancet_kernels.graph.program.reachability import connected
from lancet_kernels.graph.rules.rules import rule_for
from lancet_kernels.schedules.partition.ranges import is_needed_behind

PREFER_CUT = 1000
"""Objective weight of a cut instruction; the index of an axis weighs 1."""
_NUMBERS = {WHOLE: -1, IRREGULAR: -2, PARTIAL: -3, CARRIED: -4, WINDOW: -5}
"""Encoding of forms in the solver's model; a cut is encoded as its dimension. Leading axes are preferred."""


class AxisInference:
    """Infers axes for ranges of one Program. `solved` counts the calls of the solver."""

    def __init__(self, program: Program):
        self.program = program
        self.solved = 0
        self._numbers: dict[tuple, int] = {}
        self._structures: dict[tuple[int, int], int] = {}
        self._solutions: dict[int, tuple[Form, ...] | None] = {}
        self._by_range: dict[tuple[int, int], dict[str, Form] | None] = {}

    def structure(self, first: int, last: int) -> int:
        """A number that stands for the structure of positions first..last (both included)."""
        key = first, last
        if key not in self._structures:
            signature = _signature(self.program, first, last)
            self._structures[key] = self._numbers.setdefault(signature, len(self._numbers))
        return self._structures[key]

    def forms(self, first: int, last: int) -> Forms | None:
        """The forms of all tensors in positions first..last (both included) that are not whole, or None.

        None: the range has no all-to-all, or one of its all-to-alls cannot be cut because of an op without a
        rule or a gate that needs the whole batch.
        """
        key = first, last
        if key not in self._by_range:
            structure = self.structure(first, last)
            inside = self.program.instructions[first : last + 1]
            tensors = list(dict.fromkeys(t for i in inside for t in (*i.inputs, *i.outputs)))
            if structure not in self._solutions:
                self._solutions[structure] = self._solve(first, last, tensors)
            solution = self._solutions[structure]
            self._by_range[key] = None
            if solution is not None:
                forms = zip(tensors, solution, strict=True)
                self._by_range[key] = {t: form for t, form in forms if form != WHOLE}
        return self._by_range[key]

    def _solve(self, first: int, last: int, tensors: list[str]) -> tuple[Form, ...] | None:
        tables = self._tables(first, last)
        if tables is None:
            return None
        # Imported here, so that strategies without partitioning work where the solver is not installed.
        from ortools.sat.python import cp_model

        self.solved += 1
        inside = {t for i in range(first, last + 1) for t in self.program.instructions[i].outputs}
        model = cp_model.CpModel()
        variable = {}
        for t in tensors:
            numbers = [_number(form) for form in self._possible(t, t in inside)]
            variable[t] = model.new_int_var_from_domain(cp_model.Domain.from_values(numbers), t)
        objective = []
        for i, table in tables.items():
            instruction = self.program.instructions[i]
            operands = (*instruction.inputs, *instruction.outputs)
            is_cut = model.new_bool_var(instruction.name)
            rows = [(1, *map(_number, row)) for row in table]
            if instruction.kind is not Kind.ALL_TO_ALL:
                rows.append((0, *[_number(WHOLE)] * len(operands)))
            model.add_allowed_assignments([is_cut, *(variable[t] for t in operands)], rows)
            objective.append(PREFER_CUT * is_cut)
        model.maximize(sum(objective) - sum(variable.values()))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        status = solver.solve(model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        forms = {t: _form(solver.value(variable[t])) for t in tensors}
        useful = self._with_an_all_to_all(first, last, forms)
        return tuple(forms[t] if t in useful else WHOLE for t in tensors)

    def _possible(self, tensor: str, is_inside: bool) -> list[Form]:
        """The possible forms of a tensor: parameters are whole; tensors from before the range are whole or
        cut."""
        if tensor in self.program.parameter_set:
            return [WHOLE]
        cuts = [WHOLE, WINDOW, *map(cut_along, range(len(self.program.tensors[tensor].shape)))]
        return [*cuts, IRREGULAR, PARTIAL, CARRIED] if is_inside else cuts

    def _with_an_all_to_all(self, first: int, last: int, forms: Forms) -> set[str]:
        """The cut tensors that are connected to an all-to-all through other cut tensors; cutting the rest
        would not help overlap. Example: the transpose of a weight that is read only after the range.
        """
        cut_tensors = [t for t, form in forms.items() if form != WHOLE]
        seeds, edges = set(), []
        for instruction in self.program.instructions[first : last + 1]:
            cut = [t for t in (*instruction.inputs, *instruction.outputs) if t in cut_tensors]
            edges += [(cut[0], t) for t in cut[1:]]
            if instruction.kind is Kind.ALL_TO_ALL:
                seeds.update(cut)
        groups = connected(cut_tensors, edges)
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


def _number(form: Form) -> int:
    return _NUMBERS[form] if form.dimension is None else form.dimension


def _form(number: int) -> Form:
    return cut_along(number) if number >= 0 else next(form for form, n in _NUMBERS.items() if n == number)


def _signature(program: Program, first: int, last: int) -> tuple:
    """The structure of a range, without names.

    Ranges with equal signatures have the same ops, shapes, attributes and data flow, and the same tensors are
    read after them; what they cost, and measured times, may differ.
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
