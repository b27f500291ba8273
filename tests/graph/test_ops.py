"""The table of ops: every op of this library has a row, and rows name what its schema has."""

from __future__ import annotations

import torch
from torch import fx

from lancet_kernels import ops  # noqa: F401 (registers the ops)
from lancet_kernels.graph.from_fx import facts_of, host_waits
from lancet_kernels.graph.ops import OPS, argument, facts
from lancet_kernels.graph.program import Kind
from lancet_kernels.ops.comm import redistribute  # noqa: F401 (registers its ops)
from lancet_kernels.ops.comm.all_to_all import start_all_to_all
from lancet_kernels.ops.moe import fused_graph  # noqa: F401 (registers the fused ops)
from lancet_kernels.predict import attention, recurrence  # noqa: F401 (register their ops)


def overloads(op: str) -> list[torch._ops.OpOverload]:
    namespace, name = op.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    return [getattr(packet, overload) for overload in packet.overloads()]


def test_all_to_all() -> None:
    graph = fx.Graph()
    rows, sent, received = (graph.placeholder(name) for name in ("rows", "sent", "received"))
    node = graph.call_function(torch.ops.lancet.all_to_all.default, (rows, sent, received, "ep", True))
    start = graph.call_function(start_all_to_all, node.args)
    row = facts_of(node)
    assert (row.kind, row.start, row.is_recomputed) == (Kind.ALL_TO_ALL, start_all_to_all, True)
    assert [argument(node, name) for name in row.rule.count_arguments] == [sent, received]
    assert host_waits(graph) == [node.name, start.name]


def test_every_op_of_this_library_has_a_row() -> None:
    registered = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("lancet::")]
    # Collectives of shards are made of torch's, which graphs have in their place.
    own = {
        name.replace("::", ".").partition(".default")[0]
        for name in registered
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    }
    assert len(own) > 25
    assert own - OPS.keys() == set()


def test_arguments_are_in_the_schema() -> None:
    for op in (op for op, row in OPS.items() if row.rule or row.hardly_read):
        row = facts(op)
        rule = row.rule
        assert rule is not None, op
        single = [
            getattr(rule, f"{name}_argument")
            for name in "shape num_rows most_rows to_experts reduction row".split()
        ]
        names = {*single, *rule.count_arguments, *(name for _, name in rule.carries), row.hardly_read} - {""}
        known = [{a.name for a in overload._schema.arguments} for overload in overloads(op)]
        assert any(names <= arguments for arguments in known), (op, names)
