"""Runs a planned graph: as Python code, or node by node while recording times.

autograd calls a `GraphRunner` for the forward and one for the backward graph. A `Recorder` collects, for one
iteration, the start and end of every instruction of both graphs on this rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lancet_kernels.graph.capture.captured_graph import with_any_strides
from lancet_kernels.graph.capture.direct_calls import with_direct_calls
from lancet_kernels.graph.capture.inner_compile import compile_between_communications
from lancet_kernels.graph.capture.layer_names import announce_layers
from lancet_kernels.graph.program.from_fx import is_instruction, op_name
from lancet_kernels.graph.program.program import Phase


@dataclass
class Recorder:
    """While `on`, collects (instruction, phase, start, end), in seconds of the monotonic clock."""

    on: bool = False
    computed: list[tuple[str, Phase, float, float]] = field(default_factory=list)


class GraphRunner:
    """Runs a graph with a list of inputs, which it empties.

    inner_compile: the backend that compiles the pieces between communications
    (`graph.capture.inner_compile`); "": none.
    then: is called with the results.
    frees: free each input after its last use, also where that takes time (on the CPU).
    """

    _boxed_call = True  # tells torch to pass a list

    def __init__(
        self,
        module: fx.GraphModule,
        phase: Phase,
        recorder: Recorder,
        inner_compile: str = "",
        then: Callable[[Any], None] | None = None,
        frees: bool = False,
    ) -> None:
        announce_layers(module, in_pieces=bool(inner_compile))
        for node in module.graph.nodes:
            # A result that is written where a view points to must stay one.
            if not any(user.kwargs.get("out") is node for user in node.users):
                node.target = with_any_strides(node.target)
        module.recompile()
        self.module, self.phase, self.recorder = module, phase, recorder
        self.pieces = compile_between_communications(module, inner_compile) if inner_compile else None
        self.direct = with_direct_calls(module)
        self.then, self.frees = then, frees

    @torch.no_grad()
    def __call__(self, inputs: list) -> object:
        results = self._run(inputs)
        if self.then is not None:
            self.then(results)
        return results

    def _run(self, inputs: list) -> object:
        if self.recorder.on:
            return _Clocked(self.module, self.phase, self.recorder).boxed_run(inputs)
        on_gpu = inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].is_cuda
        if self.pieces is None and (on_gpu or self.frees):
            # The interpreter frees each saved activation after its last use; a call keeps its arguments
            # alive.
            return fx.Interpreter(self.direct).boxed_run(inputs)
        # On the CPU the interpreter's overhead, some 10 us a node, would be part of every iteration.
        arguments = tuple(inputs)
        inputs.clear()
        return (self.pieces or self.direct.forward)(*arguments)


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
