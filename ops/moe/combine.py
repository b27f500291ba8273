"""Combine: gather each token's rows back from the experts and add them up with their weights.

    T  tokens on this rank      S  rows that were sent, and came back (`ops.comm.rows`)
    K  choices per token        D  model width

Dropped choices contribute zero. The sum over K is computed in a fixed order and in at least float32, then
rounded once to the dtype of the rows, without an intermediate tensor of T * K rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lancet_kernels.ops.moe.kernel_path import runs_in_kernels
from lancet_kernels.ops.registration import op


def _choices(rows_SD: Tensor, row_TK: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each k: k, the rows [T, D] of all tokens' choice k, and which of them are dropped [T, 1]."""
    for k, row_T in enumerate(row_TK.unbind(1)):
        yield k, rows_SD.index_select(0, row_T.clamp(min=0)), (row_T < 0)[:, None]


def _weighted_sum(rows_SD: Tensor, row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """-> [T, D] in at least float32, choice by choice."""
    dtype = torch.promote_types(rows_SD.dtype, torch.float32)
    sum_TD = rows_SD.new_zeros(row_TK.shape[0], rows_SD.shape[1], dtype=dtype)
    for k, rows_TD, dropped_T1 in _choices(rows_SD, row_TK):
        rows_TD = rows_TD.to(dtype).masked_fill_(dropped_T1, 0)
        sum_TD += rows_TD if weight_TK is None else rows_TD.mul_(weight_TK[:, k, None].to(dtype))
    return sum_TD


def _bags(rows_SD: Tensor, row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """`_weighted_sum` in one call: torch's embedding bags, one per token. float32 and float64 only."""
    kept_TK = row_TK >= 0
    kept_T = kept_TK.sum(1)
    first_T = kept_T.cumsum(0) - kept_T
    row_S = row_TK[kept_TK]
    weight_S = None if weight_TK is None else weight_TK[kept_TK].to(rows_SD.dtype)
    return torch.nn.functional.embedding_bag(row_S, rows_SD, first_T, mode="sum", per_sample_weights=weight_S)


@op("lancet::combine")
def combine(rows_SD: Tensor, row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """out[t] = sum_k weight[t, k] * rows[row[t, k]].

    Args: row_TK: int64, as given to dispatch; weight_TK: None means 1.
    Returns: [T, D] in the dtype of the rows.
    """
    if runs_in_kernels(rows_SD):
        from lancet_kernels.kernels.moe import permute

        weight_TK = None if weight_TK is None else weight_TK.float().contiguous()
        return permute.combine(rows_SD.contiguous(), row_TK.contiguous(), weight_TK)

    if not rows_SD.numel() or not row_TK.numel():
        return rows_SD.new_zeros(row_TK.shape[0], rows_SD.shape[1])
    if rows_SD.dtype == torch.float32 and rows_SD.device.type == "cpu":
        return _bags(rows_SD.contiguous(), row_TK, weight_TK)
    return _weighted_sum(rows_SD, row_TK, weight_TK).to(rows_SD.dtype)


@combine.register_fake
def _(rows_SD, row_TK, weight_TK):
    return rows_SD.new_empty(row_TK.shape[0], rows_SD.shape[1])


@op("lancet::combine_dweight")
def combine_dweight(x_TD: Tensor, rows_SD: Tensor, row_TK: Tensor) -> Tensor:
    """-> [T, K], at least float32: x[t] . rows[row[t, k]], zero where dropped.

    The gradient of the weights in combine (x = gradient of its output) and in dispatch (rows = gradient of
    its output).
    """
    if runs_in_kernels(x_TD):
        from lancet_kernels.kernels.moe import permute

        return permute.combine_dweight(x_TD.contiguous(), rows_SD.contiguous(), row_TK.contiguous())

    dtype = torch.promote_types(rows_SD.dtype, torch.float32)
    dweight_TK = rows_SD.new_zeros(row_TK.shape, dtype=dtype)
    if rows_SD.numel():
        x_TD1 = x_TD.to(dtype).unsqueeze(2)
        for k, rows_TD, dropped_T1 in _choices(rows_SD, row_TK):
            dot_T1 = torch.bmm(rows_TD.to(dtype).unsqueeze(1), x_TD1).squeeze(2)
            dweight_TK[:, k] = dot_T1.masked_fill_(dropped_T1, 0).squeeze(1)
    return dweight_TK


@combine_dweight.register_fake
def _(x_TD, rows_SD, row_TK):
    dtype = torch.promote_types(rows_SD.dtype, torch.float32)
    return row_TK.new_empty(row_TK.shape, dtype=dtype)


def _setup_context(ctx, inputs, output) -> None:
    rows_SD, row_TK, weight_TK = inputs
    weighted = weight_TK is not None and ctx.needs_input_grad[2]
    ctx.save_for_backward(row_TK, weight_TK, rows_SD if weighted else None)
    ctx.num_rows = rows_SD.shape[0]


def _backward(ctx, grad_TD):
    row_TK, weight_TK, rows_SD = ctx.saved_tensors
    grad_rows = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_rows = torch.ops.lancet.dispatch(grad_TD, row_TK, weight_TK, ctx.num_rows, ctx.num_rows)
    if rows_SD is not None:
        grad_weight = combine_dweight(grad_TD, rows_SD, row_TK).to(weight_TK.dtype)
    return grad_rows, None, grad_weight


combine.register_autograd(_backward, setup_context=_setup_context)
