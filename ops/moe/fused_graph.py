"""The fused experts as two graph instructions: one for the forward pass, one for the backward.

A planned graph calls them instead of the ops of an MoE layer (`schedules.rewrite.fused` inserts them). The
forward returns its result and a ticket (`ops.moe.fused_passes`), by which the backward finds what the
forward keeps; nothing else is saved between the two. The backward launch can also compute weight gradients of
other layers as fillers.

    T  tokens     K  choices per token     W  ranks, L experts on each     D, F, H  widths
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lancet_kernels.ops.base import context_of
from lancet_kernels.ops.comm.waiting import current_layer, waiting
from lancet_kernels.ops.moe.fused_passes import take_pass, ticket_of

if TYPE_CHECKING:  # the kernels need Triton, which not every machine has
    from lancet_kernels.ops.moe.fused_experts import LayerExchange


def layer_of(context: int, layer: str) -> LayerExchange:
    """The exchange of a layer, by the number of the context and the layer's name in it."""
    return context_of(context).layers[layer]


@torch.library.custom_op("lancet::fused_experts", mutates_args=())
def fused_experts_op(
    x_TD: Tensor,
    expert_TK: Tensor,
    row_TK: Tensor,
    weight_TK: Tensor,
    count_WL: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    capacity: int,
    context: int,
    layer: str,
) -> tuple[Tensor, Tensor]:
    """dispatch, experts and combine in fused launches. -> out [T, D], ticket int64 [1] (on the CPU).

    Args: row_TK: from `send_rows`, or of a part from `part_rows`. context, layer: as of `layer_of`.
    """
    from lancet_kernels.ops.moe.fused_experts import run_forward

    out, forward_pass = run_forward(
        x_TD, expert_TK, row_TK, weight_TK, count_WL, capacity, w1, b1, w2, b2, layer_of(context, layer)
    )
    return out, ticket_of(forward_pass)


@fused_experts_op.register_fake
def _(x_TD, expert_TK, row_TK, weight_TK, count_WL, w1, b1, w2, b2, capacity, context, layer):
    return torch.empty_like(x_TD), torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op("lancet::fused_experts_backward", mutates_args=())
def fused_experts_backward_op(
    dy_TD: Tensor,
    ticket: Tensor,
    weight_TK: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    dense_a: Sequence[Tensor],
    dense_b: Sequence[Tensor],
    context: int,
    layer: str,
) -> list[Tensor]:
    """The backward of a ticket, once per ticket. -> [dx, dweight, dw1, dw2, (db1, db2,) *dense].

    Args: dense_a [N, A], dense_b [N, B]: pairs; the same launch computes a^T b, [A, B], as fillers.
    """
    from lancet_kernels.kernels.overlap import DenseGemm
    from lancet_kernels.ops.moe.fused_experts import run_backward

    forward_pass = take_pass(ticket)
    pairs = [(a.contiguous(), b.contiguous()) for a, b in zip(dense_a, dense_b, strict=True)]
    dense = [DenseGemm(a, b, a.new_empty(a.shape[1], b.shape[1])) for a, b in pairs]
    with waiting("fused_experts_backward", layer_of(context, layer).process_group, current_layer()):
        gradients = run_backward(forward_pass, dy_TD, dense=dense)
    biases = [db for db in (gradients.db1, gradients.db2) if db is not None]
    dweight = gradients.dweight.to(weight_TK.dtype)
    return [gradients.dx, dweight, gradients.dw1, gradients.dw2, *biases, *(gemm.c for gemm in dense)]


@fused_experts_backward_op.register_fake
def _(dy_TD, ticket, weight_TK, w1, b1, w2, b2, dense_a, dense_b, context, layer):
    biases = [] if b1 is None else [torch.empty_like(b1), torch.empty_like(b2)]
    dense = [a.new_empty(a.shape[1], b.shape[1]) for a, b in zip(dense_a, dense_b, strict=True)]
    own = [torch.empty_like(t) for t in (dy_TD, weight_TK, w1, w2)]
    return [*own, *biases, *dense]


# What graphs call.
FORWARD = torch.ops.lancet.fused_experts.default
BACKWARD = torch.ops.lancet.fused_experts_backward.default
