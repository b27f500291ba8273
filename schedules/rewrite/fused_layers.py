"""Finds the MoE layers of a joint graph that can run as one fused launch per direction.

The ops of a layer in a captured graph (biases and the gradient of the gate weights are optional):

    dispatch -> all_to_all -> grouped_gemm -> expert_activation -> grouped_gemm -> all_to_all -> combine

    dispatch(dy, weight) -> all_to_all -> grouped_gemm_dx -> expert_activation_backward -> grouped_gemm_dx
        -> all_to_all -> combine; and two grouped_gemm_dw, two grouped_gemm_dbias, combine_dweight

A layer matches completely or not at all; `Refused` gives the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from torch import fx

from lancet_kernels.graph.from_fx import op_name
from lancet_kernels.graph.meta import REGION
from lancet_kernels.graph.program.program import recomputed_name

FUSABLE_DTYPES = ("torch.float32", "torch.float16", "torch.bfloat16")


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
    if str(dispatch.meta["val"].dtype) not in FUSABLE_DTYPES:
        raise Refused(f"its rows are {str(dispatch.meta['val'].dtype).removeprefix('torch.')}")
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
    readers = [user for user in node.users if _calls(user, op)]
    return readers[0] if len(readers) == 1 else None


def _reader(node: fx.Node, op: str) -> fx.Node:
    """The only user of `node` with this op. Raises: Refused if there is none, or several."""
    reader = _maybe_reader(node, op)
    if reader is None:
        raise Refused(f"{node.name} is not read by exactly one {op}")
    return reader


def is_weight_gradient(node: fx.Node) -> bool:
    """Is it `mm(t(dy), x)`, which launches can compute?"""
    return _calls(node, "aten.mm") and _calls(node.args[0], "aten.t")


def _calls(node: fx.Node, op: str) -> bool:
    return node.op == "call_function" and op_name(node) == op


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
    before = takewhile(lambda node: node not in backward, graph.nodes)
    gradients = filter(is_weight_gradient, before)
    return [node for node in gradients if node not in needed and node.meta["val"].dtype == dtype]
