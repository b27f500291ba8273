"""The all-to-all of one rank: nobody to talk to, yet the same contract."""

import pytest
import torch
from hypothesis import given
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.ops.all_to_all import _check_headers, start_all_to_all
from tests.ops.op_cases import QUICK, SEEDS, counts, generator, poisoned, transposed_in_memory, with_gaps

COUNTS = torch.tensor([[0, 3, 1], [2, 0, 4]])


class FakeGroup:
    """What error messages ask a process group."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3


def buffer_of(count_WL: Tensor, capacity: int, seed: int = 0) -> Tensor:
    return torch.randn(*count_WL.shape, capacity, 5, dtype=torch.float64, generator=generator(seed))


@QUICK
@given(case=counts(), seed=SEEDS)
def test_one_rank_gets_its_own_real_rows(case: tuple[Tensor, int], seed: int) -> None:
    count, capacity = case
    expected = torch.nan_to_num(poisoned(buffer_of(count, capacity, seed), count), 0.0)
    for relayout in (torch.clone, with_gaps, transposed_in_memory):
        buffer, layout = relayout(buffer_of(count, capacity, seed)), relayout(count)
        assert torch.equal(ops.all_to_all(buffer, layout, layout, ""), expected)
        assert torch.equal(start_all_to_all(buffer, layout, layout, "").wait(), expected)
        assert torch.equal(ops.exchange_counts(layout, capacity, 5, torch.float64, ""), count)


def test_the_buffer_may_be_reused_at_once() -> None:
    buffer = buffer_of(COUNTS, 4)
    expected = ops.all_to_all(buffer, COUNTS, COUNTS, "")
    pending = start_all_to_all(buffer, COUNTS, COUNTS, "")
    buffer.fill_(torch.nan)
    assert torch.equal(pending.wait(), expected)


@QUICK
@given(case=counts())
def test_padding_is_not_read(case: tuple[Tensor, int]) -> None:
    count, capacity = case
    results = []
    for spoil in (lambda buffer, _: buffer, poisoned):
        leaf = spoil(buffer_of(count, capacity), count).clone().requires_grad_()
        out = ops.all_to_all(leaf, count, count, "")
        grad = spoil(buffer_of(count, capacity, 1), count)
        results.append((out, *torch.autograd.grad(out, leaf, grad)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_counts_are_a_copy() -> None:
    """A custom op must not hand its input back: writing to one would change the other."""
    received = ops.exchange_counts(COUNTS, 4, 5, torch.float32, "")
    assert received.data_ptr() != COUNTS.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_travel_bit_for_bit(dtype: torch.dtype) -> None:
    buffer = buffer_of(COUNTS, 4).to(dtype)
    out = ops.all_to_all(buffer, COUNTS, COUNTS, "")
    assert out.dtype == dtype
    assert torch.equal(out, torch.nan_to_num(poisoned(buffer, COUNTS), 0.0))


def test_gradcheck() -> None:
    buffer = buffer_of(COUNTS, 4).requires_grad_()
    torch.autograd.gradcheck(lambda b: ops.all_to_all(b, COUNTS, COUNTS, ""), buffer)


@pytest.mark.parametrize("relayout", [torch.clone, transposed_in_memory])
def test_opcheck(relayout) -> None:
    count = relayout(COUNTS)
    buffer = relayout(buffer_of(COUNTS, 4)).clone().requires_grad_()
    torch.library.opcheck(ops.all_to_all, (buffer, count, count, ""))
    torch.library.opcheck(ops.exchange_counts, (count, 4, 5, torch.bfloat16, ""))


def test_ranks_that_disagree_are_named() -> None:
    same = [8, 5, 0, 2]
    _check_headers([same, same, same], FakeGroup())
    with pytest.raises(UserError, match=r"got \(8, 5, 'float32', 2\) on rank 1 and \(9, 5, 'bfloat16', 2\)"):
        _check_headers([same, same, [9, 5, 2, 2]], FakeGroup())
