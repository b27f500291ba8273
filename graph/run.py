"""Runs a planned graph: as Python code, or node by node while recording times.

autograd calls a `GraphRunner` for the forward and one for the backward graph. A `Recorder` collects, for one
iteration, the start and end of every instruction of both graphs on this rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import fx

from lancet_kernels.graph.from_fx import is_instruction, op_name
from lancet_kernels.graph.inner_compile import compile_between_communications
from lancet_kernels.graph.layer_names import announce_layers
from lancet_kernels.graph.program import Phase


@dataclass
class Recorder:
    """While `on`, collects (instruction, phase, start, end), in seconds of the monotonic clock."""

    on: bool = False
    computed: list[tuple[str, Phase, float, float]] = field(default_factory=list)


class GraphRunner:
    """Runs a graph with a list of inputs, which it empties.

    inner_compile: the backend that compiles the pieces between communications (`graph.inner_compile`); "":
    none.
    """

    _boxed_call = True  # tells torch to pass a list

    def __init__(
        self, module: fx.GraphModule, phase: Phase, recorder: Recorder, inner_compile: str = ""
    ) -> None:
        announce_layers(module, in_pieces=bool(inner_compile))
        self.module, self.phase, self.recorder = module, phase, recorder
        self.pieces = compile_between_communications(module, inner_compile) if inner_compile else None

    def __call__(self, inputs: list) -> object:
        if self.recorder.on:
            return _Clocked(self.module, self.phase, self.recorder).boxed_run(inputs)
        if self.pieces is not None:
            arguments = tuple(inputs)
            inputs.clear()
            return self.pieces(*arguments)
        if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].is_cuda:
            # The interpreter frees each saved activation after its last use; a call keeps its arguments
            # alive.
            return fx.Interpreter(self.module).boxed_run(inputs)
        # On the CPU the interpreter's overhead, some 10 us a node, would be part of every iteration.
        arguments = tuple(inputs)
        inputs.clear()
        return self.module.forward(*arguments)


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
