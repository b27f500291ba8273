"""Which joins of parts cost nothing, because every part is written where the whole tensor lies?

    whole = cat([mm(a_0, w), mm(a_1, w)])       reads and writes the whole once more: 2 x 16 MiB for logits
                                                of 1,024 tokens, 4,096 words, fp32
    whole = empty(...)                          nothing is copied; a part is a view of the whole
    mm.out(a_0, w, out=whole[0:4]), mm.out(a_1, w, out=whole[4:8])

Two steps, because graphs stay free of side effects until torch has split forward from backward:

    mark_join       while a range is cut: the join is priced at nothing, the parts share the whole's storage
    write_in_place  on the forward and the backward graph that run

Only ops that torch computes into a given result are worth it (most of the others compute and then copy), and
only parts that lie in one piece in the whole.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from lancet_kernels.graph.capture.captured_graph import set_value
from lancet_kernels.graph.from_fx import is_view, tensor_names
from lancet_kernels.graph.meta import HOLDS_PARTS, IN_PLACE, MILLISECONDS, WRITTEN_INTO

aten = torch.ops.aten


def mark_join(join: fx.Node) -> None:
    """Note in a node that joins parts that they shall be written in place, if they can be."""
    writers = _writers(join)
    if writers and not any(WRITTEN_INTO.on(writer) for writer in writers):
        IN_PLACE.set(join, True)
        MILLISECONDS.set(join, 0.0)
        for writer in writers:
            WRITTEN_INTO.set(writer, tensor_names(join)[0])


def write_in_place(module: fx.GraphModule) -> None:
    """Let the parts of marked joins be written where the whole lies, and make the joins views of it."""
    graph = module.graph
    position = {node: i for i, node in enumerate(graph.nodes)}
    for join in list(graph.nodes):
        writers = _writers(join) if IN_PLACE.on(join) else []
        if not writers:
            continue
        value = join.meta["val"]
        with graph.inserting_before(min(writers, key=position.__getitem__)):
            options = {"dtype": value.dtype, "device": value.device}
            whole = graph.call_function(aten.empty.memory_format, (list(value.shape),), options)
            set_value(whole, value)
            HOLDS_PARTS.set(whole, True)
            begin, axis = 0, _axis(join)
            for writer, part in zip(writers, join.args[0], strict=True):
                size = part.meta["val"].shape[axis]
                place = graph.call_function(aten.slice.Tensor, (whole, axis, begin, begin + size))
                shape = list(writer.meta["val"].shape)
                out = graph.call_function(aten.view.default, (place, shape))
                for node, like in ((place, part), (out, writer)):
                    set_value(node, like.meta["val"])
                    HOLDS_PARTS.set(node, True)
                writer.target = writer.target.overloadpacket.out
                writer.kwargs = {**writer.kwargs, "out": out}
                begin += size
        join.target, join.args = aten.view.default, (whole, list(value.shape))
    graph.lint()
    module.recompile()


def _axis(join: fx.Node) -> int:
    return join.args[1] if len(join.args) > 1 else 0


def _writers(join: fx.Node) -> list[fx.Node]:
    """What computes each part of a join, or nothing if the parts cannot be written in place."""
    if join.target is not aten.cat.default or math.prod(join.meta["val"].shape[: _axis(join)]) != 1:
        return []
    value = join.meta["val"]
    writers = [_writer(part, value) for part in join.args[0]]
    return [writer for writer in writers if writer is not None] if None not in writers else []


def _writer(part: fx.Node, whole: Tensor) -> fx.Node | None:
    node = part
    while is_view(node) and _is_in_one_piece(node, part):
        node = node.args[0]
    if not _is_in_one_piece(node, part) or node.meta["val"].dtype != whole.dtype:
        return None
    return node if _computes_into_result(node, whole.device) else None


def _is_in_one_piece(node: fx.Node, part: fx.Node) -> bool:
    """Does the node's tensor lie in memory as the part does: the same numbers, without gaps?"""
    value = node.meta.get("val")
    return (
        isinstance(value, Tensor)
        and value.is_contiguous()
        and value.numel() == part.meta["val"].numel()
        and part.meta["val"].is_contiguous()
    )


def _computes_into_result(node: fx.Node, device: torch.device) -> bool:
    """Does torch have a kernel of the op that writes into a result it is handed?"""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or "out" not in op.overloadpacket.overloads():
        return False
    out = op.overloadpacket.out
    takes = [argument.name for argument in out._schema.arguments if not argument.is_out]
    key = {"cuda": "CUDA"}.get(device.type, "CPU")
    return takes == [argument.name for argument in op._schema.arguments] and (
        torch._C._dispatch_has_kernel_for_dispatch_key(out.name(), key)
    )
