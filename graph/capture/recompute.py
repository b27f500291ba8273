"""Activation checkpointing as instructions of the backward.

A trace marks every node inside `torch.utils.checkpoint` (of either kind, `use_reentrant` or not) with its
region and its policy; selective checkpointing marks some of them to be saved. `insert_recomputation` copies
the marked nodes that the backward reads, and those that the copies read, behind the forward:

    forward   a = f(x); b = g(a); y = h(b)          x is what the region reads, y its result
    backward  a' = f(x); b' = g(a')                 right before the first reader of the region
              dx = ... (dy, a', b')

They are priced, moved and hidden like all other instructions, all-to-alls among them. What is not recomputed:

- a result that the forward reads outside its region, as in torch: it is what the next region starts from
- the routing of an MoE layer (experts, slots and weights of the choices, counts): 12 bytes a choice, against
  a second exchange of counts, for which the host waits
- random numbers, which would be others (torch's checkpoint restores its generator; a plan moves instructions)
- what reads a buffer that the forward changes: its old value is gone

A region is recomputed at the earliest when the backward of the one before has begun
(`graph.meta.recompute_after`), so a plan keeps the memory that checkpointing saves.
"""

from __future__ import annotations

import operator

from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.utils.checkpoint import CheckpointPolicy

from lancet_kernels.graph.from_fx import draws_random_numbers, facts_of
from lancet_kernels.graph.meta import REGION
from lancet_kernels.graph.program.program import recomputed_name

_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def insert_recomputation(module: fx.GraphModule) -> None:
    """Make the recomputation that a traced joint graph asks for part of the graph; remove torch's marks."""
    graph = module.graph
    # What was traced in the forward, and the inputs; later nodes may also depend on no tangent.
    forward = {n for n in graph.nodes if n.op != "output" and n.meta.get("partitioner_tag") != "is_backward"}
    marked = {n for n in forward if n.meta.get("recompute") in _RECOMPUTED} - _saved(module, forward)
    readers: dict[fx.Node, list[fx.Node]] = {}
    """By region's first reader, the marked nodes that the backward reads of it."""
    first_reader: dict[object, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes if node not in forward else ():
            if source in marked:
                first = first_reader.setdefault(_region(source), node)
                readers.setdefault(first, []).append(source)
    copies: dict[fx.Node, fx.Node] = {}
    for number, (first, read) in enumerate(readers.items()):
        for node in sorted(_with_sources(read, marked)):
            with graph.inserting_before(first):
                copy = graph.node_copy(node, lambda source: copies.get(source, source))
            copy.name = recomputed_name(node.name)
            copy.meta = {**node.meta, "partitioner_tag": "is_backward"}
            REGION.set(copy, number)
            copies[node] = copy
    for node in graph.nodes:
        if node not in forward and not REGION.on(node):
            for source in node.all_input_nodes:
                if source in copies:
                    node.replace_input_with(source, copies[source])
    for node in graph.nodes:
        node.meta.pop("recompute", None)
    graph.lint()
    module.recompile()


def _region(node: fx.Node) -> object:
    return node.meta.get("ac_graph_id")


def _saved(module: fx.GraphModule, forward: set[fx.Node]) -> set[fx.Node]:
    """The nodes that are saved although they are marked."""
    output = module.graph.output_node()
    changed = {d.mutated_input for d in output.meta["desc"] if isinstance(d, InputMutationAOTOutput)}
    saved = set()
    for node in module.graph.nodes:
        is_saved = _is_read_outside(node, forward)
        if node.target is operator.getitem:
            is_saved |= node.args[0] in saved and not _is_read_outside(node.args[0], forward)
        elif node.op == "call_function":
            reads_changed = any(source.meta.get("desc") in changed for source in node.all_input_nodes)
            is_saved |= draws_random_numbers(node) or not facts_of(node).is_recomputed or reads_changed
        if is_saved:
            saved.add(node)
    return saved


def _is_read_outside(node: fx.Node, forward: set[fx.Node]) -> bool:
    """Does the forward read the node, or is it returned, outside its region?"""
    return any(
        user.op == "output" or (user in forward and _region(user) != _region(node)) for user in node.users
    )


def _with_sources(nodes: list[fx.Node], marked: set[fx.Node]) -> set[fx.Node]:
    """The nodes, and all marked ones that they depend on."""
    reached: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += [source for source in node.all_input_nodes if source in marked]
    return reached
