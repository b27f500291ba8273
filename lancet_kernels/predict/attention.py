"""Attention as one instruction, so that a plan does not depend on the attention kernel of this machine.

transformers calls it by the name `IMPLEMENTATION`. It computes nothing: captures run on fake tensors.

Where an indexer chooses the keys of each query (DeepSeek-V3.2), attention reads its choice [B, 1, S, keys]
and costs as much as with a window of so many keys, as in sparse kernels (transformers masks all others).

With context parallelism a rank has a part of each sequence, early and late tokens, so that all have the same
work. By Megatron's names (`cp_comm_type`):

all_gather    its queries attend to the keys and values of all parts, which are gathered before (Dubey et al.,
              The Llama 3 herd of models, 2407.21783, section 3.3.2), and again in the backward
              (`recomputation`)
a2a           ranks exchange tokens for heads, and the results back (Jacobs et al., DeepSpeed Ulysses,
              2309.14509); inputs and result of attention are kept
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.costs import ATTENTION_OPS
from lancet_kernels.ops.comm.collectives import all_gather, exchange_shards

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
    group, cp_comm_type = getattr(module, "context_parallel", ("", ""))
    if cp_comm_type == "a2a":
        query, key, value = (exchange_shards(x, 2, 1, group) for x in (query, key, value))
    elif group:
        # Tokens first, so that gathered tensors need no further copy.
        key, value = (all_gather(x.movedim(2, 0), 0, group).movedim(0, 2) for x in (key, value))
    window, chosen = options.get("sliding_window") or 0, options.get("indices")
    if chosen is not None:
        window, chosen = chosen.shape[-1], chosen.unsqueeze(1)
    out, _ = torch.ops.lancet_prediction.attention(query, key, value, int(window), chosen)
    if cp_comm_type == "a2a":
        out = exchange_shards(out, 1, 2, group)
    return out.transpose(1, 2), None


def share_contexts(model: Any, ranks: Sequence[int], cp_comm_type: str) -> str:
    """Let attention see the tokens of all ranks that share sequences. -> the name of their group.

    Raises: UserError for an indexer, convolutions and recurrent layers, which need all tokens, too.
    """
    has_indexer = any(getattr(model.config, name, None) for name in _INDEXER)
    is_recurrent = "linear_attention" in (getattr(model.config, "layer_types", None) or ())
    if has_indexer or is_recurrent or any(isinstance(module, nn.Conv1d) for module in model.modules()):
        raise UserError(
            "--context", got=f"{type(model).__name__}, whose layers need all tokens of a sequence",
            expected="attention without an indexer, no recurrent layers", do="plan it without --context",
        )  # fmt: skip
    group = dist.new_group(list(ranks)).group_name
    for module in model.modules():
        module.context_parallel = group, cp_comm_type
    return group


_INDEXER = ("index_topk", "indexer_n_heads")
"""Options of DeepSeek and of Qwen4-Exp, where all models have it."""


def _mask(config: Any, allow_is_causal_skip: bool = True, **shape: Any) -> Tensor | None:
    """A mask for indexers; attention itself is causal without one."""
    from transformers.masking_utils import sdpa_mask

    if allow_is_causal_skip or not any(getattr(config, name, None) for name in _INDEXER):
        return None
    return sdpa_mask(**shape, allow_is_causal_skip=False)


def register() -> None:
    """Register `IMPLEMENTATION` with transformers; it may be called several times."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


def _causal_flops(
    query: Sequence[int], value: Sequence[int], window: int, products: tuple[int, int]
) -> float:
    """FLOPs of causal attention, without the masked half.

    A part of the queries also attends to half of the keys on average, or to a window.

    Args: products: numbers of matrix products with the width of queries, and with that of values.

    Example: 32 heads of width 128 over 4096 tokens: 2 * 2 * 32 * 4096**2 * 128 / 2 = 137 GFLOP.
    """
    batch, heads, queries, width = query
    keys = value[2]
    # A window of w tokens: w keys per query, but for the first w queries.
    keys_per_query = keys / 2 if not 0 < window < keys else window - window**2 / (2 * keys)
    pairs = queries * keys_per_query
    return 2.0 * batch * heads * pairs * (products[0] * width + products[1] * value[-1])


@register_flop_formula(torch.ops.lancet_prediction.attention)
def _forward_flops(query, key, value, window, chosen=None, *, out_shape=None) -> float:
    return _causal_flops(query, value, window, (1, 1))


@register_flop_formula(torch.ops.lancet_prediction.attention_backward)
def _backward_flops(gradient, query, key, value, out, lse, window, chosen=None, *, out_shape=None) -> float:
    return _causal_flops(query, value, window, (3, 2))
