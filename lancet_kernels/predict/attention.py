"""Attention as one instruction, so that a plan does not depend on the kernel that this machine would take.

transformers calls it by the name `IMPLEMENTATION`. It computes nothing: captures run on fake tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lancet_kernels.graph.program.program import Instruction, TensorSpec

IMPLEMENTATION = "lancet_prediction"
OP = "lancet_prediction.attention"
OP_BACKWARD = "lancet_prediction.attention_backward"

_LIBRARY = torch.library.Library("lancet_prediction", "DEF")
_LIBRARY.define("attention(Tensor query, Tensor key, Tensor value, int window) -> (Tensor, Tensor)")
_LIBRARY.define(
    "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    "int window) -> (Tensor, Tensor, Tensor)"
)


@torch.library.register_fake("lancet_prediction::attention", lib=_LIBRARY)
def _attention_fake(query: Tensor, key: Tensor, value: Tensor, window: int) -> tuple[Tensor, Tensor]:
    batch, heads, sequence, _ = query.shape
    out = query.new_empty(batch, sequence, heads, value.shape[-1])
    return out, query.new_empty(batch, heads, sequence, dtype=torch.float32)


@torch.library.register_fake("lancet_prediction::attention_backward", lib=_LIBRARY)
def _attention_backward_fake(gradient, query, key, value, out, lse, window):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor):
    dq, dk, dv = torch.ops.lancet_prediction.attention_backward(gradient, *ctx.saved_tensors, ctx.window)
    return dq, dk, dv, None


torch.library.register_autograd("lancet_prediction::attention", _backward, setup_context=_save, lib=_LIBRARY)


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The signature that transformers expects: [B, heads, S, d] -> [B, S, heads, d]."""
    window = options.get("sliding_window") or 0
    out, _ = torch.ops.lancet_prediction.attention(query, key, value, int(window))
    return out, None


def register() -> None:
    """Tell transformers the name. Any number of times."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attention_forward)


def attention_flops(instruction: Instruction, tensors: dict[str, TensorSpec]) -> float:
    """FLOPs of causal attention, without the masked half; the backward has five products for two.

    Example: 32 heads of width 128 over 4096 tokens: 2 * 2 * 32 * 4096**2 * 128 / 2 = 137 GFLOP.
    """
    backward = instruction.op == OP_BACKWARD
    query, _, value = (tensors[t] for t in instruction.inputs[backward : backward + 3])
    batch, heads, sequence, width = query.shape
    window = instruction.attributes["window"]
    # A window of w tokens: w keys per query, but for the first w queries.
    pairs = sequence**2 / 2 if not 0 < window < sequence else sequence * window - window**2 / 2
    product = 2.0 * batch * heads * pairs
    queries, values = product * width, product * value.shape[-1]
    return 3 * queries + 2 * values if backward else queries + values
