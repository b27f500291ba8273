"""How many rows of each expert are really sent? What the gate assigned, up to the capacity.

An op of its own because a batch that is cut into parts has other counts in every part: the planner
replaces it.
"""

import torch
from torch import Tensor


def naive_kept_counts(used_E: Tensor, capacity: int, ranks: int) -> Tensor:
    """Reference, one expert after the other."""
    kept = [min(int(used), capacity) for used in used_E]
    return torch.tensor(kept, dtype=torch.int64).view(ranks, -1)


@torch.library.custom_op("lancet::kept_counts", mutates_args=())
def kept_counts(used_E: Tensor, capacity: int, ranks: int) -> Tensor:
    """-> [W, L] int64: min(used, capacity) of expert l on rank w, for a batch that began with no slot used.

    Args: used_E: int64, the gate's `used'` (dropped assignments included).
    """
    return used_E.clamp(max=capacity).view(ranks, -1)


@kept_counts.register_fake
def _(used_E, capacity, ranks):
    return used_E.new_empty(ranks, used_E.shape[0] // ranks)
