"""The gate as one torch op: which experts, which slots, with what weight.

    T  tokens on this rank      E  experts in all
    K  choices per token        C  capacity

One op for all gates; `spec` names the gate and its options (see ops/gates). Experts, slots and weights are
results of one op, because the planner moves and cuts a gate as a whole. To route part by part, pass the
result `used'` of a part as `used` of the next.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lancet_kernels.ops.moe.gates import parse_gate
from lancet_kernels.ops.registration import op


@op("lancet::gate")
def gate(
    logits_TE: Tensor | None,
    used_E: Tensor,
    key_T: Tensor | None,
    bias_E: Tensor | None,
    spec: str,
    top_k: int,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Route T tokens.

    Args:
        logits_TE: router output, float32 or float64; None for gates without a router.
        used_E: int64, slots of each expert used by earlier parts of this batch (zeros for a whole batch).
        key_T: int64, token ids or global token indices, for keyed gates; else None.
        bias_E: selection bias, for the sigmoid gate; else None.
        spec: the gate with its options. capacity: C, in slots per expert.
    Returns:
        expert_TK int64, slot_TK int64 (>= C: dropped), weight_TK (dtype of the logits), used'_E int64.
    NaN or infinity among the logits is no error: the token goes to some experts, all different, with a weight
    that is not finite either, so that it reaches the loss and the gradients.
    """
    chosen = parse_gate(spec)
    expert_TK = chosen.select(logits_TE, key_T, bias_E, used_E.numel(), top_k)
    slot_TK, used_out_E = chosen.assign_slots(logits_TE, expert_TK, used_E, capacity)
    weight_TK = chosen.weights(logits_TE, expert_TK, torch.float32)
    return expert_TK, slot_TK, weight_TK, used_out_E


@gate.register_fake
def _(logits_TE, used_E, key_T, bias_E, spec, top_k, capacity):
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
    logits_TE, *_, spec, _top_k, _capacity = inputs
    expert_TK, slot_TK, _weight_TK, used_out_E = output
    ctx.mark_non_differentiable(expert_TK, slot_TK, used_out_E)
    ctx.save_for_backward(logits_TE, expert_TK)
    ctx.spec = spec


def _backward(ctx, _grad_expert, _grad_slot, grad_weight_TK, _grad_used):
    logits_TE, expert_TK = ctx.saved_tensors
    grad_TE = None
    if logits_TE is not None and ctx.needs_input_grad[0]:
        grad_TE = gate_backward(grad_weight_TK, logits_TE, expert_TK, ctx.spec)
    return grad_TE, None, None, None, None, None, None


gate.register_autograd(_backward, setup_context=_setup_context)
