"""The router: logits of all experts in float32, the gate that chooses experts and slots by them, its losses.

    T  tokens on this rank      D  width      E  experts in all
    K  choices per token        C  capacity

A product of two 16-bit numbers is exact in float32, so what counts is that sums of the logits' GEMM are
float32. A few thousand tokens are converted at a time, in the backward again: the tokens are saved as they
are, 2 T D bytes that other ops save anyway, where linear(x.float(), w.float()) saves 4 T D more.

Experts, slots and weights come from one op for all gates, because the planner moves and cuts a gate as a
whole. To route part by part, pass the result `used'` of a part as `used` of the next.

Losses depend on the whole batch. Load balance (Switch, Fedus et al. 2022, equation 4): E * sum_e f_e * P_e,
with f_e the share of assignments that went to expert e (dropped ones included) and P_e the mean router
probability. z-loss (ST-MoE, Zoph et al. 2022): mean of logsumexp(logits)^2. Both are products or means of
sums, so parts and ranks add their sums first and apply the formula once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lancet_kernels.ops.base import op
from lancet_kernels.ops.comm.groups import group_of
from lancet_kernels.ops.comm.waiting import waiting
from lancet_kernels.ops.moe.gate import Gate, slots_in_token_order
from lancet_kernels.ops.moe.gates import parse_gate

TOKENS_AT_ONCE = 4096


def router_logits(x_TD: Tensor, router_ED: Tensor) -> Tensor:
    """-> [T, E] in float32, in float64 for a float64 router; autocast does not apply.

    A captured graph shows linear on converted tokens, for which there are rules.
    """
    with torch.autocast(x_TD.device.type, enabled=False):
        is_16_bit = x_TD.dtype.itemsize == 2 and router_ED.dtype != torch.float64
        if is_16_bit and not torch.compiler.is_compiling():
            return _RouterLogits.apply(x_TD, router_ED)
        dtype = torch.promote_types(router_ED.dtype, torch.float32)
        return nn.functional.linear(x_TD.to(dtype), router_ED.to(dtype))


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, router_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, router_ED)
        w_ED = router_ED.float()
        logits_TE = w_ED.new_empty(x_TD.shape[0], w_ED.shape[0])
        pairs = zip(x_TD.split(TOKENS_AT_ONCE), logits_TE.split(TOKENS_AT_ONCE), strict=True)
        for x, logits in pairs:
            torch.mm(x.float(), w_ED.t(), out=logits)
        return logits_TE

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, router_ED = ctx.saved_tensors
        w_ED = router_ED.float()
        needs_x, needs_w = ctx.needs_input_grad
        dx_TD = torch.empty_like(x_TD) if needs_x else None
        dw_ED = torch.zeros_like(w_ED) if needs_w else None
        with torch.autocast(x_TD.device.type, enabled=False):
            for first in range(0, x_TD.shape[0], TOKENS_AT_ONCE):
                part = slice(first, first + TOKENS_AT_ONCE)
                if dx_TD is not None:
                    dx_TD[part] = grad_TE[part] @ w_ED
                if dw_ED is not None:
                    dw_ED += grad_TE[part].t() @ x_TD[part].float()
        return dx_TD, None if dw_ED is None else dw_ED.to(router_ED.dtype)


@op("lancet::gate")
def gate(
    logits_TE: Tensor | None,
    used_E: Tensor,
    key_T: Tensor | None,
    bias_E: Tensor | None,
    spec: str,
    top_k: int,
    capacity: int,
    real_T1: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Route T tokens.

    Args:
        logits_TE: router output, float32 or float64; None for gates without a router.
        used_E: int64, slots of each expert used by earlier parts of this batch (zeros for a whole batch).
        key_T: int64, token ids or global token indices, for keyed gates; else None.
        bias_E: selection bias, for the sigmoid gate; else None.
        spec: the gate with its options. capacity: C, in slots per expert.
        real_T1: bool, which tokens are no padding; None: all. Padding is dropped, and counts for no expert.
    Returns:
        expert_TK int64, slot_TK int64 (>= C: dropped), weight_TK (dtype of the logits), used'_E int64.
    NaN or infinity among the logits is no error: the token goes to some experts, all different, with a weight
    that is not finite either, so that it reaches the loss and the gradients.
    """
    chosen = parse_gate(spec)
    expert_TK = chosen.select(logits_TE, key_T, bias_E, used_E.numel(), top_k)
    expert_TK = chosen.checked(expert_TK, used_E.numel(), top_k)
    slot_TK, used_out_E = chosen.assign_slots(logits_TE, expert_TK, used_E, capacity, real_T1)
    weight_TK = chosen.weights(logits_TE, expert_TK, torch.float32)
    return expert_TK, slot_TK, weight_TK, used_out_E


@gate.register_fake
def _(logits_TE, used_E, key_T, bias_E, spec, top_k, capacity, real_T1=None):
    tokens = logits_TE if logits_TE is not None else key_T
    num_choices = parse_gate(spec).num_choices(used_E.shape[0], top_k)
    expert_TK = used_E.new_empty(tokens.shape[0], num_choices)
    dtype = torch.float32 if logits_TE is None else logits_TE.dtype
    weight_TK = torch.empty_like(expert_TK, dtype=dtype)
    return expert_TK, torch.empty_like(expert_TK), weight_TK, torch.empty_like(used_E)


@op("lancet::gate_backward", like="logits_TE")
def gate_backward(grad_TK: Tensor, logits_TE: Tensor, expert_TK: Tensor, spec: str) -> Tensor:
    """Gradient of the logits, [T, E], from the gradient of the weights, [T, K]."""
    return parse_gate(spec).weights_backward(grad_TK, logits_TE, expert_TK).contiguous()


def _setup_context(ctx, inputs: Sequence, output: Sequence) -> None:
    logits_TE, _used_E, _key_T, _bias_E, spec, *_ = inputs
    expert_TK, slot_TK, _weight_TK, used_out_E = output
    ctx.mark_non_differentiable(expert_TK, slot_TK, used_out_E)
    ctx.save_for_backward(logits_TE, expert_TK)
    ctx.spec = spec


def _backward(ctx, _grad_expert, _grad_slot, grad_weight_TK, _grad_used):
    logits_TE, expert_TK = ctx.saved_tensors
    grad_TE = None
    if logits_TE is not None and ctx.needs_input_grad[0]:
        grad_TE = gate_backward(grad_weight_TK, logits_TE, expert_TK, ctx.spec)
    return grad_TE, None, None, None, None, None, None, None


gate.register_autograd(_backward, setup_context=_setup_context)


@op("lancet::assign_slots", is_own_fake=True)
def assign_slots(expert_TK: Tensor, used_E: Tensor, real_T1: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Slots of choices that a router outside of this library has made, by order of tokens.

    Example: expert = [[2, 0], [2, 1]], used = [5, 0, 1] -> slot = [[1, 5], [2, 0]], used' = [6, 1, 3].

    Args: expert_TK int64. used_E, real_T1: as of `gate`.
    Returns: slot_TK int64 (>= the capacity: dropped), used'_E int64.
    """
    return slots_in_token_order(expert_TK, used_E, real_T1)


class RoutingSums(NamedTuple):
    """Contributions of a part of a batch to the whole-batch losses of a layer; `plus` adds two of them."""

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
    total = sum_over_ranks(torch.stack(counts), group)
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


@op("lancet::sum_over_ranks", like="counts")
def sum_over_ranks(counts: Tensor, group: str) -> Tensor:
    """The sum of an integer tensor over the ranks of the group; no gradient."""
    total = counts.clone(memory_format=torch.contiguous_format)
    if group:
        process_group = group_of(group)
        with waiting("sum_over_ranks", process_group):
            dist.all_reduce(total, group=process_group)
    return total
