"""Element-wise ops as the fused kernels that a compiler makes of them: one pass over memory each.

A group reads what comes from outside and writes what is read outside; everything between stays in registers.
Element-wise ops and reductions of one phase that are connected become one group, unless that would make two
groups wait for each other.
"""

from __future__ import annotations

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
