"""Dispatch, experts and combine of an eager call as one autograd Function.

    T  tokens on this rank      K  choices per token       S  rows to send = T * K
    D  width                    E  experts in all          R  rows received

Where nothing is traced, a small layer on a CPU spends most of its time between its ops. Here there is one
node for autograd, rows are sorted once, and ends of groups are summed once. Rows are sorted while counts
travel, and weight gradients are computed while those of the rows travel back. The ops that plans see give the
same.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lancet_kernels.ops.base import is_traced
from lancet_kernels.ops.comm.all_to_all import (
    all_to_all,
    group_ends,
    start_all_to_all,
    start_exchange_counts,
)
from lancet_kernels.ops.comm.groups import group_size
from lancet_kernels.ops.comm.waiting import current_layer, enter_layer
from lancet_kernels.ops.moe.expert_ops import expert_activation, expert_activation_backward, is_by_column


def runs_eagerly(x_TD: Tensor, w1: Tensor, w2: Tensor) -> bool:
    """Can `eager_experts` take these tokens and weights? Float32 on a CPU, untraced, and weights by rows or
    by columns, in a multiple of 16 bytes (for torch's grouped_mm). The number of tokens does not matter, so
    that all ranks take the same path: ops give the gradients of weights in another order, in which hooks
    communicate (`ddp`)."""
    return (
        all(t.dtype == torch.float32 and t.device.type == "cpu" for t in (x_TD, w1, w2))
        and all(
            (w.is_contiguous() or is_by_column(w)) and not any(n % 4 for n in w.shape[1:]) for w in (w1, w2)
        )
        and not is_traced((x_TD, w1, w2))
    )


def eager_experts(
    x_TD: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    w1: Tensor,
    w2: Tensor,
    num_experts: int,
    activation: str,
    group: str,
    real_T1: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """-> y [T, D], and int64 [E]: how many choices each expert got. No choice is dropped.

    Args: expert_TK int64. weight_TK: of any dtype. w1 [L, D, H], w2 [L, F, D]: of the experts of this rank.
        real_T1 bool: the tokens that are no padding, N of them; None: all. Padding is left out; y is zero
        there.
    Raises: UserError (ranks disagree), CommunicationError (a peer is missing).
    """
    experts = w1, w2, num_experts, activation, group
    weight_TK = weight_TK.to(x_TD.dtype)  # a float64 router gives float64
    if real_T1 is None:
        return _EagerExperts.apply(x_TD, expert_TK, weight_TK, *experts)
    real_T = real_T1.view(-1)
    y_ND, count_E = _EagerExperts.apply(x_TD[real_T], expert_TK[real_T], weight_TK[real_T], *experts)
    return torch.zeros_like(x_TD).masked_scatter(real_T1, y_ND), count_E


def _times_weights(x_RA: Tensor, weight_LAB: Tensor, ends_L: Tensor) -> Tensor:
    """-> [R, B]."""
    if not len(x_RA):
        return x_RA.new_empty(0, weight_LAB.shape[2])
    return torch.nn.functional.grouped_mm(x_RA, weight_LAB, offs=ends_L)


def _times_rows(x_RA: Tensor, dy_RB: Tensor, ends_L: Tensor, like: Tensor) -> Tensor:
    """-> [L, A, B], in memory `like` the weight; zero for experts without rows, whose part grouped_mm leaves
    as it was."""
    if is_by_column(like):
        return _times_rows(dy_RB, x_RA, ends_L, like.transpose(1, 2)).transpose(1, 2)
    if not len(x_RA):
        return x_RA.new_zeros(len(ends_L), x_RA.shape[1], dy_RB.shape[1])
    dw_LAB = torch.nn.functional.grouped_mm(x_RA.t(), dy_RB, offs=ends_L)
    begin = 0
    for expert, end in enumerate(ends_L.tolist()):
        if begin == end:
            dw_LAB[expert].zero_()
        begin = end
    return dw_LAB


class _EagerExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, expert_TK, weight_TK, w1, w2, num_experts, activation, group):
        expert_S = expert_TK.reshape(-1)
        choice_S = expert_S.argsort(stable=True)
        row_S = torch.empty_like(choice_S)
        row_S[choice_S] = torch.arange(len(choice_S))
        row_TK = row_S.view_as(expert_TK)
        top_k = expert_TK.shape[1]
        token_S = choice_S if top_k == 1 else choice_S.div(top_k, rounding_mode="floor")
        count_E = expert_S.bincount(minlength=num_experts)
        count_WL = count_E.view(group_size(group), -1)

        counts = start_exchange_counts(count_WL, x_TD.shape[1], x_TD.dtype, group)
        rows = x_TD.index_select(0, token_S)
        received_WL = counts.wait()
        if group:
            rows = all_to_all(rows, count_WL, received_WL, group, True)
        ends_L = group_ends(received_WL).int()
        hidden = _times_weights(rows, w1, ends_L)
        activated = expert_activation.function(hidden, received_WL, activation)
        back = _times_weights(activated, w2, ends_L)
        if group:
            back = all_to_all(back, received_WL, count_WL, group, False)
        y_TD = torch.nn.functional.embedding_bag(row_TK, back, mode="sum", per_sample_weights=weight_TK)

        ctx.activation, ctx.group, ctx.layer = activation, group, current_layer()
        ctx.mark_non_differentiable(count_E)
        ctx.save_for_backward(
            weight_TK, w1, w2, choice_S, token_S, row_TK, count_WL, received_WL, ends_L, rows, hidden,
            activated, back,
        )  # fmt: skip
        return y_TD, count_E

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_TD, _dcount):
        (
            weight_TK, w1, w2, choice_S, token_S, row_TK, count_WL, received_WL, ends_L, rows, hidden,
            activated, back,
        ) = ctx.saved_tensors  # fmt: skip
        activation, group = ctx.activation, ctx.group
        needs_x, _, needs_weight, needs_w1, needs_w2, *_ = ctx.needs_input_grad
        dx = dweight = dw1 = dw2 = to_experts = to_ranks = None
        dy_SD = dy_TD.index_select(0, token_S)
        if needs_x or needs_w1 or needs_w2:
            if group:
                enter_layer(ctx.layer)
            weighted_SD = dy_SD * weight_TK.reshape(-1)[choice_S].unsqueeze(1)
            to_experts = start_all_to_all(weighted_SD, count_WL, received_WL, group, True)
            del weighted_SD
        if needs_weight:
            dweight = (dy_SD * back).sum(1)[row_TK]
        del dy_SD
        if to_experts is not None:
            d_RD = to_experts.wait()
        if needs_x or needs_w1:
            d_RF = _times_weights(d_RD, w2.transpose(1, 2), ends_L)
            d_RH = expert_activation_backward.function(d_RF, hidden, received_WL, activation)
        if needs_x:
            dx_RD = _times_weights(d_RH, w1.transpose(1, 2), ends_L)
            to_ranks = start_all_to_all(dx_RD, received_WL, count_WL, group, False)
        if needs_w1:
            dw1 = _times_rows(rows, d_RH, ends_L, w1)
        if needs_w2:
            dw2 = _times_rows(activated, d_RD, ends_L, w2)
        if to_ranks is not None:
            dx = torch.nn.functional.embedding_bag(row_TK, to_ranks.wait(), mode="sum")
        return dx, None, dweight, dw1, dw2, None, None, None
