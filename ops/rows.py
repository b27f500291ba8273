"""Which rows of a [W, L, C, D] buffer are real? The first counts[w, l] of each (w, l).

    W  ranks      L  experts on each      C  capacity      R  real rows

Compact form: the real rows alone, [R, D], in the order that the reader wants.
"""

import torch
from torch import Tensor


def real_rows_by_rank(count_WL: Tensor, capacity: int) -> Tensor:
    """Indices of the real rows in the flat buffer [W * L * C], by rank, then expert: the order on the wire.

    Example: C = 3, counts = [[1, 2], [0, 3]] -> [0, 3, 4, 9, 10, 11].
    """
    slot_C = torch.arange(capacity, device=count_WL.device)
    return (slot_C < count_WL[..., None]).reshape(-1).nonzero().view(-1)


def real_rows_by_expert(count_WL: Tensor, capacity: int) -> Tensor:
    """The same rows, by expert, then rank: the order of a grouped GEMM.

    Example: C = 3, counts = [[1, 2], [0, 3]] -> [0, 3, 4, 9, 10, 11] with L = 2 becomes
    expert 0: [0], expert 1: [3, 4, 9, 10, 11].
    """
    ranks, local_experts = count_WL.shape
    slot_C = torch.arange(capacity, device=count_WL.device)
    real_LWC = (slot_C < count_WL[..., None]).transpose(0, 1)
    flat_WLC = torch.arange(ranks * local_experts * capacity, device=count_WL.device)
    return flat_WLC.view(ranks, local_experts, capacity).transpose(0, 1)[real_LWC]


def compact(buffer_WLCD: Tensor, row_R: Tensor) -> Tensor:
    """-> [R, D], the rows named by `row_R`."""
    return buffer_WLCD.reshape(-1, buffer_WLCD.shape[-1]).index_select(0, row_R)


def expand(rows_RD: Tensor, row_R: Tensor, shape_WLC: tuple[int, int, int]) -> Tensor:
    """-> [W, L, C, D], the rows put back to where `row_R` names, zero elsewhere."""
    width = rows_RD.shape[-1]
    buffer = rows_RD.new_zeros(shape_WLC[0] * shape_WLC[1] * shape_WLC[2], width)
    buffer.index_copy_(0, row_R, rows_RD)
    return buffer.view(*shape_WLC, width)
