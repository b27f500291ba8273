"""MoE layers as fused launches of the overlap kernel: which can be, with which fillers, and their insertion.

An overlap group is an MoE layer: its all-to-alls and the computation that hides them, which is its own expert
GEMMs (forward, dgrad, wgrad) and, in the backward launch, weight gradients of other layers. On streams, a
collective runs beside GEMM kernels, and is exposed where it is longer than these. Fused, GEMM tiles and puts
share one launch. A step has all its layers fused that can be, or none: whatever is faster as a whole.

A weight gradient becomes a filler of the launch if most of its time is hidden there. The longest is tried
first: best fit, as in the paper's Algorithm 1, which does this for collectives on streams.

Layers are fused before the step is cut. A launch can then be cut into one for each copy of the step (duplex),
which may get more fillers (`schedules.rewrite.copy_fillers`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from torch import fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.layer_names import layer_meta
from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.meta import KEPT_BYTES, MILLISECONDS, WORK
from lancet_kernels.graph.program.program import Kind, Program
from lancet_kernels.ops.moe import fused_graph
from lancet_kernels.schedules.plan import FusedGroup
from lancet_kernels.schedules.rewrite.buckets import call_op
from lancet_kernels.schedules.rewrite.fused_layers import MatchedLayer, independent_gradients, match_layers
from lancet_kernels.schedules.time.fused_launch import LaunchWork, best_fit

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
