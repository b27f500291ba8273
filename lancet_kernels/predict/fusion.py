"""Element-wise ops as the fused kernels that a compiler makes of them: one pass over memory each.

A group reads what comes from outside and writes what is read outside; everything between stays in registers.
Element-wise ops and reductions of one phase that are connected become one group, unless that would make two
groups wait for each other.
"""

from __future__ import annotations

from dataclasses import replace

import networkx

from lancet_kernels.graph.program.program import Instruction, Kind, Program

FUSED = "lancet_prediction.fused"
_NOT_FUSED = "embedding embedding_dense_backward sort topk index index_put gather scatter".split()


def is_elementwise(instruction: Instruction) -> bool:
    """Can a compiler put it into one kernel with its neighbours? Views count, too."""
    return (
        instruction.kind is Kind.COMPUTE
        and not instruction.flops
        and instruction.op.startswith("aten.")
        and instruction.op.removeprefix("aten.") not in _NOT_FUSED
    )


def fused(program: Program) -> Program:
    """The Program with groups of element-wise ops as single instructions. Without views (`saved`)."""
    group, waits = _groups(program)
    members: dict[int, list[Instruction]] = {}
    read_by: dict[str, set[int]] = {}
    for i, instruction in enumerate(program.instructions):
        members.setdefault(group[i], []).append(instruction)
        for t in instruction.inputs:
            read_by.setdefault(t, set()).add(group[i])
    # In the order of the last members: a group runs when all that it reads is there.
    last = {g: i for i, g in enumerate(group)}
    instructions, used = [], set(program.inputs)
    for g in networkx.lexicographical_topological_sort(waits, key=last.__getitem__):
        one = members[g]
        if len(one) == 1 and not is_elementwise(one[0]):
            instructions.append(one[0])
            used.update(one[0].outputs)
            continue
        own = {t for i in one for t in i.outputs}
        inputs = tuple(dict.fromkeys(t for i in one for t in i.inputs if t not in own))
        outputs = tuple(
            t for i in one for t in i.outputs if t in program.output_set or read_by.get(t, {g}) != {g}
        )
        used.update(outputs)
        moved = sum(program.tensors[t].content_bytes for t in (*inputs, *outputs))
        instructions.append(
            Instruction(
                f"{one[-1].name}_fused", FUSED, inputs, outputs, phase=one[-1].phase, bytes=float(moved),
                attributes={"ops": [i.op for i in one]},
            )
        )  # fmt: skip
    tensors = {t: spec for t, spec in program.tensors.items() if t in used}
    return replace(program, instructions=tuple(instructions), tensors=tensors)


def _groups(program: Program) -> tuple[list[int], networkx.DiGraph]:
    """The number of the group of each instruction, and which group waits for which."""
    group = list(range(len(program)))
    graph = networkx.DiGraph()
    graph.add_nodes_from(group)
    for i, before in enumerate(program.dependencies):
        graph.add_edges_from((j, i) for j in before)
    for i, instruction in enumerate(program.instructions):
        if not is_elementwise(instruction):
            continue
        producers = [program.producer[t] for t in instruction.inputs if t in program.producer]
        for j in sorted(set(producers), reverse=True):
            other, a, b = program.instructions[j], group[j], group[i]
            alike = other.phase is instruction.phase and is_elementwise(other)
            if a == b or not alike or _path_around(graph, a, b):
                continue
            group = [a if g == b else g for g in group]
            networkx.contracted_nodes(graph, a, b, self_loops=False, copy=False)
    return group, graph


def _path_around(graph: networkx.DiGraph, a: int, b: int) -> bool:
    """Does a path lead from a to b through another node?"""
    return any(node != b and networkx.has_path(graph, node, b) for node in graph.successors(a))
