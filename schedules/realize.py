"""From a Plan to graphs that run: ranges cut, everything in the planned order, collectives started early.

A Planner's order speaks of the Program with its ranges cut (`ranges.expand`). Cutting the graph adds slices,
slots and counts of parts, and whole tensors again: `realize` puts these where they are needed and returns the
plan with the order of the graph that runs. A plan with such an order (`Plan.realized`) is followed to the
letter, or refused: when it is put into a graph, and again when torch has split forward from backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torch import fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture import split_joint
from lancet_kernels.graph.from_fx import forward_nodes
from lancet_kernels.graph.program import Program
from lancet_kernels.schedules.apply import full_order, instruction_order, reorder, start_early_wait_late
from lancet_kernels.schedules.cut import Cut, cut_range
from lancet_kernels.schedules.plan import Plan


def realize(module: fx.GraphModule, program: Program, plan: Plan) -> Plan:
    """Put a plan into a joint graph, of which `program` is the Program.

    Returns: the plan with the order in which the graph now stands.
    Raises: UserError (the plan is for another program, or its order is not valid), CutError.
    """
    plan.check(program)
    if not plan.realized:
        plan.apply(program)
    for planned in plan.ranges:
        first, last = program.index[planned.first], program.index[planned.last]
        names = tuple(i.name for i in program.instructions[first : last + 1])
        cut_range(module.graph, Cut(names, planned.parts, planned.forms))
    order: Sequence[str] = plan.order if plan.realized else _with_added_nodes(module, plan.order)
    reorder(module.graph, order)
    module.recompile()
    return replace(plan, order=tuple(order), realized=True)


def _with_added_nodes(module: fx.GraphModule, planned: Sequence[str]) -> list[str]:
    """The order of a Program's instructions, with the nodes that only the cut graph has."""
    nodes = {node.name: node for node in module.graph.nodes if node.op == "call_function"}
    order = full_order(module.graph, [name for name in planned if name in nodes])
    forward = forward_nodes(list(module.graph.nodes))
    # Wholes that only the backward reads are put together in the forward all the same.
    return sorted(order, key=lambda name: nodes[name] not in forward)


def split_as_planned(
    joint: fx.GraphModule, forward_outputs: int, plan: Plan
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a realized joint graph, with collectives under way while others compute.

    Raises: UserError if a half does not run its instructions in the order of the plan.
    """
    halves = split_joint(joint, forward_outputs)
    check_halves(instruction_order(joint.graph), [instruction_order(half.graph) for half in halves])
    for half in halves:
        start_early_wait_late(half, plan.blocking)
    return halves


def check_halves(planned: Sequence[str], halves: Sequence[Sequence[str]]) -> None:
    """Raise UserError unless forward, then backward run what was planned in the planned order.

    What nobody reads may be missing: torch drops it.
    """
    ran = [name for half in halves for name in half]
    place = {name: i for i, name in enumerate(planned)}
    for name, times in Counter(ran).items():
        if name not in place or times > 1:
            got = f"{name}, which is in no plan" if name not in place else f"{name} {times} times"
            raise _not_as_planned(got, "each planned instruction once")
    for early, late in pairwise(ran):
        if place[early] > place[late]:
            raise _not_as_planned(f"{early} before {late}", f"{late} first")


def _not_as_planned(got: str, expected: str) -> UserError:
    return UserError(
        "forward and backward graph", got=got, expected=expected, do="report this: torch changed the order"
    )
