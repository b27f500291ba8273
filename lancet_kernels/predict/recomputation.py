"""What the forward of a part keeps for its backward, and what the backward computes again.

none        as fused kernels do: operands of matrix products, attention and communication are kept as they
            are; what only element-wise ops of the backward read is computed again from the smallest set of
            tensors (a minimum cut)
attention   also attention, from query, key and value
experts     also the experts, from the rows that were received
full        everything, from the input of the layer (activation checkpointing of whole layers)
alternate   everything in a layer but attention, messages and every second dense product, as torchtitan's
            selective recomputation of ops (`torchtitan/distributed/activation_checkpoint.py`)

Where no compiler fuses element-wise ops (`eager`), none is computed again for being cheap. Where one does, a
group of them (`fused_groups`) reads what comes from outside and writes what is read outside; everything
between stays in registers. Element-wise ops and reductions of one phase that are connected become one group,
unless that would make two groups wait for each other.

What is recomputed becomes part of the graph, by the pass that `optimize` uses
(`graph.capture.captured_graph`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import networkx
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from lancet_kernels.graph.capture.captured_graph import insert_recomputation
from lancet_kernels.graph.capture.trace import layer_name
from lancet_kernels.graph.from_fx import is_collective, is_element, op_name, program_from_fx
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program
from lancet_kernels.predict import attention
from lancet_kernels.predict.config import LAYERS

TOKEN_GROUPS = ("tensor", "context")
"""Groups of ranks that share the tokens of sequences, by which their collectives are priced."""
POLICIES = ("none", "attention", "experts", "full", "alternate")
_LAYER = re.compile(rf"\.(?:{'|'.join(LAYERS)})\.(\d+)\.")
_NOT_FUSED = "embedding embedding_dense_backward sort topk index index_put gather scatter".split()


def is_elementwise(instruction: Instruction) -> bool:
    """Can a compiler put it into one kernel with its neighbours? Views count, too."""
    return (
        instruction.kind is Kind.COMPUTE
        and not instruction.flops
        and instruction.op.startswith("aten.")
        and instruction.op.removeprefix("aten.") not in _NOT_FUSED
    )


def fused_groups(program: Program) -> list[list[Instruction]]:
    """The instructions of each group of element-wise ops, in order. Args: program: without views."""
    members: dict[int, list[Instruction]] = {}
    for instruction, group in zip(program.instructions, _groups(program), strict=True):
        if is_elementwise(instruction):
            members.setdefault(group, []).append(instruction)
    return list(members.values())


def _groups(program: Program) -> list[int]:
    """The number of the group of each instruction."""
    group = list(range(len(program)))
    members = {n: [n] for n in group}
    before = {n: set(program.dependencies[n]) for n in group}
    behind: dict[int, set[int]] = {n: set() for n in group}
    for n, earlier in before.items():
        for j in earlier:
            behind[j].add(n)

    def path_around(a: int, b: int) -> bool:
        """Does a path lead from a to b through another node? Searched from b on, back to the first of a."""
        first, seen = min(members[a]), {a, b}
        stack = [n for n in before[b] if n != a]
        while stack:
            n = stack.pop()
            if a in before[n]:
                return True
            earlier = {m for m in before[n] - seen if members[m][-1] > first}
            seen |= earlier
            stack.extend(earlier)
        return False

    for i, instruction in enumerate(program.instructions):
        if not is_elementwise(instruction):
            continue
        producers = [program.producer[t] for t in instruction.inputs if t in program.producer]
        for j in sorted(set(producers), reverse=True):
            other, a, b = program.instructions[j], group[j], group[i]
            alike = other.phase is instruction.phase and is_elementwise(other)
            if a == b or not alike or path_around(a, b):
                continue
            members[a] = sorted(members[a] + members[b])
            for n in members.pop(b):
                group[n] = a
            for edges, others in ((before, behind), (behind, before)):
                for n in edges.pop(b):
                    others[n].discard(b)
                    if n != a:
                        others[n].add(a)
                        edges[a].add(n)
    return group


RECOMPUTED_OPS = {
    "attention": (attention.OP,),
    "experts": ("lancet.grouped_gemm", "lancet.expert_activation"),
}
"""By policy, the ops that are recomputed, beside element-wise ones."""


def without_views(program: Program) -> Program:
    """The Program in which every reader of a view reads the tensor that owns the storage, in any order that
    the reads allow. Forward first."""
    owner = program.storage

    def named(tensors: Collection[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(owner[t] for t in tensors))

    kept = [
        replace(i, inputs=named(i.inputs), outputs=named(i.outputs), mutates=named(i.mutates), after="")
        for i in program.instructions
        if not (i.is_free and program.is_view(i))
    ]
    kept.sort(key=lambda i: i.phase is not Phase.FORWARD)
    return replace(
        program,
        instructions=tuple(kept),
        tensors={t: spec for t, spec in program.tensors.items() if owner[t] == t},
        inputs=named(program.inputs),
        outputs=named(program.outputs),
        parameters=named(program.parameters),
    )


def _is_recomputable(i: Instruction, policy: str, eager: bool) -> bool:
    # Megatron gathers tokens again, keys and values too, and keeps each rank's share.
    gathers_tokens = (
        i.attributes.get("group") in TOKEN_GROUPS and i.attributes.get("collective") == "all_gather"
    )
    return (not eager and is_elementwise(i)) or i.op in RECOMPUTED_OPS.get(policy, ()) or gathers_tokens


def kept_tensors(program: Program, policy: str, eager: bool = False) -> set[str]:
    """The tensors of the forward that are kept: a minimum cut between what cannot be computed again and what
    the backward reads. Args: program: without views. policy: but those of whole layers."""
    forward = [i for i in program.instructions if i.phase is Phase.FORWARD]
    computed = {t for i in forward for t in i.outputs}
    recomputable = [i for i in forward if _is_recomputable(i, policy, eager)]
    again = {t for i in recomputable for t in i.outputs}
    read = {t for i in program.instructions if i.phase is Phase.BACKWARD for t in i.inputs if t in computed}
    # What kernels read is kept as it is, unless the policy recomputes the kernel that computed it.
    elementwise = {t for i in forward if is_elementwise(i) for t in i.outputs}
    forced = {
        t
        for i in program.instructions
        if i.phase is Phase.BACKWARD and not is_elementwise(i)
        for t in i.inputs
        if t in computed and (t in elementwise or t not in again)
    }
    graph = networkx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    for t in {*computed, *program.inputs}:
        free = t in forced or t in program.inputs
        graph.add_edge(("in", t), ("out", t), capacity=0 if free else program.tensors[t].content_bytes)
        if t not in again:
            graph.add_edge("source", ("in", t))
        if t in read:
            graph.add_edge(("out", t), "sink")
    for i in recomputable:
        graph.add_edges_from((("out", a), ("in", b)) for a in i.inputs for b in i.outputs)
    _, (_, after) = networkx.minimum_cut(graph, "source", "sink")
    cut = {t for t in computed if ("in", t) not in after and ("out", t) in after}
    return cut | forced | set(program.inputs)


def layer_of(node: fx.Node) -> str:
    """The number of the layer that a node is in, as text; "": in none."""
    layer = _LAYER.search(layer_name(node) + ".")
    return layer.group(1) if layer else ""


def _kept_by_alternate(joint: fx.GraphModule) -> set[fx.Node]:
    """Attention, messages, and of each layer's dense products the first, the third and so on."""
    products: Counter[str] = Counter()
    kept = set()
    for node in joint.graph.nodes:
        if node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward":
            continue
        is_product = op_name(node) in ("aten.mm", "aten.addmm")
        products[layer_of(node)] += is_product
        if (
            is_collective(node)
            or op_name(node) == attention.OP
            or (is_product and products[layer_of(node)] % 2)
        ):
            kept.add(node)
    return kept


def recompute_as(joint: fx.GraphModule, policy: str, eager: bool = False) -> None:
    """Make what the backward recomputes part of a captured joint graph.

    Args: policy: one of `POLICIES`. eager: does no compiler fuse element-wise ops?
    """
    program = program_from_fx(joint)
    viewless = without_views(program)
    # Said of layers; what is outside of them is as without it.
    of_layers = policy in ("full", "alternate")
    of_ops = "none" if of_layers else policy
    saved = kept_tensors(viewless, of_ops, eager)
    kept = _kept_by_alternate(joint) if policy == "alternate" else set()
    owner, instruction_of = program.storage, program.index
    for node in joint.graph.nodes:
        if node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward":
            continue
        layer = layer_of(node)
        source = node.args[0] if is_element(node) else node
        if of_layers and layer:
            is_recomputed = source not in kept
        else:
            instruction = program.instructions[instruction_of[source.name]]
            is_recomputed = (instruction.is_free and program.is_view(instruction)) or (
                _is_recomputable(instruction, of_ops, eager)
                and not saved & {owner[t] for t in instruction.outputs}
            )
        node.meta["ac_graph_id"] = layer
        if is_recomputed:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    insert_recomputation(joint)
