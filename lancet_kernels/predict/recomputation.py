"""Policies of recomputation: the ops that the backward runs again instead of keeping their results.

none        only element-wise ops, as fused kernels do: operands of matrix products, attention and
            communication are kept; tensors that only element-wise ops of the backward read are recomputed
            from the smallest set of tensors (a minimum cut)
attention   also attention, from query, key and value
experts     also the experts, from the received rows
full        everything, from the input of the layer (activation checkpointing of whole layers)
alternate   everything in a layer but attention, messages and every second dense product, as torchtitan's
            selective recomputation of ops (`torchtitan/distributed/activation_checkpoint.py`)

Where no compiler fuses element-wise ops (`eager`), they are not recomputed. Otherwise a group of them
(`fused_groups`) reads its inputs from memory and writes its outputs; intermediate values stay in registers.
Connected element-wise ops and reductions of one phase become one group, unless that would make a cycle of
groups.

The pass of `optimize` (`graph.capture.captured_graph`) inserts the recomputation into the graph.
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
"""Groups of ranks that share the tokens of sequences; collectives over them have their own costs."""
POLICIES = ("none", "attention", "experts", "full", "alternate")
_LAYER = re.compile(rf"\.(?:{'|'.join(LAYERS)})\.(\d+)\.")
_NOT_FUSED = "embedding embedding_dense_backward sort topk index index_put gather scatter".split()


def is_elementwise(instruction: Instruction) -> bool:
    """Whether a compiler can fuse it with its neighbours. Views count, too."""
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
        """Whether a path leads from a to b through another node. Searched backwards from b."""
        first, visited = min(members[a]), {a, b}
        stack = [n for n in before[b] if n != a]
        while stack:
            n = stack.pop()
            if a in before[n]:
                return True
            earlier = {m for m in before[n] - visited if members[m][-1] > first}
            visited |= earlier
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
    """The Program in which readers of a view read the tensor that owns the storage, forward first."""
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
    # As Megatron does, with keys and values, too: only each rank's share is kept.
    gathers_tokens = (
        i.attributes.get("group") in TOKEN_GROUPS and i.attributes.get("collective") == "all_gather"
    )
    return (not eager and is_elementwise(i)) or i.op in RECOMPUTED_OPS.get(policy, ()) or gathers_tokens


def kept_tensors(program: Program, policy: str, eager: bool = False) -> set[str]:
    """The tensors of the forward that are kept: a minimum cut between those that cannot be recomputed and
    those that the backward reads. Args: program: without views. policy: "none", "attention" or "experts"."""
    forward = [i for i in program.instructions if i.phase is Phase.FORWARD]
    computed = {t for i in forward for t in i.outputs}
    recomputable = [i for i in forward if _is_recomputable(i, policy, eager)]
    again = {t for i in recomputable for t in i.outputs}
    read = {t for i in program.instructions if i.phase is Phase.BACKWARD for t in i.inputs if t in computed}
    # Inputs of other kernels are kept, unless the policy recomputes their producer.
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
    """The number of a node's layer, as text; "": none."""
    layer = _LAYER.search(layer_name(node) + ".")
    return layer.group(1) if layer else ""


def _kept_by_alternate(joint: fx.GraphModule) -> set[fx.Node]:
    """Attention, messages, and the first, third, ... dense product of each layer."""
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
    """Insert the recomputation of a policy into a captured joint graph.

    Args: policy: one of `POLICIES`. eager: no compiler fuses element-wise ops.
    """
    program = program_from_fx(joint)
    viewless = without_views(program)
    # Policies of layers are "none" outside of them.
    is_by_layer = policy in ("full", "alternate")
    op_policy = "none" if is_by_layer else policy
    saved = kept_tensors(viewless, op_policy, eager)
    kept = _kept_by_alternate(joint) if policy == "alternate" else set()
    owner, instruction_of = program.storage, program.index
    for node in joint.graph.nodes:
        if node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward":
            continue
        layer = layer_of(node)
        source = node.args[0] if is_element(node) else node
        if is_by_layer and layer:
            is_recomputed = source not in kept
        else:
            instruction = program.instructions[instruction_of[source.name]]
            is_recomputed = (instruction.is_free and program.is_view(instruction)) or (
                _is_recomputable(instruction, op_policy, eager)
                and not saved & {owner[t] for t in instruction.outputs}
            )
        node.meta["ac_graph_id"] = layer
        if is_recomputed:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    insert_recomputation(joint)
