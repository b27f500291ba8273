"""How many rows of each expert are sent, and the index of each kept choice's row among them.

    T  tokens on this rank      W  ranks, L experts on each, e = w * L + l
    K  choices per token

Computed once per layer; dispatch, combine and their gradients read it. Ops of their own because a batch that
is cut into parts has other counts in every part: the planner replaces them.
"""

import torch
from torch import Tensor

from lancet_kernels.ops.moe.rows import DROPPED
from lancet_kernels.ops.registration import op


@op("lancet::kept_counts")
def kept_counts(used_E: Tensor, capacity: int, ranks: int) -> Tensor:
    """-> [W, L] int64: min(used, capacity) of expert l on rank w, for a batch that began with no slot used.

    Args: used_E: int64, the gate's `used'` (dropped assignments included).
    """
    return used_E.clamp(max=capacity).view(ranks, -1)


kept_counts.register_fake(kept_counts.function)


@op("lancet::send_rows", like="expert_TK")
def send_rows(expert_TK: Tensor, slot_TK: Tensor, count_WL: Tensor) -> Tensor:
    """-> [T, K] int64: row indices, sorted by expert, then slot; DROPPED for a slot >= the expert's count.

    Args: expert_TK, slot_TK: int64, from the gate; the slots of an expert are 0, 1, 2, ... without gaps.
    Example: counts = [[1], [2]], expert = [[1, 0], [1, 0]], slot = [[0, 0], [1, 1]] -> [[1, 0], [2, -1]].
    """
    count_E = count_WL.reshape(-1)
    first_E = count_E.cumsum(0) - count_E
    return torch.where(slot_TK < count_E[expert_TK], first_E[expert_TK] + slot_TK, DROPPED)


def choice_of_rows(row_TK: Tensor) -> Tensor:
    """-> [S] int64: the choice t * K + k of each row. Makes the host wait for the number of rows.

    Example: row = [[1, 0], [2, -1]] -> [1, 0, 2].
    """
    row_N = row_TK.reshape(-1)
    choice_S = (row_N >= 0).nonzero().view(-1)
    return torch.empty_like(choice_S).index_copy_(0, row_N[choice_S], choice_S)
