"""How a planned graph runs: as Python code, or node by node with a clock beside it.

`GraphRunner` is what autograd calls for the forward or the backward graph. A `Recorder` collects, for one
iteration, when every instruction of both graphs computed on this rank.
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
    """(instruction, phase, start, end) on the monotonic clock, in seconds, while `on`."""

    on: bool = False
    computed: list[tuple[str, Phase, float, float]] = field(default_factory=list)


class GraphRunner:
    """Calls a graph with a list of inputs, which it empties.

    inner_compile: what compiles its pieces between communications (`graph.inner_compile`); "": nothing does.
    """

    _boxed_call = True  # how torch knows that it may hand over a list

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
            # Frees every saved activation after its last use; a call holds its arguments to the end.
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
        # Standing still until a collective is done is not computing.
        if is_instruction(node) and op_name(node) not in ("wait", "enter_layer"):
            self.recorder.computed.append((node.name, self.phase, begin, time.monotonic()))
        return result
