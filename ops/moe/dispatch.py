"""Which rows are sent, and dispatch, which copies each token's row to the rows of its experts.

    T  tokens on this rank      W  ranks, L experts on each, e = w * L + l
    K  choices per token        D  model width
    S  rows to send (`ops.comm.rows`)

The rows of each expert and the row of each kept choice are computed once per layer; dispatch, combine and
their gradients read it. Ops of their own because a batch that is cut into parts has other counts in every
part: the planner replaces them.

Dispatch and combine are each other's adjoint, so each one's backward is the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lancet_kernels.ops.comm.rows import DROPPED, traced_rows
from lancet_kernels.ops.moe.combine import combine, combine_dweight
from lancet_kernels.ops.moe.kernel_path import runs_in_kernels
from lancet_kernels.ops.registration import op


@op("lancet::kept_counts")
def kept_counts(used_E: Tensor, capacity: int, ranks: int) -> Tensor:
    """-> [W, L] int64: min(used, capacity) of expert l on rank w, for a batch that began with no slot used.

    Args: used_E: int64, the gate's `used'` (dropped assignments included).
    """
    return used_E.clamp(max=capacity).view(ranks, -1)


kept_counts.register_fake(kept_counts.function)


@op("lancet::send_rows", like="expert_TK")
def send_rows(expert_TK: Tensor, slot_TK: Tensor, count_WL: Tensor) -> Tensor:
    """-> [T, K] int64: row indices, sorted by expert, then slot; DROPPED for a slot >= the expert's count.

    Args: expert_TK, slot_TK: int64, from the gate; the slots of an expert are 0, 1, 2, ... without gaps.
    Example: counts = [[1], [2]], expert = [[1, 0], [1, 0]], slot = [[0, 0], [1, 1]] -> [[1, 0], [2, -1]].
    """
    count_E = count_WL.reshape(-1)
    first_E = count_E.cumsum(0) - count_E
    return torch.where(slot_TK < count_E[expert_TK], first_E[expert_TK] + slot_TK, DROPPED)


def choice_of_rows(row_TK: Tensor) -> Tensor:
    """-> [S] int64: the choice t * K + k of each row. Makes the host wait for the number of rows.

    Example: row = [[1, 0], [2, -1]] -> [1, 0, 2].
    """
    row_N = row_TK.reshape(-1)
    choice_S = (row_N >= 0).nonzero().view(-1)
    return torch.empty_like(choice_S).index_copy_(0, row_N[choice_S], choice_S)


@op("lancet::dispatch")
def dispatch(
    x_TD: Tensor, row_TK: Tensor, weight_TK: Tensor | None, most_rows: int, num_rows: int | None = None
) -> Tensor:
    """rows[row[t, k]] = x[t] * weight[t, k].

    Args:
        row_TK: int64, from `send_rows`. weight_TK: None means 1.
        most_rows: an upper bound of S; the number of rows of the result if the host does not know S.
        num_rows: S, if the caller knows it.
    Returns: [S, D] in the dtype of x; products are computed in at least float32.
    """
    if runs_in_kernels(x_TD):
        from lancet_kernels.kernels.moe.permute import permute

        weight_TK = None if weight_TK is None else weight_TK.float().contiguous()
        return permute(x_TD.contiguous(), row_TK.contiguous(), weight_TK, most_rows)

    choice_S = choice_of_rows(row_TK)
    token_S = choice_S if row_TK.shape[1] == 1 else choice_S.div(row_TK.shape[1], rounding_mode="floor")
    rows_SD = x_TD.index_select(0, token_S)
    if weight_TK is None:
        return rows_SD
    weight_S1 = weight_TK.reshape(-1)[choice_S].unsqueeze(1)
    # The rows are already a copy, so multiply in place, unless the weights have a wider dtype.
    wide = torch.promote_types(rows_SD.dtype, weight_S1.dtype) != rows_SD.dtype
    return (rows_SD * weight_S1).to(x_TD.dtype) if wide else rows_SD.mul_(weight_S1)


@dispatch.register_fake
def _(x_TD, row_TK, weight_TK, most_rows, num_rows=None):
    return x_TD.new_empty(traced_rows(most_rows, num_rows), x_TD.shape[1])


def _setup_context(ctx, inputs, output) -> None:
    x_TD, row_TK, weight_TK, *_ = inputs
    weighted = weight_TK is not None and ctx.needs_input_grad[2]
    ctx.save_for_backward(row_TK, weight_TK, x_TD if weighted else None)


def _backward(ctx, grad_SD):
    row_TK, weight_TK, x_TD = ctx.saved_tensors
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = combine(grad_SD, row_TK, weight_TK)
    if x_TD is not None:
        grad_weight = combine_dweight(x_TD, grad_SD, row_TK).to(weight_TK.dtype)
    return grad_x, None, grad_weight, None, None


dispatch.register_autograd(_backward, setup_context=_setup_context)
