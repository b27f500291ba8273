"""Reads an fx graph that others traced as a Program.

Their graphs have what captures of this library do not: sizes that are symbols, numbers among the results
(`_local_scalar_dense`), forward and backward in one graph without tangents. The graph is not changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._inductor import config
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from lancet_kernels.errors import UserError
from lancet_kernels.graph.from_fx import is_instruction, op_name, program_from_graph
from lancet_kernels.graph.program.program import Instruction, Kind, Phase, Program

_IN_BACKWARD = "autograd_backward"
"""Key of `meta` of nodes that autograd ran; torch sets it."""
_ALL_TO_ALL = "_c10d_functional.all_to_all_single"


def read_graph(graph: fx.Graph) -> Program:
    """The Program of a traced graph.

    A size that is a symbol counts as in the batch that was traced; what an all-to-all delivers where that
    depends on data, as many rows as are sent; any other such size as torch's `unbacked_symint_fallback`.

    Raises: UserError: a call of a module or method, or a node without a fake result.
    """
    _check(graph)
    with _sizes_as_numbers(graph):
        program = program_from_graph(graph)
    backward = {node.name for node in _backward_nodes(graph)}
    instructions = tuple(
        replace(i, phase=Phase.BACKWARD if i.name in backward else Phase.FORWARD)
        for i in program.instructions
    )
    return _with_urgent_sums(replace(program, instructions=instructions))


def _check(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op in ("call_module", "call_method"):
            raise UserError(
                "graph of overlap_pass",
                got=f"{node.name}, a {node.op} of {node.target}",
                expected="calls of ops, whose schemas say what they overwrite",
                do="trace it with make_fx or AOTAutograd first",
            )
        if is_instruction(node) and node.users and "val" not in node.meta:
            raise UserError(
                "graph of overlap_pass",
                got=f'{node.name} without meta["val"]',
                expected="a fake result of every node, for its size",
                do="trace on fake tensors, or run torch.fx.passes.fake_tensor_prop.FakeTensorProp first",
            )
        if isinstance(node.target, torch._ops.HigherOrderOperator) and "mutation" in node.target.name():
            raise UserError(
                "graph of overlap_pass",
                got=f"{node.name}, a {node.target.name()}, which does not say what it overwrites",
                expected="ops with schemas",
                do="run the pass before kernels are put into the graph",
            )


@contextlib.contextmanager
def _sizes_as_numbers(graph: fx.Graph) -> Iterator[None]:
    """Inside, all tensors of `meta["val"]` have sizes that are numbers, and what is no tensor is one without
    dimensions, so that a Program has an edge to its readers."""
    values = {node: node.meta["val"] for node in graph.nodes if "val" in node.meta}
    hint = _Hints(values)
    try:
        for node, value in values.items():
            if isinstance(value, (tuple, list)):
                node.meta["val"] = [_plain(v, hint) for v in value]
            elif is_instruction(node) or isinstance(value, Tensor):
                node.meta["val"] = _plain(value, hint)
        yield
    finally:
        for node, value in values.items():
            node.meta["val"] = value


def _plain(value: object, hint: _Hints) -> object:
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return torch.empty((), dtype=torch.int64, device="meta")
    if all(type(n) is int for n in value.shape):
        return value
    return torch.empty([hint(n) for n in value.shape], dtype=value.dtype, device="meta")


class _Hints:
    """Numbers for symbolic sizes."""

    def __init__(self, values: dict[fx.Node, Any]) -> None:
        self._of_data: dict[sympy.Symbol, int] = {}
        for node, value in values.items():
            if op_name(node) != _ALL_TO_ALL or type(value.shape[0]) is int:
                continue
            unknown = free_unbacked_symbols(value.shape[0]) - self._of_data.keys()
            sent = self(values[node.args[0]].shape[0])
            self._of_data.update(dict.fromkeys(unknown, max(1, sent // max(1, len(unknown)))))

    def __call__(self, size: int | torch.SymInt) -> int:
        if not isinstance(size, torch.SymInt):
            return size
        shapes: ShapeEnv = size.node.shape_env
        # The name in torch 2.11 is deprecated in 2.13.
        traced = shapes.backed_var_to_val if hasattr(shapes, "backed_var_to_val") else shapes.var_to_val
        number = size.node.expr.xreplace(self._of_data).xreplace(dict(traced))
        fallback = sympy.Integer(config.unbacked_symint_fallback)
        return int(number.xreplace(dict.fromkeys(number.free_symbols, fallback)))


def _backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that autograd ran, those that read a tangent, and what depends on either."""
    backward = {
        node
        for node in graph.nodes
        if node.meta.get(_IN_BACKWARD) or (node.op == "placeholder" and node.name.startswith("tangents"))
    }
    for node in graph.nodes:
        if not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    return backward


def _with_urgent_sums(program: Program) -> Program:
    """All-reduces whose result a matrix product waits for (tensor parallelism) as messages like all others:
    schedules let sums of gradients wait for those."""
    products = 0
    for i, instruction in enumerate(program.instructions):
        products |= bool(instruction.flops) << i

    def urgent(i: int, instruction: Instruction) -> Instruction:
        if instruction.kind is not Kind.ALL_REDUCE or not program.reachability.descendants[i] & products:
            return instruction
        attributes = {**instruction.attributes, "collective": Kind.ALL_REDUCE.value}
        return replace(instruction, kind=Kind.OTHER_COMMUNICATION, attributes=attributes)

    return replace(program, instructions=tuple(urgent(i, x) for i, x in enumerate(program.instructions)))
