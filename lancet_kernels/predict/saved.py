"""What the forward of a part keeps for its backward, and what the backward computes again.

none        as fused kernels do: operands of matrix products, attention and communication are kept as they
            are; what only element-wise ops of the backward read is computed again from the smallest set of
            tensors (a minimum cut)
attention   also attention, from query, key and value
experts     also the experts, from the rows that were received
full        everything, from the input of the layer (activation checkpointing of whole layers)

A recomputed instruction is a copy in the backward, as `graph.capture.recompute` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import networkx

from lancet_kernels.graph.program.program import Instruction, Phase, Program, recomputed_name
from lancet_kernels.predict import attention
from lancet_kernels.predict.fusion import is_elementwise
from lancet_kernels.predict.parts import Part

POLICIES = ("none", "attention", "experts", "full")
_EXPERTS = ("lancet.grouped_gemm", "lancet.expert_activation")


def with_recomputation(part: Part, policy: str) -> Part:
    """The part with what the backward recomputes as instructions of its own, and without views.

    Args: policy: one of `POLICIES`; "full" for layers only.
    """
    program = without_views(part.program)
    named = part.program.storage
    part = replace(
        part,
        program=program,
        takes=named.get(part.takes, ""),
        gives=named[part.gives],
        gets=named.get(part.gets, ""),
        returns=named.get(part.returns, ""),
        parameters={
            named[t]: replace(p, gradient=named.get(p.gradient, "")) for t, p in part.parameters.items()
        },
    )
    whole = policy == "full" and bool(part.takes and part.returns)
    saved = set(program.inputs) if whole else _saved(program, _recomputable(policy))
    return replace(part, program=_recomputing(program, saved, eagerly=whole))


def without_views(program: Program) -> Program:
    """The Program in which every reader of a view reads the tensor that owns the storage. Forward first."""
    owner = program.storage

    def named(tensors: Collection[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(owner[t] for t in tensors))

    kept = [
        replace(i, inputs=named(i.inputs), outputs=named(i.outputs), mutates=named(i.mutates))
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


def _recomputable(policy: str) -> Callable[[Instruction], bool]:
    ops = {"attention": (attention.OP,), "experts": _EXPERTS}.get(policy, ())
    return lambda instruction: is_elementwise(instruction) or instruction.op in ops


def _saved(program: Program, recomputable: Callable[[Instruction], bool]) -> set[str]:
    """The tensors of the forward that are kept: a minimum cut between what cannot be computed again and what
    the backward reads."""
    forward = [i for i in program.instructions if i.phase is Phase.FORWARD]
    made = {t for i in forward for t in i.outputs}
    again = {t for i in forward if recomputable(i) for t in i.outputs}
    read = {t for i in program.instructions if i.phase is Phase.BACKWARD for t in i.inputs if t in made}
    # What kernels read is kept as it is, unless the policy recomputes the kernel that computed it.
    elementwise = {t for i in forward if is_elementwise(i) for t in i.outputs}
    forced = {
        t
        for i in program.instructions
        if i.phase is Phase.BACKWARD and not is_elementwise(i)
        for t in i.inputs
        if t in made and (t in elementwise or t not in again)
    }
    graph = networkx.DiGraph()
    graph.add_node("source")
    graph.add_node("sink")
    for t in {*made, *program.inputs}:
        free = t in forced or t in program.inputs
        graph.add_edge(("in", t), ("out", t), capacity=0 if free else program.tensors[t].content_bytes)
        if t not in again:
            graph.add_edge("source", ("in", t))
        if t in read:
            graph.add_edge(("out", t), "sink")
    for i in forward:
        if recomputable(i):
            graph.add_edges_from((("out", a), ("in", b)) for a in i.inputs for b in i.outputs)
    _, (_, after) = networkx.minimum_cut(graph, "source", "sink")
    cut = {t for t in made if ("in", t) not in after and ("out", t) in after}
    return cut | forced | set(program.inputs)


def _recomputing(program: Program, saved: Collection[str], eagerly: bool) -> Program:
    """The backward reads copies of what is not kept. eagerly: they are computed at its beginning, otherwise
    before their first reader."""
    producer = {t: i for i in program.instructions if i.phase is Phase.FORWARD for t in i.outputs}
    tensors = dict(program.tensors)
    result = [i for i in program.instructions if i.phase is Phase.FORWARD]
    backward = [i for i in program.instructions if i.phase is not Phase.FORWARD]
    renamed: dict[str, str] = {}

    def again(tensor: str) -> str:
        if tensor not in producer or tensor in saved:
            return tensor
        if tensor not in renamed:
            original = producer[tensor]
            inputs = tuple(again(t) for t in original.inputs)
            for t in original.outputs:
                renamed[t] = recomputed_name(t)
                tensors[renamed[t]] = replace(tensors[t], name=renamed[t])
            result.append(
                replace(
                    original,
                    name=recomputed_name(original.name),
                    inputs=inputs,
                    outputs=tuple(renamed[t] for t in original.outputs),
                    phase=Phase.BACKWARD,
                )
            )
        return renamed[tensor]

    if eagerly:
        for i in backward:
            for t in i.inputs:
                again(t)
    for i in backward:
        result.append(replace(i, inputs=tuple(again(t) for t in i.inputs)))
    return replace(program, instructions=tuple(result), tensors=tensors)
