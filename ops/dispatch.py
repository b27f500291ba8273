"""Dispatch: copy each token's row into the buffer of the experts it chose.

    T  tokens on this rank      E  experts in all           C  capacity
    K  choices per token        W  ranks, L = E / W experts on each
    D  model width

The buffer is [W, L, C, D]: expert e = w * L + l, one row per slot. Rows that nobody takes are zero here,
but their content is no promise of the contract: nothing may read them. Dispatch and combine are each
other's adjoint, so each one's backward is the other.
"""

import torch
from torch import Tensor

from lancet_kernels.ops.kernel_path import runs_in_kernels


def naive_dispatch(
    x_TD: Tensor,
    expert_TK: Tensor,
    slot_TK: Tensor,
    weight_TK: Tensor | None,
    ranks: int,
    num_experts: int,
    capacity: int,
) -> Tensor:
    """Reference, one row after the other."""
    buffer_ECD = x_TD.new_zeros(num_experts, capacity, x_TD.shape[1])
    for t in range(x_TD.shape[0]):
        for k in range(expert_TK.shape[1]):
            if slot_TK[t, k] < capacity:
                row_D = x_TD[t] if weight_TK is None else x_TD[t] * weight_TK[t, k]
                buffer_ECD[expert_TK[t, k], slot_TK[t, k]] = row_D.to(x_TD.dtype)
    return buffer_ECD.view(ranks, num_experts // ranks, capacity, x_TD.shape[1])


def buffer_rows(expert_TK: Tensor, slot_TK: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Row of each choice in the flat buffer [E * C], and whether it was kept.

    Example: C = 4, expert = [[2, 0]], slot = [[1, 4]] -> row = [[9, 0]], kept = [[True, False]].
    """
    kept_TK = slot_TK < capacity
    return torch.where(kept_TK, expert_TK * capacity + slot_TK, 0), kept_TK


@torch.library.custom_op("lancet::dispatch", mutates_args=())
def dispatch(
    x_TD: Tensor,
    expert_TK: Tensor,
    slot_TK: Tensor,
    weight_TK: Tensor | None,
    ranks: int,
    num_experts: int,
    capacity: int,
) -> Tensor:
    """Rows into the send buffer, times their weight if one is given.

    Args: expert_TK, slot_TK: int64, from the gate; no two kept choices share a slot.
    Returns: [W, L, C, D] in the dtype of x; products are taken in at least float32.
    """
    if runs_in_kernels(x_TD):
        from lancet_kernels.kernels.permute import permute

        rows = x_TD.contiguous(), expert_TK.contiguous(), slot_TK.contiguous()
        weight_TK = None if weight_TK is None else weight_TK.float().contiguous()
        buffer_ECD = permute(*rows, weight_TK, num_experts, capacity)
        return buffer_ECD.view(ranks, num_experts // ranks, capacity, x_TD.shape[1])

    num_choices = expert_TK.shape[1]
    row_TK, kept_TK = buffer_rows(expert_TK, slot_TK, capacity)
    # Dropped rows all land on one extra row, which is cut off: no host sync to count the kept ones.
    row_N = torch.where(kept_TK, row_TK, num_experts * capacity).reshape(-1)
    x_ND = x_TD.repeat_interleave(num_choices, dim=0) if num_choices > 1 else x_TD
    if weight_TK is not None:
        x_ND = (x_ND * weight_TK.reshape(-1, 1)).to(x_TD.dtype)
    buffer_RD = x_TD.new_zeros(num_experts * capacity + 1, x_TD.shape[1])
    buffer_RD.index_copy_(0, row_N, x_ND)
    return buffer_RD[:-1].view(ranks, num_experts // ranks, capacity, x_TD.shape[1])


@dispatch.register_fake
def _(x_TD, expert_TK, slot_TK, weight_TK, ranks, num_experts, capacity):
    return x_TD.new_empty(ranks, num_experts // ranks, capacity, x_TD.shape[1])


def _setup_context(ctx, inputs, output) -> None:
    x_TD, expert_TK, slot_TK, weight_TK, *_ = inputs
    weighted = weight_TK is not None and ctx.needs_input_grad[3]
    ctx.save_for_backward(expert_TK, slot_TK, weight_TK, x_TD if weighted else None)


def _backward(ctx, grad_WLCD):
    expert_TK, slot_TK, weight_TK, x_TD = ctx.saved_tensors
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.lancet.combine(grad_WLCD, expert_TK, slot_TK, weight_TK)
    if x_TD is not None:
        grad_weight = torch.ops.lancet.combine_dweight(x_TD, grad_WLCD, expert_TK, slot_TK)
        grad_weight = grad_weight.to(weight_TK.dtype)
    return grad_x, None, None, grad_weight, None, None, None


dispatch.register_autograd(_backward, setup_context=_setup_context)
