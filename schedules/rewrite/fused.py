"""MoE layers as fused launches of the overlap kernel: which layers, with which fillers, and their insertion.

An overlap group is an MoE layer: its all-to-alls and the computation that hides them, which is its own expert
GEMMs (forward, dgrad, wgrad) and, in the backward launch, weight gradients of other layers. On streams, a
collective runs beside GEMM kernels; fused, GEMM tiles and puts share one launch. A step fuses all layers that
it can, or none, whichever is faster as a whole.

A weight gradient becomes a filler of the launch if most of its time is hidden there. The longest is tried
first: best fit, as in the paper's Algorithm 1, which does this for collectives on streams. Layers are fused
before the step is cut; a launch can then be cut into one for each copy of the step (duplex).

The ops of a layer in a captured graph (biases and the gradient of the gate weights are optional):

    dispatch -> all_to_all -> grouped_gemm -> expert_activation -> grouped_gemm -> all_to_all -> combine

    dispatch(dy, weight) -> all_to_all -> grouped_gemm_dx -> expert_activation_backward -> grouped_gemm_dx
        -> all_to_all -> combine; and two grouped_gemm_dw, two grouped_gemm_dbias, combine_dweight

A layer matches completely or not at all; `Refused` gives the reason.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from torch import fx

from lancet_kernels.graph.capture.trace import layer_meta
from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.from_fx import op_name
from lancet_kernels.graph.meta import KEPT_BYTES, MILLISECONDS, REGION
from lancet_kernels.graph.program import Kind, Program, recomputed_name
from lancet_kernels.kernels.config import DTYPES
from lancet_kernels.ops.moe import fused_graph
from lancet_kernels.schedules.plan import FusedGroup, LaunchWork, best_fit
from lancet_kernels.schedules.rewrite.buckets import call_op


@dataclass(frozen=True)
class MatchedLayer:
    """The nodes of one layer; None if the graph has no such node.

    forward, backward: all nodes that the fused instructions replace, in graph order.
    """

    dispatch: fx.Node
    combine: fx.Node
    x: fx.Node
    expert: fx.Node
    row: fx.Node
    weight: fx.Node
    count: fx.Node
    w1: fx.Node
    b1: fx.Node | None
    w2: fx.Node
    b2: fx.Node | None
    activation: str
    group: str
    capacity: int
    dy: fx.Node
    dx: fx.Node
    dweight: fx.Node | None
    dw1: fx.Node
    dw2: fx.Node
    db1: fx.Node | None
    db2: fx.Node | None
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]

    @property
    def name(self) -> str:
        """The layer's name in plans: its first instruction."""
        return self.dispatch.name


class Refused(Exception):
    """A layer cannot be fused. The message is the reason."""


def match_layers(graph: fx.Graph) -> tuple[list[MatchedLayer], dict[str, str]]:
    """-> the layers that can be fused, in order; for the others, the reason by name of the dispatch."""
    matched, refused = [], {}
    for node in graph.nodes:
        # A forward dispatch has no weight; the backward one does, as the adjoint of a weighted combine.
        if op_name(node) == "lancet.dispatch" and node.args[2] is None and not REGION.on(node):
            try:
                matched.append(_match(node))
            except Refused as reason:
                refused[node.name] = str(reason)
    return matched, refused


def _match(dispatch: fx.Node) -> MatchedLayer:
    if (dtype := dispatch.meta["val"].dtype) not in DTYPES:
        raise Refused(f"its rows are {str(dtype).removeprefix('torch.')}")
    if any(node.name == recomputed_name(dispatch.name) for node in dispatch.graph.nodes):
        raise Refused("activation checkpointing: its backward reads recomputed rows, not those of a launch")
    x, row = dispatch.args[:2]
    if op_name(row) != "lancet.send_rows" or op_name(row.args[2]) != "lancet.kept_counts":
        raise Refused("its dispatch is partitioned")
    expert, _, count = row.args
    sent = _reader(dispatch, "lancet.all_to_all")
    first = _reader(sent, "lancet.grouped_gemm")
    activation = _reader(first, "lancet.expert_activation")
    second = _reader(activation, "lancet.grouped_gemm")
    back = _reader(second, "lancet.all_to_all")
    combine = _reader(back, "lancet.combine")
    if combine.args[1] is not row or combine.args[2] is None:
        raise Refused("its combine reads another routing")
    weight = combine.args[2]

    # All readers from here on belong to the backward pass.
    dw2 = _reader(activation, "lancet.grouped_gemm_dw")
    dy_sent = dw2.args[1]
    dy_dispatch = dy_sent.args[0]
    if op_name(dy_sent) != "lancet.all_to_all" or op_name(dy_dispatch) != "lancet.dispatch":
        raise Refused("its backward does not dispatch the gradient")
    dhidden = _reader(dy_sent, "lancet.grouped_gemm_dx")
    dpre = _reader(dhidden, "lancet.expert_activation_backward")
    drows = _reader(dpre, "lancet.grouped_gemm_dx")
    dw1 = _reader(sent, "lancet.grouped_gemm_dw")
    dx_back = _reader(drows, "lancet.all_to_all")
    dx = _reader(dx_back, "lancet.combine")
    b1, b2 = first.args[3], second.args[3]
    db1 = _reader(dpre, "lancet.grouped_gemm_dbias") if b1 is not None else None
    db2 = _reader(dy_sent, "lancet.grouped_gemm_dbias") if b2 is not None else None
    if (b1 is None) != (b2 is None):
        raise Refused("only one of its GEMMs has a bias")
    dweight = _maybe_reader(back, "lancet.combine_dweight")
    forward = (dispatch, sent, first, activation, second, back, combine)
    backward = (dy_dispatch, dy_sent, dhidden, dw2, db2, dpre, drows, dw1, db1, dx_back, dx, dweight)
    backward = tuple(node for node in backward if node is not None)
    inside = {*forward, *backward}
    results = {combine, dx, dweight, dw1, dw2, db1, db2}
    for node in inside - results:
        others = [user.name for user in node.users if user not in inside]
        if others:
            raise Refused(f"{others[0]} reads {node.name}, which fused kernels do not return")
    return MatchedLayer(
        dispatch, combine, x, expert, row, weight, count, first.args[2], b1, second.args[2], b2,
        activation.args[2], sent.args[3], count.args[1], dy_dispatch.args[0], dx, dweight, dw1, dw2, db1, db2,
        forward, backward,
    )  # fmt: skip


def _maybe_reader(node: fx.Node, op: str) -> fx.Node | None:
    readers = [user for user in node.users if op_name(user) == op]
    return readers[0] if len(readers) == 1 else None


def _reader(node: fx.Node, op: str) -> fx.Node:
    """The only user of `node` with this op. Raises: Refused if there is none, or several."""
    reader = _maybe_reader(node, op)
    if reader is None:
        raise Refused(f"{node.name} is not read by exactly one {op}")
    return reader


def independent_gradients(graph: fx.Graph, layer: MatchedLayer) -> list[fx.Node]:
    """Weight gradients of other layers that the layer's backward launch can compute as fillers.

    Their operands are computed before the launch, the launch does not depend on them, and they have the dtype
    of the rows.
    """
    backward, dtype = set(layer.backward), layer.dispatch.meta["val"].dtype
    needed: set[fx.Node] = set()
    pending = list(backward)
    while pending:
        inputs = set(pending.pop().all_input_nodes) - needed
        needed |= inputs
        pending += inputs
    return [
        node
        for node in takewhile(lambda node: node not in backward, graph.nodes)
        if op_name(node) == "aten.mm" and op_name(node.args[0]) == "aten.t"  # mm(t(dy), x)
        if node not in needed and node.meta["val"].dtype == dtype
    ]


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

    Args: context_of_layer: gives the number of the context (`ops.base`) that has a layer's exchange.
    """
    layers = {layer.name: layer for layer in match_layers(module.graph)[0]}
    nodes = {node.name: node for node in module.graph.nodes}
    for group in groups:
        if not group.fused:
            continue
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
    results = [layer.dx, layer.dweight, layer.dw1, layer.dw2]
    results += [layer.db1, layer.db2] if layer.b1 is not None else []
    with graph.inserting_before(min(layer.backward)):
        backward = call_op(
            graph, fused_graph.BACKWARD, layer.dy, ticket, layer.weight, layer.w1, layer.b1, layer.w2,
            layer.b2, [node.args[0].args[0] for node in fillers], [node.args[1] for node in fillers], context,
            layer.name,
        )  # fmt: skip
        for i, node in enumerate([*results, *fillers]):
            if node is not None:
                node.replace_all_uses_with(call_op(graph, operator.getitem, backward, i))
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
    dead = sorted([*layer.forward, *layer.backward, *fillers], reverse=True)
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
