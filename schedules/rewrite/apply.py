"""Applies a planned order to an fx graph.

    place(graph, order)         puts the nodes into the order of the plan
    reorder(graph, order)       the same, forward before backward
    wait_late(graph)            puts each `wait_tensor` right before its first reader
    start_early_wait_late(gm)   the same, our own collectives split into start and wait; sums wait until due

Contract of `reorder` and `place`:

1. The order has every instruction of the graph once; elements of tuples follow their producer.
2. No instruction stands before one whose result it reads.
3. What draws random numbers does so in the order of the graph: no edge of the graph keeps it.
4. In a graph that is to be split, no instruction of the forward stands behind one of the backward.
5. Afterwards the graph runs in exactly that order; for an invalid order a UserError names the instruction,
   and the graph is unchanged.

All ranks issue their collectives in the order of the plan, so no two ranks can deadlock.

Joins of parts that cost nothing, because every part is written where the whole tensor lies:

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
import operator
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.captured_graph import set_value
from lancet_kernels.graph.capture.trace import layer_meta
from lancet_kernels.graph.from_fx import (
    draws_random_numbers,
    facts_of,
    is_functional_collective,
    is_instruction,
    is_view,
    is_wait,
    readers,
    tensor_names,
    with_elements,
)
from lancet_kernels.graph.meta import (
    GRADIENTS_OF,
    HOLDS_PARTS,
    IN_PLACE,
    MILLISECONDS,
    SAME_CALL,
    WRITTEN_INTO,
    forward_nodes,
)
from lancet_kernels.graph.ops import STARTED
from lancet_kernels.ops.comm.collectives import sum_when_due
from lancet_kernels.ops.comm.link_group import link_group, plain_group

aten = torch.ops.aten


def mark_join(join: fx.Node) -> None:
    """Mark a node that joins parts if these can be written in place."""
    writers = _writers(join)
    if writers and not any(WRITTEN_INTO.on(writer) for writer in writers):
        IN_PLACE.set(join, True)
        MILLISECONDS.set(join, 0.0)
        for writer in writers:
            WRITTEN_INTO.set(writer, tensor_names(join)[0])


def write_in_place(module: fx.GraphModule) -> None:
    """Let the parts of marked joins be written where the whole lies, and make the joins views of it."""
    graph = module.graph
    for join in list(graph.nodes):
        writers = _writers(join) if IN_PLACE.on(join) else []
        if not writers:
            continue
        value = join.meta["val"]
        with graph.inserting_before(min(writers)):
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
                SAME_CALL.drop(writer)
                writer.target = writer.target.overloadpacket.out
                writer.kwargs = {**writer.kwargs, "out": out}
                begin += size
        join.target, join.args = aten.view.default, (whole, list(value.shape))
    graph.lint()
    module.recompile()


def _axis(join: fx.Node) -> int:
    return join.args[1] if len(join.args) > 1 else 0


def _writers(join: fx.Node) -> list[fx.Node]:
    """The node that computes each part of a join; none if the parts cannot be written in place."""
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


def wait(pending: Any) -> object:
    """Wait for a started collective. Args: pending: what the start function returned. -> its result."""
    return pending.wait()


def instruction_order(graph: fx.Graph) -> list[str]:
    """Names of the instruction nodes, in the order in which they run."""
    return [node.name for node in graph.nodes if is_instruction(node)]


def issued_order(graph: fx.Graph) -> list[str]:
    """The same of a graph that runs: a collective stands where it starts, the storage of parts nowhere."""
    return [
        node.name.removesuffix("_start") if node.target in STARTED else node.name
        for node in graph.nodes
        if is_instruction(node) and node.target is not wait and not HOLDS_PARTS.on(node)
    ]


def reorder(graph: fx.Graph, order: Sequence[str]) -> None:
    """As `place`, of a graph that is to be split. Raises: UserError also for a forward instruction after a
    backward one."""
    forward = forward_nodes(list(graph.nodes))
    in_graph = {node.name: node for node in graph.nodes}
    nodes = [in_graph[name] for name in order if name in in_graph]
    for early, late in pairwise(nodes):
        if early not in forward and late in forward:  # 4
            raise _invalid_order(
                f"{early.name} before {late.name}",
                f"{late.name} first: it belongs to the forward, {early.name} to the backward",
            )
    place(graph, order)


def place(graph: fx.Graph, order: Sequence[str]) -> None:
    """Put the instruction nodes of a graph into `order`; elements of tuples follow their producer.

    Raises: UserError if `order` is not a permutation of the instructions, or has an instruction before one of
        its inputs.
    """
    nodes = {node.name: node for node in graph.nodes}
    present = instruction_order(graph)
    if sorted(order) != sorted(present):  # 1
        difference = sorted(set(order) ^ set(present))[:3]
        raise _invalid_order(
            f"{len(order)} instructions, different in {', '.join(difference) or 'repetitions'}",
            f"each of the graph's {len(present)} instructions once",
        )
    sources = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    reordered = sources + [each for node in sources for each in with_elements(node)[1:]]
    available = set(reordered)
    for name in order:
        node = nodes[name]
        missing = [source.name for source in node.all_input_nodes if source not in available]
        if missing:  # 2
            raise _invalid_order(
                f"{name} before {missing[0]}", f"{missing[0]} first, whose result {name} reads"
            )
        elements = with_elements(node)
        reordered += elements
        available.update(elements)
    draws = filter(draws_random_numbers, graph.nodes)
    for first, early in zip(draws, filter(draws_random_numbers, reordered), strict=True):  # 3
        if first is not early:
            raise _invalid_order(
                f"{early.name} before {first.name}", f"{first.name} first: both draw random numbers"
            )
    cursor = graph._root
    for node in reordered:
        cursor.append(node)
        cursor = node
    graph.lint()
    assert instruction_order(graph) == list(order)  # 5


def _invalid_order(got: str, expected: str) -> UserError:
    return UserError("order of a plan", got=got, expected=expected, do="plan again for this graph")


def start_early_wait_late(
    module: fx.GraphModule,
    blocking: Collection[str] = (),
    context_of_sum: Callable[[tuple[object, ...]], int | None] = lambda _key: None,
) -> None:
    """Every collective starts at its place, and its first reader waits for it.

    Args:
        blocking: names of collectives that are waited for at once.
        context_of_sum: gives the number of the context (`ops.base`) of a sum of gradients, by its
            `GRADIENTS_OF`, that may be left to a later backward; None: it may not.
    """
    graph = module.graph
    for node in list(graph.nodes):
        key = GRADIENTS_OF.get(node)
        context = None if key is None else context_of_sum(key)
        if is_functional_collective(node):
            *arguments, group = node.args
            if facts_of(node).over_link and group == plain_group(group):
                # One of the user's: paced, counted, and named when a rank is missing, as ours are.
                node.args = (*arguments, link_group(group))
            if context is not None:
                node.args, node.target = (node.target, context, key, *node.args), sum_when_due
        elif is_instruction(node) and facts_of(node).start and node.name not in blocking:
            _split(graph, node)
    wait_late(graph, blocking)
    graph.lint()
    module.recompile()


def _split(graph: fx.Graph, node: fx.Node) -> None:
    """Replace one of our collectives by its start, and the wait before its first reader."""
    name, start = node.name, facts_of(node).start
    assert start is not None
    with graph.inserting_before(node):
        pending = graph.call_function(start, node.args, node.kwargs)
        pending.name = f"{name}_start"
        pending.meta = layer_meta(node)
        result = graph.call_function(wait, (pending,))
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    result.name = name
    _place_late(graph, result)


def wait_late(graph: fx.Graph, blocking: Collection[str] = ()) -> None:
    """Put each `wait_tensor` right before the first node that reads what has arrived, or at the end.

    Args: blocking: names of collectives whose waits stay where they are.
    """
    for node in filter(is_wait, list(graph.nodes)):
        start = node.args[0]
        while start.target is operator.getitem:
            start = start.args[0]
        if start.name not in blocking:
            _place_late(graph, node)


def _place_late(graph: fx.Graph, node: fx.Node) -> None:
    """Move a wait with the elements of its result before the first reader of any of them."""
    first = min(readers(node), default=graph.output_node())
    for each in with_elements(node):
        first.prepend(each)
