"""Assigns a slot to each choice, in a given order of priority.

T tokens, K choices per token, N = T * K choices, E experts
"""

import torch
from torch import Tensor

from lancet_kernels.ops.fused.kernel_path import runs_in_kernels


def slots_in_order(expert_N: Tensor, used_E: Tensor) -> tuple[Tensor, Tensor]:
    """Number the choices of each expert in the order given, starting after `used`.

    Example: expert = [2, 0, 2, 2], used = [5, 0, 1] -> slot = [1, 5, 2, 3], used' = [6, 0, 4].

    Args: expert_N, int64, choices by falling priority; used_E, int64.
    Returns: slot_N and used'_E, int64. Slots may exceed the capacity: those are the dropped ones.
    """
    if runs_in_kernels(expert_N, (torch.int64,)):
        from lancet_kernels.kernels.moe.routing import route_choices

        # Capacity 0, because the tables of the tokens in each slot are not needed here.
        routed = route_choices(expert_N[:, None].contiguous(), used_E, 0)
        return routed.slot_TK[:, 0], routed.used_E
    count_E = torch.bincount(expert_N, minlength=used_E.numel())
    start_E = count_E.cumsum(0) - count_E
    order_N = torch.argsort(expert_N, stable=True)
    sorted_N = expert_N[order_N]
    rank_N = torch.arange(expert_N.numel(), device=expert_N.device) - start_E[sorted_N]
    slot_N = torch.empty_like(expert_N)
    slot_N[order_N] = rank_N + used_E[sorted_N]
    return slot_N, used_E + count_E


def slots_in_token_order(expert_TK: Tensor, used_E: Tensor) -> tuple[Tensor, Tensor]:
    """Earlier tokens first; of one token, its better choice first. -> slot_TK, used'_E."""
    slot_N, used_E = slots_in_order(expert_TK.reshape(-1), used_E)
    return slot_N.view_as(expert_TK), used_E


def slots_in_choice_order(
    expert_TK: Tensor, used_E: Tensor, token_order_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """All first choices before any second choice; inside a choice by `token_order_T` (default: as they come).

    Args: token_order_T, int64: the tokens by falling priority.
    Returns: slot_TK, used'_E.
    """
    ordered_TK = expert_TK if token_order_T is None else expert_TK[token_order_T]
    slot_KT, used_E = slots_in_order(ordered_TK.T.reshape(-1), used_E)
    slot_TK = slot_KT.view(expert_TK.shape[1], expert_TK.shape[0]).T
    if token_order_T is None:
        return slot_TK.contiguous(), used_E
    out_TK = torch.empty_like(expert_TK)
    out_TK[token_order_T] = slot_TK
    return out_TK, used_E


def top_k_stable(score_TE: Tensor, k: int) -> Tensor:
    """Indices of the k largest of each row, best first; of equal scores the lower index wins.

    torch.topk leaves the order of ties open, and a tie that differs between two ranks or two parts is a
    different routing; a stable sort does not.
    """
    if score_TE.ndim == 2 and runs_in_kernels(score_TE, (torch.float32, torch.float64)):
        from lancet_kernels.kernels.moe.topk import choose_by_score

        return choose_by_score(score_TE.contiguous(), k)[0]
    if k == 1:
        return score_TE.argmax(-1, keepdim=True)
    return torch.sort(score_TE, dim=-1, descending=True, stable=True).indices[..., :k].contiguous()
