"""From a Plan to graphs that run: ranges cut, everything in the planned order, collectives started early.

The plan speaks of a Program and of parts by `name[1/2]`; the graph has nodes. What the plan lists and
the graph has under another name is matched here; what cutting adds (slices, slots and counts of parts,
whole tensors again) goes where it is needed.
"""

from __future__ import annotations

import re

from torch import fx

from lancet_kernels.graph.capture import split_joint
from lancet_kernels.graph.cut import is_cut
from lancet_kernels.graph.from_fx import forward_nodes
from lancet_kernels.graph.program import Program
from lancet_kernels.schedules.apply import full_order, reorder, start_early_wait_late
from lancet_kernels.schedules.cut import Cut, cut_range
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.ranges import pipeline_order

_PART = re.compile(r"^(.*)\[(\d+)/\d+\]$")


def realize(module: fx.GraphModule, program: Program, plan: Plan) -> None:
    """Put a plan into a joint graph, of which `program` is the Program.

    Raises: UserError (the plan is for another program, or its order is not valid), CutError.
    """
    plan.check(program)
    for planned in plan.ranges:
        first, last = program.index[planned.first], program.index[planned.last]
        names = tuple(i.name for i in program.instructions[first : last + 1])
        order = [
            (program.instructions[i].name, part)
            for i, part in pipeline_order(program, first, last, planned.axes, planned.parts)
            if is_cut(program.instructions[i], planned.axes)
        ]
        cut_range(module.graph, Cut(names, planned.parts, planned.axes), order)
    present = {node.name for node in module.graph.nodes if node.op == "call_function"}
    wanted = [name for name in map(node_name, plan.order) if name in present]
    order = full_order(module.graph, wanted)
    forward = {node.name for node in forward_nodes(list(module.graph.nodes))}
    # Forward and backward run apart: what the backward alone reads still belongs to the forward.
    order.sort(key=lambda name: name not in forward)
    reorder(module.graph, order)
    module.recompile()


def node_name(planned: str) -> str:
    """The node of an instruction of a plan. Example: `gate[2/4]` -> `gate_part1`."""
    part = _PART.match(planned)
    return f"{part[1]}_part{int(part[2]) - 1}" if part else planned


def split_as_planned(
    joint: fx.GraphModule, forward_outputs: int, plan: Plan
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a realized joint graph, with collectives under way while others compute."""
    blocking = {node_name(name) for name in plan.blocking}
    halves = split_joint(joint, forward_outputs)
    for half in halves:
        start_early_wait_late(half, blocking)
    return halves
