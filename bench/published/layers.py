"""One MoE layer alone, as Megatron-LM's performance test measures it: forward, backward, peak memory.

The test passes no `gated_linear_unit`, so the experts have a plain GELU; it is not fused, and routing weights
are multiplied in float32 after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from lancet_kernels import MoELayer
from lancet_kernels.graph.capture.capture import capture
from lancet_kernels.graph.costs.clusters import Cluster, load_cluster
from lancet_kernels.graph.costs.costs import KernelCosts
from lancet_kernels.graph.from_fx import program_from_fx
from lancet_kernels.graph.program.program import Phase, Program, TensorSpec
from lancet_kernels.predict.fake_ranks import fake_ranks, without_contents
from lancet_kernels.predict.kernels import Kernels
from lancet_kernels.predict.model_step import weights_inside_experts
from lancet_kernels.predict.recomputation import recompute_as
from lancet_kernels.schedules.time.peak_memory import peak_memory

FORWARD_PASSES, BACKWARD_PASSES = 16, 32
"""Bytes per element that the unfused activation moves: gelu 2 read, 2 written; times the weight 2, 4; to
bfloat16 4, 2. Backward: the cast 2, 4; times the weight 4, 4; the weight's gradient 4, 2; the cast 4, 2; gelu
2, 2, 2."""


@lru_cache(maxsize=8)
def layer_program(
    width: int, hidden: int, experts: int, top_k: int, gate: str, tokens: int, ranks: int
) -> Program:
    """Forward and backward of the layer on one of `ranks` ranks."""
    with fake_ranks(ranks):
        with without_contents():
            layer = MoELayer(
                width, hidden, experts, top_k=top_k, gate=gate, capacity_factor=None, activation="gelu"
            ).to(torch.bfloat16)
            x = torch.empty(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        joint = capture(layer, (x,)).joint
        weights_inside_experts(joint)
        recompute_as(joint, "none")
        return program_from_fx(joint, "layer")


def _with_unfused_activation(program: Program) -> Program:
    """The Program with the passes and the temporary tensors of the unfused activation: gelu's result, kept
    for the gradient of the weights, and float32 products, one in the forward, three in the backward."""
    tensors, instructions = dict(program.tensors), []
    for i in program.instructions:
        if i.op.startswith("lancet.expert_activation"):
            forward = i.phase is Phase.FORWARD
            elements = program.tensors[i.outputs[0]].content_bytes // 2
            more = {"gelu": 2 * elements, "product": 4 * elements} if forward else {"products": 12 * elements}
            tensors |= {name: TensorSpec(name, (), bytes=size) for name, size in more.items()}
            i = replace(
                i, bytes=float(elements * (FORWARD_PASSES if forward else BACKWARD_PASSES)),
                inputs=i.inputs if forward else (*i.inputs, "gelu"), outputs=(*i.outputs, *more),
            )  # fmt: skip
        instructions.append(i)
    return replace(program, instructions=tuple(instructions), tensors=tensors)


def predicted_layer(configuration: Mapping[str, Any], cluster: Cluster | None = None) -> dict[str, float]:
    """`forward_ms`, `backward_ms` and `peak_memory_gib` of a row's layer. Args: cluster: in place of the
    row's."""
    c = dict(configuration)
    names = ("width", "hidden", "experts", "top_k", "gate", "tokens", "gpus")
    program = layer_program(*(c[name] for name in names))
    cost = KernelCosts(
        cluster or load_cluster(c["cluster"]), c["gpus"], c["gpus"], c["dispatch"], c["top_k"],
        c.get("groups", 0), c.get("top_groups", 0),
    )  # fmt: skip
    program, kernels = Kernels(cost.carrier, cost.top_k).of(program)
    program = kernels.with_copies(_with_unfused_activation(program))
    ms = dict.fromkeys(Phase, 0.0)
    for i in program.instructions:
        ms[i.phase] += cost(i, program.tensors)
    return {
        "forward_ms": ms[Phase.FORWARD],
        "backward_ms": ms[Phase.BACKWARD],
        "peak_memory_gib": peak_memory(program) / 2**30,
    }
