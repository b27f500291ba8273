"""Runs a planned graph: as Python code, or node by node while recording times.

autograd calls a `GraphRunner` for the forward and one for the backward graph. A `Recorder` collects, for one
iteration, the start and end of every instruction of both graphs on this rank.

Ops are called in the way that costs the host least:

    torch.ops.aten.t.default(w)              torch.t(w)
    torch.ops.lancet.combine.default(...)    the op's function itself

An op by its overload goes through a boxed call, 2 to 3 us where torch's own function takes 1; an op of this
library goes twice through the dispatcher and has its results checked, 15 us (`ops.base`). A planned
step calls a thousand of them. No call may be traced: gradients are off, tensors are real. It is Python
code on every device: steps of 130 to 150 ms of four strategies computed for 14 to 38 ms longer in
fx.Interpreter (GPT2-S-MoE, batch 24, one H100, two runs of `bench.gpu.steps planned_step`, 2026-11-27).

With `inner_compile`, the pieces between communications are compiled; the order of the graph is kept. A
compiler that saw the whole graph could move a collective, or the computation that hides it. So the graph is
split at every start and wait of a collective and at every fused launch, and each piece is compiled alone.
"""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.graph import _BoxedCodeGen
from torch.fx.passes.split_module import split_module

from lancet_kernels.errors import check_name
from lancet_kernels.graph.capture.captured_graph import module_of, with_any_strides
from lancet_kernels.graph.capture.trace import announce_layers
from lancet_kernels.graph.from_fx import is_collective, is_instruction, is_wait, op_name
from lancet_kernels.graph.program import Phase
from lancet_kernels.ops.base import function_of

aten = torch.ops.aten
_SAME_NAMES = """add.Tensor bmm.default cat.default clone.default detach.default div.Scalar div.Tensor
    mean.dim mm.default mul.Scalar mul.Tensor neg.default permute.default pow.Tensor_Scalar reshape.default
    rsqrt.default select.int sub.Tensor sum.dim_IntList t.default transpose.int unsqueeze.default""".split()
_FUNCTIONS: dict[object, Callable] = {aten._unsafe_view.default: torch.reshape} | {
    getattr(getattr(aten, name), overload): getattr(torch, name)
    for name, _, overload in (text.partition(".") for text in _SAME_NAMES)
}
"""Functions of torch that take the arguments of an op as they stand in a graph."""
# A piece of one or two nodes is called faster than its guards are checked.
SMALLEST_PIECE = 3


@dataclass
class Recorder:
    """While `on`, collects (instruction, phase, start, end), in seconds of the monotonic clock."""

    on: bool = False
    computed: list[tuple[str, Phase, float, float]] = field(default_factory=list)


class GraphRunner:
    """Runs a graph with a list of inputs, which it empties.

    inner_compile: the backend that compiles the pieces between communications; "": none.
    then: called with the results.
    """

    _boxed_call = True  # tells torch to pass a list

    def __init__(
        self,
        module: fx.GraphModule,
        phase: Phase,
        recorder: Recorder,
        inner_compile: str = "",
        then: Callable[[Any], None] | None = None,
    ) -> None:
        announce_layers(module, in_pieces=bool(inner_compile))
        for node in module.graph.nodes:
            # A view whose storage is written must stay a view.
            if not any(user.kwargs.get("out") is node for user in node.users):
                node.target = with_any_strides(node.target)
        module.recompile()
        self.module, self.phase, self.recorder = module, phase, recorder
        self.pieces = compile_between_communications(module, inner_compile) if inner_compile else None
        self.direct = with_direct_calls(module)
        self.then = then

    @torch.no_grad()
    def __call__(self, inputs: list) -> object:
        if self.recorder.on:
            results = _Clocked(self.module, self.phase, self.recorder).boxed_run(inputs)
        elif self.pieces is None:
            results = self.direct.forward(inputs)
        else:
            arguments = tuple(inputs)
            inputs.clear()
            results = self.pieces(*arguments)
        if self.then is not None:
            self.then(results)
        return results


class _Clocked(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, phase: Phase, recorder: Recorder) -> None:
        super().__init__(module)
        self.phase, self.recorder = phase, recorder

    def run_node(self, node: fx.Node) -> object:
        begin = time.monotonic()
        result = super().run_node(node)
        # Waiting for a collective is not computation.
        if is_instruction(node) and op_name(node) not in ("wait", "enter_layer"):
            self.recorder.computed.append((node.name, self.phase, begin, time.monotonic()))
        return result


def with_direct_calls(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph, to be run without gradients on plain tensors; shares everything with `module`.

    Its forward takes a list, which it empties: so each saved activation is freed after its last use.
    """
    graph = fx.Graph()
    graph.set_codegen(_BoxedCodeGen())
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    for node in graph.nodes:
        if node.target is aten.expand.default:
            node.op, node.target = "call_method", "expand"
        elif node.op == "call_function":
            node.target = _FUNCTIONS.get(node.target) or function_of(node.target) or node.target
    return module_of(module, graph)


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
    with _use_lazy_graph_module(False):  # torch.compile reads their code
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
