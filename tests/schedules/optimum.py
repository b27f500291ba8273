"""How far from the best order is a schedule? The optimum of small programs, by CP-SAT.

Every instruction is an interval; compute and the link each run one at a time. All-reduces only delay who
waits for them: they give way to all-to-alls, so leaving them off the link makes the optimum a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from ortools.sat.python import cp_model

from lancet_kernels.graph.costs.costs import Cost, durations
from lancet_kernels.graph.program.program import Kind, Program

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
