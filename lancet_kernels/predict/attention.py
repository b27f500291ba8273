"""Attention as one instruction, so that a plan does not depend on the kernel that this machine would take.

transformers calls it by the name `IMPLEMENTATION`. It computes nothing: captures run on fake tensors.

Where an indexer chooses the keys of each query (DeepSeek-V3.2), attention reads its choice [B, 1, S, keys]
and costs what a window of so many keys does: as kernels for it compute, not as transformers masks the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from lancet_kernels.graph.costs.costs import ATTENTION_OPS

IMPLEMENTATION = "lancet_prediction"
OP, _ = ATTENTION_OPS

_LIBRARY = torch.library.Library("lancet_prediction", "DEF")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, int window, Tensor? chosen=None) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    "int window, Tensor? chosen=None) -> (Tensor, Tensor, Tensor)"
)


@torch.library.register_fake("lancet_prediction::attention", lib=_LIBRARY)
def _attention_fake(
    query: Tensor, key: Tensor, value: Tensor, window: int, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    batch, heads, sequence, _ = query.shape
    # As transformers wants it, [B, S, heads, d], seen as [B, heads, S, d].
    out = query.new_empty(batch, sequence, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(batch, heads, sequence, dtype=torch.float32)


@torch.library.register_fake("lancet_prediction::attention_backward", lib=_LIBRARY)
def _attention_backward_fake(gradient, query, key, value, out, lse, window, chosen=None):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, ctx.window, chosen = inputs
    ctx.save_for_backward(query, key, value, *output, chosen)


def _backward(ctx: Any, gradient: Tensor, _: Tensor):
    *saved, chosen = ctx.saved_tensors
    dq, dk, dv = torch.ops.lancet_prediction.attention_backward(gradient, *saved, ctx.window, chosen)
    return dq, dk, dv, None, None


torch.library.register_autograd("lancet_prediction::attention", _backward, setup_context=_save, lib=_LIBRARY)


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The signature that transformers expects: [B, heads, S, d] -> [B, S, heads, d]."""
    window, chosen = options.get("sliding_window") or 0, options.get("indices")
    if chosen is not None:
        window, chosen = chosen.shape[-1], chosen.unsqueeze(1)
    out, _ = torch.ops.lancet_prediction.attention(query, key, value, int(window), chosen)
    return out.transpose(1, 2), None


def _mask(config: Any, allow_is_causal_skip: bool = True, **shape: Any) -> Tensor | None:
    """Attention is causal without a mask, which an indexer alone reads."""
    from transformers.masking_utils import sdpa_mask

    # By DeepSeek's name and by Qwen4-Exp's, which is there for all its models.
    has_indexer = hasattr(config, "index_topk") or getattr(config, "indexer_n_heads", None)
    if allow_is_causal_skip or not has_indexer:
        return None
    return sdpa_mask(**shape, allow_is_causal_skip=False)


def register() -> None:
    """Tell transformers the name. Any number of times."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


def _causal_flops(
    query: Sequence[int], value: Sequence[int], window: int, products: tuple[int, int]
) -> float:
    """FLOPs of causal attention, without the masked half.

    Args: products: how many have the width of queries, how many that of values.

    Example: 32 heads of width 128 over 4096 tokens: 2 * 2 * 32 * 4096**2 * 128 / 2 = 137 GFLOP.
    """
    batch, heads, sequence, width = query
    # A window of w tokens: w keys per query, but for the first w queries.
    pairs = sequence**2 / 2 if not 0 < window < sequence else sequence * window - window**2 / 2
    return 2.0 * batch * heads * pairs * (products[0] * width + products[1] * value[-1])


@register_flop_formula(torch.ops.lancet_prediction.attention)
def _forward_flops(query, key, value, window, chosen=None, *, out_shape=None) -> float:
    return _causal_flops(query, value, window, (1, 1))


@register_flop_formula(torch.ops.lancet_prediction.attention_backward)
def _backward_flops(gradient, query, key, value, out, lse, window, chosen=None, *, out_shape=None) -> float:
    return _causal_flops(query, value, window, (3, 2))
