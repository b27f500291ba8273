"""Algorithm 1 (Lancet, section 4) on Programs: the scheduled program, and which gradient went where."""

from collections.abc import Sequence

from lancet_kernels.graph.costs.costs import Cost, durations
from lancet_kernels.graph.program.program import Program
from lancet_kernels.schedules.order.weight_gradients import assign, greedy_order


def schedule_weight_gradients(program: Program, cost: Cost) -> Program:
    """The program with its weight gradients behind the all-to-alls that they overlap (Algorithm 1)."""
    return program.reordered(greedy_order(program, durations(program, cost)))


def assigned_names(program: Program, ms: Sequence[float]) -> dict[str, list[str]]:
    """`assign` in names, for reports: all-to-all -> weight gradients that overlap it."""
    names = [i.name for i in program.instructions]
    return {
        names[a]: [names[i] for unit in chosen for i in unit.positions]
        for a, chosen in assign(program, ms).items()
    }
