"""Which tokens of the global batch does this rank have? Their indices, as an op.

    T  tokens on this rank; each rank may have another number of them

An op of its own, so that every rank captures the same graph: the rank is looked up when it runs.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.ops.comm.groups import group_device, group_of, group_rank, group_size
from lancet_kernels.ops.registration import op


@op("lancet::token_index")
def token_index(num_tokens: int, group: str, device: torch.device, equal_ranks: bool = False) -> Tensor:
    """-> [T] int64: how many tokens the ranks before this one have, and the T - 1 numbers behind that.

    Collective: ranks tell each other how many tokens they have.

    Args:
        group: a name from `group_name`.
        equal_ranks: assume that all ranks have T tokens, without communication. If they have not, two
            tokens may get the same index.
    Example: 2 tokens on rank 0, T = 3 on rank 1 gives [2, 3, 4].
    """
    index_T = torch.arange(num_tokens, device=device)
    if not group:
        return index_T
    if equal_ranks:
        return index_T + group_rank(group) * num_tokens
    own = torch.tensor([num_tokens], device=group_device(group))
    tokens_W = own.new_empty(group_size(group))
    dist.all_gather_into_tensor(tokens_W, own, group=group_of(group))
    return index_T + tokens_W[: group_rank(group)].sum().to(device)


@token_index.register_fake
def _(num_tokens, group, device, equal_ranks=False):
    return torch.empty(num_tokens, dtype=torch.int64, device=device)
