"""Losses of the router that depend on the whole batch, as sums that add up over parts and ranks.

    T  tokens      E  experts

Load balance (Switch, Fedus et al. 2022, equation 4): E * sum_e f_e * P_e, with f_e the share of
assignments that went to expert e (dropped ones included) and P_e the mean router probability. z-loss
(ST-MoE, Zoph et al. 2022): mean of logsumexp(logits)^2. Both are products or means of sums, so parts and
ranks add their sums first and apply the formula once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.ops.comm.groups import group_of
from lancet_kernels.ops.comm.waiting import waiting
from lancet_kernels.ops.moe.gates.base import Gate


class RoutingSums(NamedTuple):
    """What one part of a batch contributes to the whole-batch losses of a layer; `plus` adds two of them."""

    assigned_E: Tensor
    """int64: assignments of each expert, dropped ones included."""
    kept_E: Tensor
    """int64: assignments that got a slot."""
    probability_E: Tensor
    """Sum of the router probabilities over the tokens; carries the gradient."""
    square_logsumexp: Tensor
    """Sum of logsumexp(logits)^2 over the tokens; carries the gradient."""
    tokens: Tensor
    """int64: how many tokens, without padding."""

    def plus(self, other: RoutingSums) -> RoutingSums:
        """The sums of two parts of one batch."""
        return RoutingSums(*(a + b for a, b in zip(self, other, strict=True)))


def routing_sums(
    gate: Gate,
    logits_TE: Tensor | None,
    used_before_E: Tensor,
    used_E: Tensor,
    capacity: int,
    num_tokens: int,
    real_T1: Tensor | None = None,
) -> RoutingSums:
    """The sums of one part: plain torch, differentiable in the logits (zero for gates without a
    router).

    Args: real_T1: bool, which tokens are no padding, and count; None: all.
    """
    assigned_E = used_E - used_before_E
    kept_E = used_E.clamp(max=capacity) - used_before_E.clamp(max=capacity)
    if logits_TE is None:
        probability_E = torch.zeros_like(used_E, dtype=torch.float32)
        square = probability_E.sum()
    else:
        padding_T1 = None if real_T1 is None else ~real_T1
        probability_TE = gate.probabilities(logits_TE)
        if padding_T1 is not None:
            probability_TE = probability_TE.masked_fill(padding_T1, 0)
        probability_E = probability_TE.sum(0)
        square_T = torch.logsumexp(logits_TE, -1).square()
        if padding_T1 is not None:
            square_T = square_T.masked_fill(padding_T1.squeeze(1), 0)
        square = square_T.sum()
    if real_T1 is None:
        tokens = torch.full((), num_tokens, dtype=torch.int64, device=used_E.device)
    else:
        tokens = real_T1.sum()
    return RoutingSums(assigned_E, kept_E, probability_E, square, tokens)


class MoELosses(NamedTuple):
    """Losses and statistics of several layers, [layers] each unless said otherwise."""

    balance: Tensor
    """Load-balance loss, 1 when perfectly balanced. Its mean over the ranks is the loss of the global
    batch."""
    z: Tensor
    """z-loss; its mean over the ranks is the loss of the global batch."""
    dropped: Tensor
    """Share of assignments without a slot, over all ranks."""
    assigned: Tensor
    """[layers, E] int64: assignments of each expert, over all ranks."""


def moe_losses(sums: list[RoutingSums], group: str) -> MoELosses:
    """Apply the formulas: one small all-reduce of counts for all layers together.

    f_e and the number of tokens come from all ranks, P_e from this one, times the number of ranks: the
    formula is linear in P, so the average over ranks (which the gradient all-reduce takes anyway) is exactly
    the loss of the global batch, however its tokens are spread over the ranks.
    """
    num_experts = sums[0].assigned_E.shape[0]
    # Summed up, the ones are the number of ranks.
    counts = [
        torch.cat([s.assigned_E, s.kept_E, torch.stack([s.tokens, torch.ones_like(s.tokens)])]) for s in sums
    ]
    total = torch.ops.lancet.sum_over_ranks(torch.stack(counts), group)
    assigned_NE, kept_NE, tokens_N1, ranks_N1 = total.split([num_experts, num_experts, 1, 1], 1)
    tokens_N1 = tokens_N1.clamp(min=1)
    probability_NE = torch.stack([s.probability_E for s in sums]) * ranks_N1 / tokens_N1
    square_N = torch.stack([s.square_logsumexp for s in sums]) * ranks_N1[:, 0] / tokens_N1[:, 0]
    total_N1 = assigned_NE.sum(1, keepdim=True).clamp(min=1)
    share_NE = assigned_NE.to(probability_NE.dtype) / total_N1
    return MoELosses(
        balance=num_experts * (share_NE * probability_NE).sum(1),
        z=square_N,
        dropped=1 - kept_NE.sum(1) / total_N1[:, 0],
        assigned=assigned_NE,
    )


@torch.library.custom_op("lancet::sum_over_ranks", mutates_args=())
def sum_over_ranks(counts: Tensor, group: str) -> Tensor:
    """The sum of an integer tensor over the ranks of the group; no gradient."""
    total = counts.clone()
    if group:
        process_group = group_of(group)
        with waiting("sum_over_ranks", process_group):
            dist.all_reduce(total, group=process_group)
    return total


@sum_over_ranks.register_fake
def _(counts, group):
    return torch.empty_like(counts)
