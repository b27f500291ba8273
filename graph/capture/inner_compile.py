"""Compiles the pieces of a planned graph between communications; the order of the graph is kept.

A compiler that saw the whole graph could move a collective, or the computation that hides it. So the graph is
split at every start and wait of a collective and at every fused launch, and each piece is compiled alone.
"""

from __future__ import annotations

import operator
from collections import Counter

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from lancet_kernels.errors import check_name
from lancet_kernels.graph.program.from_fx import is_collective, is_instruction, is_wait, op_name

# A piece of one or two nodes is called faster than its guards are checked.
SMALLEST_PIECE = 3


def check_compiler(name: str) -> None:
    """Raise UserError unless `torch.compile` knows a backend of this name."""
    if name not in torch._dynamo.list_backends(exclude_tags=()):
        # Without the backends that torch has for debugging.
        check_name("inner_compile", name, torch._dynamo.list_backends())


def compile_between_communications(module: fx.GraphModule, compiler: str) -> fx.GraphModule:
    """A module that computes the same, its pieces between communications compiled by `torch.compile`.

    Args: compiler: a backend of torch.compile, "inductor" say. Pieces are compiled when first called.
    """
    number_of, sizes = _number(module.graph)
    parts = split_module(module, module, number_of.__getitem__, keep_original_order=True)
    for number, size in sizes.items():
        name = f"submod_{number}"
        if size >= SMALLEST_PIECE and hasattr(parts, name):
            piece = getattr(parts, name)
            setattr(parts, name, torch.compile(piece, backend=compiler, fullgraph=True, dynamic=False))
    return parts


def _number(graph: fx.Graph) -> tuple[dict[fx.Node, int], Counter[int]]:
    """The number of each node's piece, in order, and how many nodes a piece to compile has."""
    number_of: dict[fx.Node, int] = {}
    sizes: Counter[int] = Counter()
    number = 0
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and node.args[0] in number_of:
            number_of[node] = number_of[node.args[0]]  # a tuple does not cross pieces
        elif is_wait(node) or (is_instruction(node) and stands_alone(node)):
            number_of[node] = number + 1
            number += 2
        else:
            number_of[node] = number
            sizes[number] += 1
    return number_of, sizes


def stands_alone(node: fx.Node) -> bool:
    """Must the node stay outside compiled pieces? True for communication, its start and wait, and fused
    launches.

    Also for all other ops of this library: compiling them gains nothing, and their number of rows changes in
    each step.
    """
    if is_collective(node) or op_name(node).startswith("lancet."):
        return True
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return False
    return getattr(node.target, "__module__", "") not in ("_operator", "math")
