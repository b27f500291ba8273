"""How many rows of each expert are really sent? What the gate assigned, up to the capacity.

An op of its own because a batch that is cut into parts has other counts in every part: the planner
replaces it.
"""

from torch import Tensor

from lancet_kernels.ops.registration import op


@op("lancet::kept_counts")
def kept_counts(used_E: Tensor, capacity: int, ranks: int) -> Tensor:
    """-> [W, L] int64: min(used, capacity) of expert l on rank w, for a batch that began with no slot used.

    Args: used_E: int64, the gate's `used'` (dropped assignments included).
    """
    return used_E.clamp(max=capacity).view(ranks, -1)


@kept_counts.register_fake
def _(used_E, capacity, ranks):
    return used_E.new_empty(ranks, used_E.shape[0] // ranks)
