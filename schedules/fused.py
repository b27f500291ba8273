"""Which overlap groups of a plan become one launch of the overlap kernel, and which stay on streams?

An overlap group is an MoE layer: its all-to-alls and what hides them, its own expert GEMMs (forward, dX, dW)
and, in the backward launch, weight gradients of other layers. On streams a collective runs beside GEMM
kernels, and what does not fit is exposed; fused, GEMM tiles and puts share a launch that takes

    max(communication, GEMMs) / efficiency + launch

with the efficiency eta = max(T_comm, T_gemm) / T_fused that the tuner measured for the device, or else
`MODELLED_EFFICIENCY`. Each layer takes what is predicted faster; `explain` of the plan says which, and why.

Weight gradients ride along while a layer's backward has more communication than GEMMs: best fit, like the
paper's Algorithm 1, which does the same for collectives on a stream.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture import fake_mode_of, set_value
from lancet_kernels.graph.costs import Cost
from lancet_kernels.graph.program import Kind, Program
from lancet_kernels.ops import fused_graph
from lancet_kernels.schedules.fused_layers import MatchedLayer, independent_gradients, match_layers
from lancet_kernels.schedules.plan import FusedGroup
from lancet_kernels.schedules.simulate import COMPUTE, LINK, Timeline

# Between the published 0.87 and 0.94 of fused kernels (MI355X, eight GPUs); replaced by what was measured.
MODELLED_EFFICIENCY = 0.9
LAUNCH_MS = 0.02
CHOICES = ("auto", "fused", "streams")


def choose_groups(
    module: fx.GraphModule,
    program: Program,
    cost: Cost,
    timeline: Timeline,
    *,
    lowering: str = "auto",
    efficiency: float | None = None,
) -> tuple[FusedGroup, ...]:
    """A decision for every MoE layer of a joint graph.

    Args:
        program: of the graph. timeline: of the best plan on streams, which fused launches must beat.
        lowering: "auto", or "fused" or "streams" for every layer that allows it.
        efficiency: eta measured for this device; None: MODELLED_EFFICIENCY.
    """
    if lowering not in CHOICES:
        raise UserError("lowering", got=repr(lowering), expected=f"one of {CHOICES}", do="name one of these")
    layers, refused = match_layers(module.graph)
    ms = {i.name: cost(i, program.tensors) for i in program.instructions}
    exposed, busy = _exposed_and_busy(timeline)
    groups = [FusedGroup(name, False, (), 0.0, 0.0, 0.0, f"streams: {why}") for name, why in refused.items()]
    taken: set[str] = set()
    for layer in layers:
        group = _predict(module.graph, layer, program, ms, exposed, busy, taken, efficiency)
        if lowering == "auto":
            fused = group.fused_ms < group.streams_ms
            verdict = f"{'fused' if fused else 'streams'}: predicted faster"
        else:
            fused, verdict = lowering == "fused", f"{lowering}: asked for"
        known = "measured" if efficiency is not None else "modelled"
        group = replace(group, fused=fused, why=f"{verdict} ({group.why}, {known} efficiency)")
        groups.append(group if fused else replace(group, fillers=()))
        taken |= set(groups[-1].fillers)
    return tuple(sorted(groups, key=lambda group: program.index[group.layer]))


def _predict(
    graph: fx.Graph,
    layer: MatchedLayer,
    program: Program,
    ms: Mapping[str, float],
    exposed: Mapping[str, float],
    busy: Mapping[str, float],
    taken: set[str],
    efficiency: float | None,
) -> FusedGroup:
    eta = efficiency or MODELLED_EFFICIENCY
    fused_ms, streams_ms = {}, 0.0
    fillers: list[str] = []
    for direction, nodes in (("forward", layer.forward), ("backward", layer.backward)):
        names = [node.name for node in nodes if node.name in program.index]
        moved = [n for n in names if program.instructions[program.index[n]].kind is not Kind.COMPUTE]
        communication = sum(ms[n] for n in moved)
        gemms = sum(ms[n] for n in names) - communication
        if direction == "backward":
            fillers = _best_fit(graph, layer, ms, communication - gemms, taken)
            gemms += sum(ms[n] for n in fillers)
            streams_ms += sum(ms[n] for n in fillers)
        fused_ms[direction] = max(communication, gemms) / eta + LAUNCH_MS
        streams_ms += sum(busy.get(n, 0.0) for n in names) + sum(exposed.get(n, 0.0) for n in moved)
    forward_ms, backward_ms = fused_ms["forward"], fused_ms["backward"]
    why = f"{forward_ms + backward_ms:.3f} ms fused, {streams_ms:.3f} ms on streams"
    return FusedGroup(layer.name, False, tuple(fillers), forward_ms, backward_ms, streams_ms, why)


def _best_fit(
    graph: fx.Graph, layer: MatchedLayer, ms: Mapping[str, float], room: float, taken: set[str]
) -> list[str]:
    """Independent weight gradients, the longest that still fits first, until the room is used up."""
    candidates = [n.name for n in independent_gradients(graph, layer) if n.name not in taken]
    chosen = []
    while room > 0:
        fitting = [n for n in candidates if ms[n] <= room]
        if not fitting:
            break
        best = max(fitting, key=lambda n: ms[n])
        chosen.append(best)
        candidates.remove(best)
        room -= ms[best]
    return chosen


def _exposed_and_busy(timeline: Timeline) -> tuple[dict[str, float], dict[str, float]]:
    """By instruction of the uncut program: link time in which compute idles; compute time, parts added."""
    computing = sorted((e.start_ms, e.end_ms) for e in timeline.events if e.resource == COMPUTE)
    exposed: dict[str, float] = {}
    busy: dict[str, float] = {}
    for event in timeline.events:
        name = event.name.partition("[")[0]
        length = event.end_ms - event.start_ms
        if event.resource == LINK:
            covered = sum(
                max(0.0, min(end, event.end_ms) - max(start, event.start_ms)) for start, end in computing
            )
            exposed[name] = exposed.get(name, 0.0) + length - covered
        else:
            busy[name] = busy.get(name, 0.0) + length
    return exposed, busy


def lower(
    module: fx.GraphModule, groups: Sequence[FusedGroup], register: Callable[[MatchedLayer], int]
) -> None:
    """Replace the ops of every fused group of a joint graph by its two fused instructions, in place.

    Args: register: gives the number of the exchange of a layer (`ops.fused_graph.register_layer`).
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
                got=f"{group.layer}, which this graph has not ({', '.join(missing) or 'no fusable layer'})",
                expected="a layer of the captured graph",
                do="plan again",
            )
        layer = layers[group.layer]
        _lower(module.graph, layer, [nodes[n] for n in group.fillers], register(layer), group)
    _sort(module.graph)
    module.graph.lint()
    module.recompile()


def _lower(
    graph: fx.Graph, layer: MatchedLayer, fillers: list[fx.Node], number: int, group: FusedGroup
) -> None:
    with graph.inserting_before(layer.combine):
        forward = _call(
            graph, fused_graph.FORWARD, layer.x, layer.expert, layer.slot, layer.weight, layer.count,
            layer.w1, layer.b1, layer.w2, layer.b2, layer.capacity, number,
        )  # fmt: skip
        out, ticket = _element(graph, forward, 0), _element(graph, forward, 1)
    layer.combine.replace_all_uses_with(out)
    order = {node: i for i, node in enumerate(graph.nodes)}
    results = [layer.dx, layer.dweight, layer.dw1, layer.dw2]
    results += [layer.db1, layer.db2] if layer.b1 is not None else []
    with graph.inserting_before(min(layer.backward, key=order.__getitem__)):
        backward = _call(
            graph, fused_graph.BACKWARD, layer.dy, ticket, layer.weight, layer.w1, layer.b1, layer.w2,
            layer.b2, [node.args[0].args[0] for node in fillers], [node.args[1] for node in fillers], number,
        )  # fmt: skip
        for i, node in enumerate([*results, *fillers]):
            if node is not None:
                node.replace_all_uses_with(_element(graph, backward, i))
    forward.meta["milliseconds"], backward.meta["milliseconds"] = group.forward_ms, group.backward_ms
    received = layer.forward[1].args[2]
    dead = sorted([*layer.forward, *layer.backward, *fillers], key=order.__getitem__, reverse=True)
    for node in (*dead, received):
        if not node.users:
            graph.erase_node(node)


def _call(graph: fx.Graph, target: Callable, *args: object) -> fx.Node:
    node = graph.call_function(target, args)
    mode = fake_mode_of(args[0])
    with mode:
        values = fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = target(*values)
    return node


def _element(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    element = graph.call_function(operator.getitem, (node, index))
    set_value(element, node.meta["val"][index])
    return element


def _sort(graph: fx.Graph) -> None:
    """Put every node behind its inputs again, keeping the order where that leaves a choice."""
    placed: set[fx.Node] = set()
    anchor = None

    def place(node: fx.Node) -> None:
        nonlocal anchor
        stack = [node]
        while stack:
            top = stack[-1]
            waiting = [n for n in top.all_input_nodes if n not in placed]
            if top in placed:
                stack.pop()
            elif waiting:
                stack.extend(reversed(waiting))
            else:
                if anchor is not None:
                    anchor.append(top)
                anchor = top
                placed.add(top)
                stack.pop()

    for node in list(graph.nodes):
        place(node)
