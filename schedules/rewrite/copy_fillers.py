"""Weight gradients that the backward launch of one copy of the step computes as fillers for another copy.

A layer's own fillers (`schedules.rewrite.fused`) are gradients of layers whose backward comes before its own.
With copies, one copy is ahead of the other, so the other's launch can also compute gradients of layers whose
backward comes after it. These are chosen here, after the step is cut.

    copy 0: launch, dx of the block below, (its dW)        copy 1: launch with that dW, dx of the block below
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.captured_graph import set_value
from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.costs.part_instruction import whole_name
from lancet_kernels.graph.program.program import Program
from lancet_kernels.graph.program.reachability import bitset
from lancet_kernels.ops.moe import fused_graph
from lancet_kernels.schedules.cut.ranges import LaunchFillers
from lancet_kernels.schedules.rewrite.buckets import call_op
from lancet_kernels.schedules.rewrite.fused import sort_graph
from lancet_kernels.schedules.rewrite.fused_layers import is_weight_gradient
from lancet_kernels.schedules.time.fused_launch import LaunchWork, best_fit


def choose_fillers(
    program: Program, cost: Cost, launches: Mapping[str, LaunchWork], parts: int
) -> tuple[LaunchFillers, ...]:
    """The gradients that become fillers of each copy's backward launch, where the launch hides them.

    Args: program: with the step cut. launches: by name of a backward launch in the uncut graph, its work.
        parts: the number of copies.

    A filler is computed before its launch in the order of the program, and nothing that a launch or a filler
    reads depends on it: this keeps the graph without cycles.
    """
    instructions = program.instructions

    def dtype(position: int) -> str:
        return program.tensors[instructions[position].outputs[0]].dtype

    at = [i for i, x in enumerate(instructions) if whole_name(x.name) in launches]
    gradients = [i for i in range(len(program)) if _is_weight_gradient(program, i)]
    needed = 0
    for i in (*at, *gradients):
        needed |= program.reachability.ancestors[i]
    free = bitset(gradients) & ~needed
    chosen = []
    for i in at:
        work = launches[whole_name(instructions[i].name)].part(parts)
        riders = {
            instructions[g].name: cost(instructions[g], program.tensors)
            for g in gradients
            if g < i and free >> g & 1 and dtype(g) == dtype(i)
        }
        fillers = best_fit(riders, work)
        if fillers:
            free &= ~bitset([program.index[name] for name in fillers])
            longer = work.milliseconds(sum(riders[name] for name in fillers)) - work.milliseconds()
            alone = cost(instructions[i], program.tensors)
            chosen.append(LaunchFillers(instructions[i].name, tuple(fillers), alone + longer))
    return tuple(chosen)


def _is_weight_gradient(program: Program, position: int) -> bool:
    """Is it `mm(t(dy), x)`, which launches can compute?"""
    instruction = program.instructions[position]
    if instruction.op != "aten.mm":
        return False
    producer = program.producer.get(instruction.inputs[0])
    return producer is not None and program.instructions[producer].op == "aten.t"


def add_fillers(graph: fx.Graph, chosen: Sequence[LaunchFillers]) -> None:
    """Let launches of a cut graph compute their chosen fillers, in place.

    Raises: UserError if the graph has no such launch or gradient.
    """
    nodes = {node.name: node for node in graph.nodes}
    for fillers in chosen:
        launch = nodes.get(fillers.launch)
        gradients = [nodes.get(name) for name in fillers.gradients]
        can_ride = all(node is not None and is_weight_gradient(node) for node in gradients)
        if launch is None or launch.target is not fused_graph.BACKWARD or not can_ride:
            raise UserError(
                "fillers of a plan",
                got=f"{', '.join(fillers.gradients)} in {fillers.launch}, which this graph does not have",
                expected="weight gradients and a backward launch of the cut graph",
                do="plan again",
            )
        _add(graph, launch, [node for node in gradients if node is not None])
    if chosen:
        sort_graph(graph)


def _add(graph: fx.Graph, launch: fx.Node, gradients: Sequence[fx.Node]) -> None:
    dense_a, dense_b = fused_graph.DENSE_ARGUMENTS
    args = list(launch.args)
    args[dense_a] = [*args[dense_a], *(node.args[0].args[0] for node in gradients)]
    args[dense_b] = [*args[dense_b], *(node.args[1] for node in gradients)]
    launch.args = tuple(args)
    before = launch.meta["val"]
    set_value(launch, [*before, *(node.meta["val"] for node in gradients)])
    for index, node in enumerate(gradients, len(before)):
        with graph.inserting_after(launch):
            element = call_op(graph, operator.getitem, launch, index)
        node.replace_all_uses_with(element)
        transposed = node.args[0]
        graph.erase_node(node)
        if not transposed.users:
            graph.erase_node(transposed)
