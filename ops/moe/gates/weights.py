"""From logits to the weight of each choice, and the gradient back.

    s = softmax(logits) or sigmoid(logits)        [T, E]
    w = s[t, expert[t, k]]                        [T, K]
    w = w / sum_k w        (if normalized)
    w = w * scale

Normalized weights are computed as the softmax of the chosen log-scores, which is the same and has no
zero to divide by where all scores of a token underflow. The log-score of the softmax is the logit itself
(up to a constant that cancels), so "softmax after selection" is the normalized case.
Gates without a router have w = 1 / K.
The gradients are written out, because the gate is one op to autograd and to the planner.
"""

import torch
from torch import Tensor


def sigmoid(logits: Tensor) -> Tensor:
    """1 / (1 + exp(-logits)), bitwise the same for equal logits at any position in the tensor.

    torch.sigmoid on a CPU is not: it uses another exp, which differs by an ulp, for the end of a tensor that
    does not fill a vector register. The routing of a part of a batch would then differ from that of the
    whole.
    """
    return 1 / (1 + torch.exp(-logits))


def scores(logits_TE: Tensor, score: str) -> Tensor:
    """softmax or sigmoid of the logits, [T, E]."""
    return torch.softmax(logits_TE, -1) if score == "softmax" else sigmoid(logits_TE)


def normalized_scores(logits_TN: Tensor, score: str) -> Tensor:
    """The scores divided by their sum over the last dimension; never NaN for finite logits."""
    log_TN = logits_TN if score == "softmax" else torch.nn.functional.logsigmoid(logits_TN)
    return torch.softmax(log_TN, -1)


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
    if normalized:
        return normalized_scores(logits_TE.gather(1, expert_TK), score) * scale
    return scores(logits_TE, score).gather(1, expert_TK) * scale


def choice_weights_backward(
    grad_TK: Tensor, logits_TE: Tensor, expert_TK: Tensor, score: str, normalized: bool, scale: float
) -> Tensor:
    """Gradient of the logits, [T, E], for `grad_TK` = gradient of `choice_weights`."""
    grad_TK = grad_TK * scale
    grad_TE = logits_TE.new_zeros(logits_TE.shape)
    if normalized:
        # w = softmax(log s), so d log s = w * (dw - sum_k dw * w); of the sigmoid, d log s / d logit = 1 - s
        chosen_TK = logits_TE.gather(1, expert_TK)
        weight_TK = normalized_scores(chosen_TK, score)
        grad_TK = weight_TK * (grad_TK - (grad_TK * weight_TK).sum(-1, keepdim=True))
        if score == "sigmoid":
            grad_TK = grad_TK * sigmoid(-chosen_TK)
        return grad_TE.scatter_add_(1, expert_TK, grad_TK)
    score_TE = scores(logits_TE, score)
    grad_TE.scatter_add_(1, expert_TK, grad_TK)
    if score == "softmax":
        return score_TE * (grad_TE - (grad_TE * score_TE).sum(-1, keepdim=True))
    return grad_TE * score_TE * (1 - score_TE)
