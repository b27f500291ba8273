"""Which rows of a [W, L, C, D] buffer are real? The first counts[w, l] of each (w, l).

    W  ranks      L  experts on each      C  capacity      R  real rows

Compact form: the real rows alone, [R, D], in the order that the reader wants.

On the CPU the real rows of each (w, l) are one block of memory (`blocks`), which ops work on where it lies:
copying rows to and fro costs as much as a small matrix product.
"""

from collections.abc import Iterator

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


Block = tuple[int, int, int]
"""(rank, local expert, how many rows are real)"""


def blocks(count_WL: Tensor) -> list[Block]:
    """All of them, by rank, then expert: the order on the wire."""
    return [(w, e, n) for w, row in enumerate(count_WL.tolist()) for e, n in enumerate(row)]


def clear_padding(buffer_WLCD: Tensor, of: list[Block]) -> Tensor:
    """The buffer itself, zero where rows are not real."""
    for w, e, n in of:
        buffer_WLCD[w, e, n:].zero_()
    return buffer_WLCD


def pack(buffer_WLCD: Tensor, count_WL: Tensor) -> Tensor:
    """-> [R, D], the real rows in the order on the wire."""
    if buffer_WLCD.device.type != "cpu":
        return compact(buffer_WLCD, real_rows_by_rank(count_WL, buffer_WLCD.shape[2]))
    return torch.cat([buffer_WLCD[w, e, :n] for w, e, n in blocks(count_WL)])


def unpack(rows_RD: Tensor, count_WL: Tensor, capacity: int) -> Tensor:
    """-> [W, L, C, D]: what `pack` made, back in its places; zero elsewhere."""
    shape_WLC = (*count_WL.shape, capacity)
    if rows_RD.device.type != "cpu":
        return expand(rows_RD, real_rows_by_rank(count_WL, capacity), shape_WLC)
    buffer_WLCD = rows_RD.new_empty(*shape_WLC, rows_RD.shape[1])
    found = blocks(count_WL)
    for (w, e, n), rows_ND in zip(found, _pieces(rows_RD, found), strict=True):
        buffer_WLCD[w, e, :n] = rows_ND
    return clear_padding(buffer_WLCD, found)


def _pieces(rows_RD: Tensor, of: list[Block]) -> Iterator[Tensor]:
    begin = 0
    for _, _, n in of:
        yield rows_RD[begin : begin + n]
        begin += n
