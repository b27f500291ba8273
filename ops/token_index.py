"""Which tokens of the global batch does this rank have? Their indices, as an op.

    T  tokens on each rank

An op of its own, so that every rank captures the same graph: the rank is looked up when it runs.
"""

import torch
from torch import Tensor

from lancet_kernels.ops.groups import group_rank


def naive_token_index(num_tokens: int, rank: int) -> Tensor:
    """Reference: a list."""
    return torch.tensor([rank * num_tokens + t for t in range(num_tokens)], dtype=torch.int64)


@torch.library.custom_op("lancet::token_index", mutates_args=())
def token_index(num_tokens: int, group: str, device: torch.device) -> Tensor:
    """-> [T] int64: this rank's place in the group times T, and the T - 1 numbers behind it.

    Args: group: a name from `group_name`. Example: T = 3 on rank 1 gives [3, 4, 5].
    """
    first = group_rank(group) * num_tokens
    return torch.arange(first, first + num_tokens, device=device)


@token_index.register_fake
def _(num_tokens, group, device):
    return torch.empty(num_tokens, dtype=torch.int64, device=device)
