"""MoE layers as fused launches of the overlap kernel: which can be, with which fillers, and their insertion.

An overlap group is an MoE layer: its all-to-alls and the computation that hides them, which is its own expert
GEMMs (forward, dgrad, wgrad) and, in the backward launch, weight gradients of other layers. On streams, a
collective runs beside GEMM kernels, and is exposed where it is longer than these. Fused, GEMM tiles and puts
share one launch. A step has all its layers fused that can be, or none: whatever is faster as a whole.

A weight gradient becomes a filler of the launch if most of its time is hidden there. The longest is tried
first: best fit, as in the paper's Algorithm 1, which does this for collectives on streams.

Layers are fused before the step is cut. A launch can then be cut into one for each copy of the step (duplex),
which may get more fillers, weight gradients of another copy:

A layer's own fillers are gradients of layers whose backward comes before its own.
With copies, one copy is ahead of the other, so the other's launch can also compute gradients of layers whose
backward comes after it. These are chosen here, after the step is cut.

    copy 0: launch, dx of the block below, (its dW)        copy 1: launch with that dW, dx of the block below
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from torch import fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.captured_graph import set_value
from lancet_kernels.graph.capture.trace import layer_meta
from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.costs.part_instruction import whole_name
from lancet_kernels.graph.meta import KEPT_BYTES, MILLISECONDS, WORK
from lancet_kernels.graph.program.program import Kind, Program, bitset
from lancet_kernels.ops.moe import fused_graph
from lancet_kernels.schedules.cut.ranges import LaunchFillers
from lancet_kernels.schedules.plan import FusedGroup, LaunchWork, best_fit
from lancet_kernels.schedules.rewrite.buckets import call_op
from lancet_kernels.schedules.rewrite.fused_layers import (
    MatchedLayer,
    independent_gradients,
    is_weight_gradient,
    match_layers,
)

CHOICES = ("auto", "fused", "streams")


def every_launch(module: fx.GraphModule, program: Program, cost: Cost) -> tuple[FusedGroup, ...]:
    """Every MoE layer of a joint graph as fused launches, where it can be, with fillers; in their order.

    Args: program: of the graph.
    """
    layers, refused = match_layers(module.graph)
    ms = {i.name: cost(i, program.tensors) for i in program.instructions}
    nothing = LaunchWork(0.0, 0.0)
    groups = [
        FusedGroup(name, False, (), nothing, nothing, f"streams: {why}") for name, why in refused.items()
    ]
    used: set[str] = set()
    for layer in layers:
        forward, backward = (_work(nodes, program, ms) for nodes in (layer.forward, layer.backward))
        names = [node.name for node in independent_gradients(module.graph, layer)]
        fillers = best_fit({name: ms[name] for name in names if name not in used}, backward)
        used.update(fillers)
        filled = backward._replace(gemm_ms=backward.gemm_ms + sum(ms[name] for name in fillers))
        groups.append(FusedGroup(layer.name, True, tuple(fillers), forward, filled, "fused"))
    return tuple(sorted(groups, key=lambda group: program.index[group.layer]))


def _work(nodes: Sequence[fx.Node], program: Program, ms: Mapping[str, float]) -> LaunchWork:
    names = [node.name for node in nodes if node.name in program.index]
    computed = [n for n in names if program.instructions[program.index[n]].kind is Kind.COMPUTE]
    gemm_ms = sum(ms[n] for n in computed)
    return LaunchWork(sum(ms[n] for n in names) - gemm_ms, gemm_ms)


def lower(
    module: fx.GraphModule, groups: Sequence[FusedGroup], context_of_layer: Callable[[MatchedLayer], int]
) -> None:
    """Replace the ops of every fused group of a joint graph by two fused instructions, in place.

    Args: context_of_layer: gives the number of the context (`ops.context`) that has a layer's exchange.
    Raises: UserError if a group is not in this graph.
    """
    layers = {layer.name: layer for layer in match_layers(module.graph)[0]}
    nodes = {node.name: node for node in module.graph.nodes}
    for group in groups:
        if not group.fused:
            continue
        missing = [name for name in (group.layer, *group.fillers) if name not in nodes]
        if group.layer not in layers or missing:
            raise UserError(
                "fused group of a plan",
                got=f"{group.layer}, which this graph does not have ({', '.join(missing) or 'not fusable'})",
                expected="a layer of the captured graph",
                do="plan again",
            )
        layer = layers[group.layer]
        _lower(module.graph, layer, [nodes[n] for n in group.fillers], context_of_layer(layer), group)
    sort_graph(module.graph)
    module.graph.lint()
    module.recompile()


def _lower(
    graph: fx.Graph, layer: MatchedLayer, fillers: list[fx.Node], context: int, group: FusedGroup
) -> None:
    with graph.inserting_before(layer.combine):
        forward = call_op(
            graph, fused_graph.FORWARD, layer.x, layer.expert, layer.row, layer.weight, layer.count,
            layer.w1, layer.b1, layer.w2, layer.b2, layer.capacity, context, layer.name,
        )  # fmt: skip
        out, ticket = (call_op(graph, operator.getitem, forward, i) for i in range(2))
    layer.combine.replace_all_uses_with(out)
    order = {node: i for i, node in enumerate(graph.nodes)}
    results = [layer.dx, layer.dweight, layer.dw1, layer.dw2]
    results += [layer.db1, layer.db2] if layer.b1 is not None else []
    with graph.inserting_before(min(layer.backward, key=order.__getitem__)):
        backward = call_op(
            graph, fused_graph.BACKWARD, layer.dy, ticket, layer.weight, layer.w1, layer.b1, layer.w2,
            layer.b2, [node.args[0].args[0] for node in fillers], [node.args[1] for node in fillers], context,
            layer.name,
        )  # fmt: skip
        for i, node in enumerate([*results, *fillers]):
            if node is not None:
                node.replace_all_uses_with(call_op(graph, operator.getitem, backward, i))
    WORK.set(backward, group.backward)
    if not group.measured:
        for launch, work in ((forward, group.forward), (backward, group.backward)):
            MILLISECONDS.set(launch, work.milliseconds())
    choices = layer.expert.meta["val"].shape[1]
    kept_bytes = fused_graph.layer_of(context, layer.name).kept_bytes(
        layer.x.meta["val"], choices, layer.capacity
    )
    KEPT_BYTES.set(forward, kept_bytes)
    for launch in (forward, backward):
        launch.meta.update(layer_meta(layer.dispatch))
    received = layer.forward[1].args[2]
    dead = sorted([*layer.forward, *layer.backward, *fillers], key=order.__getitem__, reverse=True)
    for node in (*dead, received):
        if not node.users:
            graph.erase_node(node)


def sort_graph(graph: fx.Graph) -> None:
    """Stable topological sort: move nodes behind their inputs, and keep the order otherwise."""
    placed: dict[fx.Node, None] = {}
    for node in graph.nodes:
        stack = [node]
        while stack:
            waiting = [n for n in stack[-1].all_input_nodes if n not in placed]
            if waiting:
                stack.extend(reversed(waiting))
            else:
                placed.setdefault(stack.pop())
    for before, after in pairwise(placed):
        before.append(after)


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
