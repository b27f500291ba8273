"""Captured models of the zoo, with real values for every placeholder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, fx, nn

from lancet_kernels.graph.capture.capture import capture
from lancet_kernels.graph.capture.captured_graph import input_position, is_tangent, state_name
from lancet_kernels.graph.from_fx import program_from_fx
from lancet_kernels.graph.program import Program
from lancet_kernels.schedules.order.ordering import sink_statistics
from lancet_kernels.schedules.rewrite.apply import reorder
from tests.model_zoo import Size, make_model


@dataclass(frozen=True)
class Step:
    """A model's joint graph (statistics out of the way), its Program, and what it is called with."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    joint: fx.GraphModule
    program: Program
    values: tuple[Tensor, ...]
    forward_outputs: int


@lru_cache(maxsize=32)
def read_only_step(name: str, size: Size | None = None) -> Step:
    """A captured step, made once: not to be changed."""
    model, inputs = make_model(name, size)
    captured = capture(model, inputs)
    reorder(captured.joint.graph, sink_statistics(program_from_fx(captured.joint)))
    captured.joint.recompile()
    program = program_from_fx(captured.joint)
    joint, outputs = captured.joint, captured.forward_outputs
    return Step(model, inputs, joint, program, tuple(placeholder_values(joint, model, inputs)), outputs)


def placeholder_values(
    joint: fx.GraphModule, model: nn.Module, inputs: tuple[Tensor, ...]
) -> Iterator[Tensor]:
    """What a captured graph is called with; gradients of results are one."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for node in joint.graph.nodes:
        if node.op != "placeholder":
            continue
        if is_tangent(node):
            yield torch.ones(node.meta["val"].shape, dtype=node.meta["val"].dtype)
        elif (position := input_position(node)) is not None:
            yield inputs[position]
        else:
            yield state[state_name(node)].detach()
