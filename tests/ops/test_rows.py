"""Which rows are real, in the two orders, and there and back."""

import torch
from hypothesis import given
from torch import Tensor

from lancet_kernels.ops.rows import compact, expand, real_rows_by_expert, real_rows_by_rank
from tests.ops.op_cases import QUICK, counts, padding_of, transposed_in_memory


def test_by_hand() -> None:
    """C = 3: rank 0 holds 1 and 2 rows, rank 1 holds 0 and 3."""
    count_WL = torch.tensor([[1, 2], [0, 3]])
    assert real_rows_by_rank(count_WL, 3).tolist() == [0, 3, 4, 9, 10, 11]
    assert real_rows_by_expert(count_WL, 3).tolist() == [0, 3, 4, 9, 10, 11]
    # Both experts of both ranks have rows, so that the two orders differ.
    count_WL = torch.tensor([[1, 2], [2, 0]])
    assert real_rows_by_rank(count_WL, 3).tolist() == [0, 3, 4, 6, 7]
    assert real_rows_by_expert(count_WL, 3).tolist() == [0, 6, 7, 3, 4]


@QUICK
@given(case=counts())
def test_against_loops(case: tuple[Tensor, int]) -> None:
    count_WL, capacity = case
    ranks, local = count_WL.shape

    def rows(w: int, e: int) -> list[int]:
        return [(w * local + e) * capacity + c for c in range(int(count_WL[w, e]))]

    by_rank = [r for w in range(ranks) for e in range(local) for r in rows(w, e)]
    by_expert = [r for e in range(local) for w in range(ranks) for r in rows(w, e)]
    for layout in (count_WL, transposed_in_memory(count_WL)):
        assert real_rows_by_rank(layout, capacity).tolist() == by_rank
        assert real_rows_by_expert(layout, capacity).tolist() == by_expert


@QUICK
@given(case=counts())
def test_there_and_back_keeps_real_rows_and_clears_the_rest(case: tuple[Tensor, int]) -> None:
    count_WL, capacity = case
    buffer_WLCD = torch.arange(1.0, count_WL.numel() * capacity * 3 + 1).view(*count_WL.shape, capacity, 3)
    padding_WLC1 = padding_of(count_WL, capacity)[..., None]
    for row_R in (real_rows_by_rank(count_WL, capacity), real_rows_by_expert(count_WL, capacity)):
        rows_RD = compact(buffer_WLCD, row_R)
        assert rows_RD.shape == (int(count_WL.sum()), 3)
        back_WLCD = expand(rows_RD, row_R, (*count_WL.shape, capacity))
        assert torch.equal(back_WLCD, buffer_WLCD.masked_fill(padding_WLC1, 0))
