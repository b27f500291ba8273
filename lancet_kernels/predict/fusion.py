"""Element-wise ops as the fused kernels that a compiler makes of them: one pass over memory each.

A group reads what comes from outside and writes what is read outside; everything between stays in registers.
Element-wise ops and reductions of one phase that are connected become one group, unless that would make two
groups wait for each other.
"""

from __future__ import annotations

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
    return group


def _path_around(graph: networkx.DiGraph, a: int, b: int) -> bool:
    """Does a path lead from a to b through another node?"""
    return any(node != b and networkx.has_path(graph, node, b) for node in graph.successors(a))
