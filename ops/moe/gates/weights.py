"""From logits to scores, of which gates make weights (`Gate.weights`).

Normalized scores are computed as the softmax of the log-scores, which is the same and has no zero to divide
by where all scores of a token underflow. The log-score of the softmax is the logit itself (up to a constant
that cancels), so "softmax after selection" is the normalized case.
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
