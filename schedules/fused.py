"""Which MoE layers of a plan run as fused launches of the overlap kernel, and which on streams?

An overlap group is an MoE layer: its all-to-alls and the computation that hides them, which is its own expert
GEMMs (forward, dgrad, wgrad) and, in the backward launch, weight gradients of other layers. On streams, a
collective runs beside GEMM kernels, and is exposed where it is longer than these. Fused, GEMM tiles and puts
share one launch, whose time comes from the tuner's measurements or from a formula
(`schedules.fused_prediction`). Each layer runs in the way that is predicted faster; `Plan.explain` says
which, with the numbers.

A weight gradient becomes a filler of the launch if most of its time is hidden there. The longest is tried
first: best fit, as in the paper's Algorithm 1, which does this for collectives on streams.

Layers are fused before the step is cut. A launch can then be cut into one for each copy of the step (duplex),
which may get more fillers (`schedules.copy_fillers`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.captured_graph import fake_mode_of, set_value
from lancet_kernels.graph.cost_entry import CostEntry
from lancet_kernels.graph.costs import Cost
from lancet_kernels.graph.from_fx import KEPT_BYTES
from lancet_kernels.graph.layer_names import layer_meta
from lancet_kernels.graph.part_instruction import whole_name
from lancet_kernels.graph.program import Kind, Program
from lancet_kernels.ops import fused_graph
from lancet_kernels.schedules.clock import COMPUTE, LINK
from lancet_kernels.schedules.fused_layers import MatchedLayer, independent_gradients, match_layers
from lancet_kernels.schedules.fused_prediction import (
    EFFICIENCY,
    FormulaLaunch,
    Launch,
    MeasuredOf,
    Rider,
    kind_of,
    measured_launch,
    nothing_measured,
    with_more_riders,
)
from lancet_kernels.schedules.plan import FusedGroup
from lancet_kernels.schedules.simulate import Timeline

# A weight gradient becomes a filler if the launch hides at least this share of its time on a stream.
LEAST_HIDDEN = 0.5
CHOICES = ("auto", "fused", "streams")
WITH_FILLERS_MS = "with_fillers_ms"
"""Key of `meta` of a backward launch: `FusedGroup.with_fillers_ms`."""


def choose_groups(
    module: fx.GraphModule,
    program: Program,
    cost: Cost,
    timeline: Timeline,
    *,
    lowering: str = "auto",
    measured_of: MeasuredOf = nothing_measured,
    keeps_tokens: Callable[[MatchedLayer], bool] = lambda layer: False,
) -> tuple[FusedGroup, ...]:
    """Decide for every MoE layer of a joint graph: fused, or on streams.

    Args:
        program: of the graph. timeline: of the best plan on streams, which fused launches must beat.
        lowering: "auto"; or "fused" or "streams" for all layers that can run so.
        measured_of: the tuner's measurements for a kind of layer, on the device that will run it.
        keeps_tokens: does a layer's backward send its tokens again (`LayerExchange`, keep="tokens")?
    """
    if lowering not in CHOICES:
        raise UserError("lowering", got=repr(lowering), expected=f"one of {CHOICES}", do="name one of these")
    layers, refused = match_layers(module.graph)
    ms = {i.name: cost(i, program.tensors) for i in program.instructions}
    exposed, busy = _exposed_and_busy(timeline)
    groups = [FusedGroup(name, False, (), 0.0, 0.0, 0.0, f"streams: {why}") for name, why in refused.items()]
    fillers: set[str] = set()
    flops_per_ms = _flops_per_ms(program, ms)
    for layer in layers:
        measured, measurement = measured_of(kind_of(layer))
        riders = [_rider(n, program, ms) for n in independent_gradients(module.graph, layer)]
        group = _predict(
            layer,
            program,
            ms,
            exposed,
            busy,
            measured,
            [rider for rider in riders if rider.name not in fillers],
            flops_per_ms,
            keeps_tokens(layer),
        )
        if lowering == "auto":
            fused = group.fused_ms < group.streams_ms
            verdict = f"{'fused' if fused else 'streams'}: predicted faster"
        else:
            fused, verdict = lowering == "fused", f"{lowering}: requested"
        source = measurement if measured else f"by formula at efficiency {EFFICIENCY:g}: {measurement}"
        group = replace(group, fused=fused, why=f"{verdict} ({group.why}; {source})")
        groups.append(group if fused else replace(group, fillers=()))
        fillers |= set(groups[-1].fillers)
    return tuple(sorted(groups, key=lambda group: program.index[group.layer]))


def _predict(
    layer: MatchedLayer,
    program: Program,
    ms: Mapping[str, float],
    exposed: Mapping[str, float],
    busy: Mapping[str, float],
    measured: CostEntry | None,
    candidates: Sequence[Rider],
    flops_per_ms: float,
    keeps_tokens: bool,
) -> FusedGroup:
    fused_ms, streams_ms = {}, 0.0
    riders: list[Rider] = []
    points: tuple[tuple[float, float], ...] = ()
    for direction, nodes in (("forward", layer.forward), ("backward", layer.backward)):
        names = [node.name for node in nodes if node.name in program.index]
        moved = [n for n in names if program.instructions[program.index[n]].kind is not Kind.COMPUTE]
        if measured is None:
            communication = sum(ms[n] for n in moved)
            again = 0.0
            if keeps_tokens and direction == "backward":
                again = ms[layer.forward[1].name]  # the all-to-all of x
            gemm_ms = sum(ms[n] for n in names) - communication
            launch: Launch = FormulaLaunch(communication + again, gemm_ms)
        else:
            launch = measured_launch(layer, measured, direction)
        if direction == "backward":
            riders = best_fit(candidates, launch)
            streams_ms += sum(rider.ms for rider in riders)
            points = with_more_riders(launch, riders, flops_per_ms)
        fused_ms[direction] = launch.milliseconds(riders)
        streams_ms += sum(busy.get(n, 0.0) for n in names) + sum(exposed.get(n, 0.0) for n in moved)
    forward_ms, backward_ms = fused_ms["forward"], fused_ms["backward"]
    why = f"{forward_ms + backward_ms:.3f} ms fused, {streams_ms:.3f} ms on streams"
    fillers = tuple(rider.name for rider in riders)
    return FusedGroup(layer.name, False, fillers, forward_ms, backward_ms, streams_ms, why, points)


def _flops_per_ms(program: Program, ms: Mapping[str, float]) -> float:
    """The rate of the program's matrix products on a stream."""
    products = [i for i in program.instructions if i.op == "aten.mm"]
    total_ms = sum(ms[i.name] for i in products)
    return sum(i.flops for i in products) / total_ms if total_ms else 0.0


def _rider(node: fx.Node, program: Program, ms: Mapping[str, float]) -> Rider:
    return Rider(node.name, ms[node.name], program.instructions[program.index[node.name]].flops)


def best_fit(candidates: Sequence[Rider], launch: Launch) -> list[Rider]:
    """The fillers of which the launch hides at least LEAST_HIDDEN, chosen longest first."""
    chosen: list[Rider] = []
    now = launch.milliseconds()
    for rider in sorted(candidates, key=lambda rider: rider.ms, reverse=True):
        grown = launch.milliseconds([*chosen, rider])
        if rider.ms - (grown - now) >= LEAST_HIDDEN * rider.ms:
            chosen.append(rider)
            now = grown
    return chosen


def _exposed_and_busy(timeline: Timeline) -> tuple[dict[str, float], dict[str, float]]:
    """By instruction of the uncut program, summed over parts: exposed link time; compute time."""
    computing = sorted((e.start_ms, e.end_ms) for e in timeline.events if e.resource == COMPUTE)
    exposed: dict[str, float] = {}
    busy: dict[str, float] = {}
    for event in timeline.events:
        name = whole_name(event.name)
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
    """Replace the ops of every fused group of a joint graph by two fused instructions, in place.

    Args: register: registers a layer and returns its number (`ops.fused_graph.register_layer`).
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
        _lower(module.graph, layer, [nodes[n] for n in group.fillers], register(layer), group)
    sort_graph(module.graph)
    module.graph.lint()
    module.recompile()


def _lower(
    graph: fx.Graph, layer: MatchedLayer, fillers: list[fx.Node], number: int, group: FusedGroup
) -> None:
    with graph.inserting_before(layer.combine):
        forward = _call(
            graph, fused_graph.FORWARD, layer.x, layer.expert, layer.row, layer.weight, layer.count,
            layer.w1, layer.b1, layer.w2, layer.b2, layer.capacity, number, 1,
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
            layer.x if fused_graph.keeps_tokens(number) else None,
        )  # fmt: skip
        for i, node in enumerate([*results, *fillers]):
            if node is not None:
                node.replace_all_uses_with(_element(graph, backward, i))
    forward.meta["milliseconds"], backward.meta["milliseconds"] = group.forward_ms, group.backward_ms
    choices = layer.expert.meta["val"].shape[1]
    forward.meta[KEPT_BYTES] = fused_graph.kept_bytes(number, layer.x.meta["val"], choices, layer.capacity)
    if group.with_fillers_ms:
        backward.meta[WITH_FILLERS_MS] = group.with_fillers_ms
    for launch in (forward, backward):
        launch.meta.update(layer_meta(layer.dispatch))
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


def sort_graph(graph: fx.Graph) -> None:
    """Stable topological sort: move nodes behind their inputs, and keep the order otherwise."""
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
