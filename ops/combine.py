"""Combine: gather each token's rows back from the experts and add them up with their weights.

    T  tokens on this rank      W  ranks, L experts on each      C  capacity
    K  choices per token        D  model width

Dropped choices contribute zero, whatever stands in the buffer. The sum over K is taken in a fixed order
and in at least float32, then rounded once to the dtype of the buffer.
"""

import torch
from torch import Tensor

from lancet_kernels.ops.dispatch import buffer_rows
from lancet_kernels.ops.kernel_path import runs_in_kernels


def naive_combine(
    buffer_WLCD: Tensor, expert_TK: Tensor, slot_TK: Tensor, weight_TK: Tensor | None
) -> Tensor:
    """Reference, one row after the other."""
    buffer_ECD = buffer_WLCD.flatten(0, 1)
    out_TD = buffer_WLCD.new_zeros(expert_TK.shape[0], buffer_WLCD.shape[-1])
    for t in range(expert_TK.shape[0]):
        for k in range(expert_TK.shape[1]):
            if slot_TK[t, k] < buffer_ECD.shape[1]:
                row_D = buffer_ECD[expert_TK[t, k], slot_TK[t, k]]
                out_TD[t] += row_D if weight_TK is None else row_D * weight_TK[t, k]
    return out_TD


def _kept_rows(buffer_WLCD: Tensor, expert_TK: Tensor, slot_TK: Tensor) -> Tensor:
    """-> [T, K, D] in at least float32, zero where dropped."""
    row_TK, kept_TK = buffer_rows(expert_TK, slot_TK, buffer_WLCD.shape[2])
    width = buffer_WLCD.shape[-1]
    if buffer_WLCD.numel() == 0:
        rows_TKD = buffer_WLCD.new_zeros(*row_TK.shape, width)
    else:
        rows_TKD = buffer_WLCD.reshape(-1, width)[row_TK]
    dtype = torch.promote_types(buffer_WLCD.dtype, torch.float32)
    return rows_TKD.to(dtype).masked_fill_(~kept_TK[..., None], 0)


def _for_kernels(buffer_WLCD: Tensor, expert_TK: Tensor, slot_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The buffer as [E, C, D], everything without gaps."""
    return buffer_WLCD.contiguous().flatten(0, 1), expert_TK.contiguous(), slot_TK.contiguous()


@torch.library.custom_op("lancet::combine", mutates_args=())
def combine(buffer_WLCD: Tensor, expert_TK: Tensor, slot_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """Rows back from the buffer: out[t] = sum_k weight[t, k] * buffer[expert[t, k], slot[t, k]].

    Args: expert_TK, slot_TK: int64, as given to dispatch; weight_TK: None means 1.
    Returns: [T, D] in the dtype of the buffer.
    """
    if runs_in_kernels(buffer_WLCD):
        from lancet_kernels.kernels import permute

        weight_TK = None if weight_TK is None else weight_TK.float().contiguous()
        return permute.combine(*_for_kernels(buffer_WLCD, expert_TK, slot_TK), weight_TK)

    rows_TKD = _kept_rows(buffer_WLCD, expert_TK, slot_TK)
    if weight_TK is not None:
        # The rows are a copy of ours: no need for another one, unless the weights are wider.
        wide = torch.promote_types(rows_TKD.dtype, weight_TK.dtype) != rows_TKD.dtype
        rows_TKD = rows_TKD * weight_TK[..., None] if wide else rows_TKD.mul_(weight_TK[..., None])
    rows_TD = rows_TKD.sum(1) if expert_TK.shape[1] != 1 else rows_TKD.squeeze(1)
    return rows_TD.to(buffer_WLCD.dtype)


@combine.register_fake
def _(buffer_WLCD, expert_TK, slot_TK, weight_TK):
    return buffer_WLCD.new_empty(expert_TK.shape[0], buffer_WLCD.shape[-1])


@torch.library.custom_op("lancet::combine_dweight", mutates_args=())
def combine_dweight(x_TD: Tensor, buffer_WLCD: Tensor, expert_TK: Tensor, slot_TK: Tensor) -> Tensor:
    """-> [T, K], at least float32: x[t] . buffer[expert[t, k], slot[t, k]], zero where dropped.

    The gradient of the weights in combine (x = gradient of its output) and in dispatch (buffer = gradient
    of its output).
    """
    if runs_in_kernels(x_TD):
        from lancet_kernels.kernels import permute

        rows = _for_kernels(buffer_WLCD, expert_TK, slot_TK)
        return permute.combine_dweight(x_TD.contiguous(), *rows)

    rows_TKD = _kept_rows(buffer_WLCD, expert_TK, slot_TK)
    return (rows_TKD * x_TD[:, None].to(rows_TKD.dtype)).sum(-1).contiguous()


@combine_dweight.register_fake
def _(x_TD, buffer_WLCD, expert_TK, slot_TK):
    dtype = torch.promote_types(buffer_WLCD.dtype, torch.float32)
    return expert_TK.new_empty(expert_TK.shape, dtype=dtype)


def _setup_context(ctx, inputs, output) -> None:
    buffer_WLCD, expert_TK, slot_TK, weight_TK = inputs
    weighted = weight_TK is not None and ctx.needs_input_grad[3]
    ctx.save_for_backward(expert_TK, slot_TK, weight_TK, buffer_WLCD if weighted else None)
    ctx.buffer_shape = buffer_WLCD.shape


def _backward(ctx, grad_TD):
    expert_TK, slot_TK, weight_TK, buffer_WLCD = ctx.saved_tensors
    ranks, local_experts, capacity, _ = ctx.buffer_shape
    grad_buffer = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_buffer = torch.ops.lancet.dispatch(
            grad_TD, expert_TK, slot_TK, weight_TK, ranks, ranks * local_experts, capacity
        )
    if buffer_WLCD is not None:
        grad_weight = torch.ops.lancet.combine_dweight(grad_TD, buffer_WLCD, expert_TK, slot_TK)
        grad_weight = grad_weight.to(weight_TK.dtype)
    return grad_buffer, None, None, grad_weight


combine.register_autograd(_backward, setup_context=_setup_context)
