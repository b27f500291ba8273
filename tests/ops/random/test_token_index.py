"""Indices of this rank's tokens: against a list, and the same graph on every rank."""

import torch

from lancet_kernels.ops import token_index
from lancet_kernels.ops.comm.groups import group_name

TOKENS = [3, 0, 2]


def indices_on_rank() -> tuple[list[int], int]:
    group, rank = group_name(None), torch.distributed.get_rank()
    index = token_index(TOKENS[rank], group, torch.device("cpu"))
    first = token_index(3, group, torch.device("cpu"), equal_ranks=True)
    assert first.tolist() == list(range(3 * rank, 3 * rank + 3))
    torch.library.opcheck(torch.ops.lancet.token_index.default, (3, group, torch.device("cpu")))
    return index.tolist(), index.dtype == torch.int64


def test_every_rank_has_its_own(pool):
    assert pool.run(indices_on_rank, ranks=3) == [([0, 1, 2], True), ([], True), ([3, 4], True)]


def test_one_process():
    assert token_index(2, "", torch.device("cpu")).tolist() == [0, 1]
