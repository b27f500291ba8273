"""From logits to the weight of each choice, and the gradient back.

    s = softmax(logits) or sigmoid(logits)        [T, E]
    w = s[t, expert[t, k]]                        [T, K]
    w = w / sum_k w        (if normalized)
    w = w * scale

Softmax over the chosen logits alone equals the normalized softmax over all, so "softmax after
selection" is the normalized case. Gates that learn nothing have w = 1 / K.
The gradients are written out, because the gate is one op to autograd and to the planner.
"""

import torch
from torch import Tensor


def scores(logits_TE: Tensor, score: str) -> Tensor:
    """softmax or sigmoid of the logits, [T, E]."""
    return torch.softmax(logits_TE, -1) if score == "softmax" else torch.sigmoid(logits_TE)


def choice_weights(
    logits_TE: Tensor | None,
    expert_TK: Tensor,
    score: str,
    normalized: bool,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """The weight of each choice, [T, K], in the dtype of the logits (or `dtype` where there are none)."""
    if logits_TE is None:
        return torch.full(expert_TK.shape, 1.0 / expert_TK.shape[1], dtype=dtype, device=expert_TK.device)
    weight_TK = scores(logits_TE, score).gather(1, expert_TK)
    if normalized:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return weight_TK * scale


def choice_weights_backward(
    grad_TK: Tensor, logits_TE: Tensor, expert_TK: Tensor, score: str, normalized: bool, scale: float
) -> Tensor:
    """Gradient of the logits, [T, E], for `grad_TK` = gradient of `choice_weights`."""
    score_TE = scores(logits_TE, score)
    chosen_TK = score_TE.gather(1, expert_TK)
    grad_TK = grad_TK * scale
    if normalized:
        # w = s / S with S = sum_k s, so ds = (dw - sum_k dw * w) / S
        total_T1 = chosen_TK.sum(-1, keepdim=True)
        weight_TK = chosen_TK / total_T1
        grad_TK = (grad_TK - (grad_TK * weight_TK).sum(-1, keepdim=True)) / total_T1
    grad_TE = torch.zeros_like(score_TE).scatter_add_(1, expert_TK, grad_TK)
    if score == "softmax":
        return score_TE * (grad_TE - (grad_TE * score_TE).sum(-1, keepdim=True))
    return grad_TE * score_TE * (1 - score_TE)
