"""The optimum of small programs, by CP-SAT: the best order, and what may be cut at most.

Every instruction is an interval; compute and the link each run one at a time. All-reduces only delay who
waits for them: they give way to all-to-alls, so leaving them off the link makes the optimum a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from ortools.sat.python import cp_model

from lancet_kernels.graph.costs.costs import Cost, durations
from lancet_kernels.graph.program import Kind, Program
from lancet_kernels.graph.rules.rules import WHOLE
from lancet_kernels.schedules.cut.ranges import PREFER_CUT, AxisInference, _cost

UNITS_PER_MS = 1_000_000
"""The solver works in whole nanoseconds."""


@dataclass(frozen=True)
class Optimum:
    """The best order found, its time, and the proven lower bound; `proven` when the two meet."""

    order: list[int]
    iteration_ms: float
    bound_ms: float
    proven: bool


def optimal_order(program: Program, cost: Cost, *, seconds: float = 10.0) -> Optimum:
    """The order with the shortest iteration, of a small program."""
    units = [round(ms * UNITS_PER_MS) for ms in durations(program, cost)]
    horizon = sum(units)
    model = cp_model.CpModel()
    start = [model.new_int_var(0, horizon, f"start {i.name}") for i in program.instructions]
    end = [model.new_int_var(0, horizon, f"end {i.name}") for i in program.instructions]
    makespan = model.new_int_var(0, horizon, "makespan")
    compute, link = [], []
    for i, instruction in enumerate(program.instructions):
        interval = model.new_interval_var(start[i], units[i], end[i], instruction.name)
        if instruction.kind is Kind.COMPUTE:
            compute.append(interval)
        elif instruction.kind is not Kind.ALL_REDUCE:
            link.append(interval)
    model.add_no_overlap(compute)
    model.add_no_overlap(link)
    for i, before in enumerate(program.dependencies):
        for j in before:
            model.add(start[i] >= end[j])
    model.add_max_equality(makespan, [*end, 0])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    order = sorted(range(len(program)), key=lambda i: (solver.value(start[i]), solver.value(end[i]), i))
    return Optimum(
        order,
        solver.value(makespan) / UNITS_PER_MS,
        solver.best_objective_bound / UNITS_PER_MS,
        status == cp_model.OPTIMAL,
    )


def most_cut(inference: AxisInference, first: int, last: int) -> int | None:
    """What the best forms of a range are worth, as `AxisInference` counts; None: there are none."""
    tables = inference._tables(first, last)
    if tables is None:
        return None
    instructions = inference.program.instructions
    inside = {t for i in range(first, last + 1) for t in instructions[i].outputs}
    model, variable, cut = cp_model.CpModel(), {}, []
    for i, table in tables.items():
        operands = *instructions[i].inputs, *instructions[i].outputs
        for t in operands:
            if t not in variable:
                costs = [_cost(form) for form in inference._possible(t, t in inside)]
                variable[t] = model.new_int_var_from_domain(cp_model.Domain.from_values(costs), t)
        cut.append(model.new_bool_var(instructions[i].name))
        rows = [(1, *map(_cost, row)) for row in table]
        if instructions[i].kind is not Kind.ALL_TO_ALL:
            rows.append((0, *[_cost(WHOLE)] * len(operands)))
        model.add_allowed_assignments([cut[-1], *(variable[t] for t in operands)], rows)
    model.maximize(PREFER_CUT * sum(cut) - sum(variable.values()))
    solver = cp_model.CpSolver()
    return round(solver.objective_value) if solver.solve(model) == cp_model.OPTIMAL else None
