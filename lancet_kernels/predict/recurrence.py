"""Recurrent layers as one instruction each: Mamba's scans, the gated delta rule, and the short convolution
before them, forward and backward.

Without kernels transformers computes them chunk by chunk, or token by token: thousands of ops, whose results
a kernel never stores. While a step is captured, an op replaces the functions in transformers' modeling files
that kernels otherwise replace. It computes nothing: captures run on fake tensors.

    S  tokens                                   C  tokens of a chunk
    H  heads of width P (Mamba-2), K and V      G  groups of heads that share B and C
    N  width of a state                         D  channels

FLOPs of the chunked algorithms, without masked halves:

    Mamba-2                 S (G C N + H (C P + 4 P N))       Dao and Gu (2405.21060), section 6
    gated delta rule        S H (C (3 K + 2 V) + 6 K V)       Yang et al. (2412.06464), section 3.3
    Mamba                   9 S D N                           as its authors count
    convolution             2 S D k                           over k tokens

The backward has three times as many: it computes states again. FLA 0.5.1 on H200, 8,192 tokens, 32 heads
of 128: 0.472 and 1.444 ms (QwenLM/FlashQLA benchmark/benchmark_results_H200.txt of c18a486). Mamba-2 is
assumed to reach the same FLOP/s. Mamba's scan, of exponentials instead of matrix products, is predicted as
one pass over memory, which is too little.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from lancet_kernels.errors import UserError

_BACKWARD_FLOPS = 3.0
_LIBRARY = torch.library.Library("lancet_prediction", "FRAGMENT")
_LIBRARY.define("recurrence(Tensor x, Tensor[] others, float flops) -> Tensor")
_LIBRARY.define("recurrence_backward(Tensor gradient, Tensor x, Tensor[] others, float flops) -> Tensor[]")


@torch.library.register_fake("lancet_prediction::recurrence", lib=_LIBRARY)
def _recurrence_fake(x: Tensor, others: Sequence[Tensor], flops: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("lancet_prediction::recurrence_backward", lib=_LIBRARY)
def _recurrence_backward_fake(
    gradient: Tensor, x: Tensor, others: Sequence[Tensor], flops: float
) -> list[Tensor]:
    return [operand.new_empty(operand.shape) for operand in (x, *others)]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, others, ctx.flops = inputs
    ctx.save_for_backward(x, *others)


def _backward(ctx: Any, gradient: Tensor):
    x, *others = ctx.saved_tensors
    dx, *dothers = torch.ops.lancet_prediction.recurrence_backward(gradient, x, others, ctx.flops)
    return dx, dothers, None


torch.library.register_autograd("lancet_prediction::recurrence", _backward, setup_context=_save, lib=_LIBRARY)


@register_flop_formula(torch.ops.lancet_prediction.recurrence)
def _forward_flops(x, others, flops, *, out_shape=None) -> float:
    return flops


@register_flop_formula(torch.ops.lancet_prediction.recurrence_backward)
def _flops_of_backward(gradient, x, others, flops, *, out_shape=None) -> float:
    return _BACKWARD_FLOPS * flops


def _recurrence(x: Tensor, others: Sequence[Tensor | None], flops: float) -> Tensor:
    present = [other for other in others if other is not None]
    return torch.ops.lancet_prediction.recurrence(x, present, float(flops))


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **_: object,
) -> Tensor:
    """hidden_states [batch, S, H, P], dt [batch, S, H], A [H], B, C [batch, S, G, N] -> as hidden_states."""
    batch, tokens, heads, width = hidden_states.shape
    groups, state = B.shape[2:]
    flops = groups * chunk_size * state + heads * (chunk_size * width + 4 * width * state)
    return _recurrence(hidden_states, (dt, A, B, C, D, dt_bias), batch * tokens * flops)


def chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64, **_: object
) -> tuple[Tensor, None]:
    """query, key [batch, S, heads, K], value [batch, S, H, V], g and beta [batch, S, H, ...] -> as value."""
    batch, tokens, heads, width = value.shape
    key_width = key.shape[-1]
    flops = chunk_size * (3 * key_width + 2 * width) + 6 * key_width * width
    return _recurrence(value, (query, key, g, beta), batch * tokens * heads * flops), None


def mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    **_: object,
) -> Tensor:
    """hidden_states, dt [batch, D, S], A [D, N], B and C [batch, N, S] -> as hidden_states."""
    flops = 9.0 * hidden_states.numel() * A.shape[-1]
    return _recurrence(hidden_states, (dt, A, B, C, D, z, delta_bias), flops)


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Tensor:
    """hidden_states [batch, D, S], weight [D, k] -> as hidden_states."""
    return _recurrence(hidden_states, (weight, bias), 2.0 * hidden_states.numel() * weight.shape[-1])


def _no_kernel(*_: object, **__: object) -> None:
    """A missing kernel of a fused layer, without which transformers calls the functions above."""


SCANS: dict[str, Callable[..., Any]] = {
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "chunk_kimi_delta_attention": chunk_gated_delta_rule,
    "mamba_selective_scan": mamba_selective_scan,
}
FUNCTIONS = SCANS | {
    "causal_conv1d_fn": causal_conv1d_fn,
    "mamba2_split_conv1d_scan_combined": _no_kernel,
    "mamba_inner_fn": _no_kernel,
}
"""Replacements by name in transformers' modeling files."""


@contextlib.contextmanager
def as_instructions(model: nn.Module) -> Iterator[None]:
    """A context in which the recurrent layers of a model of transformers call the op.

    Raises: UserError where they would be computed token by token: a transformers whose files lack the names.
    """
    files = {type(part).__module__ for part in model.modules()}
    recurrent = {type(part).__module__ for part in model.modules() if hasattr(part, "A_log")}
    with contextlib.ExitStack() as replaced:
        for file in files:
            module = sys.modules[file]
            ops: Any = {name: op for name, op in FUNCTIONS.items() if hasattr(module, name)}
            if file in recurrent and not SCANS.keys() & ops:
                raise UserError(
                    "--hf", got=f"{file}, whose recurrent layers have no function of their own",
                    expected=f"one of {', '.join(SCANS)}", do="install transformers 5.23",
                )  # fmt: skip
            if ops:
                replaced.enter_context(mock.patch.multiple(module, **ops))
        yield
