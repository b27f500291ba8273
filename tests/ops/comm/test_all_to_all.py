"""The all-to-all of one rank, and groups of none and of one: nobody to talk to, yet the same contract."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.all_to_all import _COUNTS, _check_headers, start_all_to_all
from lancet_kernels.ops.comm.groups import group_device, group_name, group_of, group_rank, group_size
from tests.ops.op_cases import QUICK, SEEDS, counts, generator, transposed_in_memory, with_gaps

COUNTS = torch.tensor([[0, 3, 1]])


class FakeGroup:
    """What error messages ask a process group."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3


def rows_of(count_WL: Tensor, seed: int = 0) -> Tensor:
    return torch.randn(int(count_WL.sum()), 5, dtype=torch.float64, generator=generator(seed))


@QUICK
@given(count=counts(), to_experts=st.booleans(), seed=SEEDS)
def test_one_rank_gets_its_own_rows(count: Tensor, to_experts: bool, seed: int) -> None:
    count = count[:1]
    for relayout in (torch.clone, with_gaps, transposed_in_memory):
        rows, layout = relayout(rows_of(count, seed)), relayout(count)
        assert torch.equal(ops.all_to_all(rows, layout, layout, "", to_experts), rows)
        assert start_all_to_all(rows, layout, layout, "", to_experts).wait() is rows
        assert torch.equal(ops.exchange_counts(layout, 5, torch.float64, ""), count)


def test_results_are_copies() -> None:
    """A custom op must not hand its input back: writing to one would change the other."""
    assert ops.exchange_counts(COUNTS, 5, torch.float32, "").data_ptr() != COUNTS.data_ptr()
    rows = rows_of(COUNTS)
    assert ops.all_to_all(rows, COUNTS, COUNTS, "", True).data_ptr() != rows.data_ptr()


def test_gradcheck() -> None:
    rows = rows_of(COUNTS).requires_grad_()
    torch.autograd.gradcheck(lambda b: ops.all_to_all(b, COUNTS, COUNTS, "", True), rows)


@pytest.mark.parametrize("relayout", [torch.clone, transposed_in_memory])
def test_opcheck(relayout) -> None:
    count = relayout(COUNTS)
    rows = relayout(rows_of(COUNTS)).clone().requires_grad_()
    torch.library.opcheck(torch.ops.lancet.all_to_all.default, (rows, count, count, "", True))
    torch.library.opcheck(torch.ops.lancet.exchange_counts.default, (count, 5, torch.bfloat16, ""))


def test_ranks_that_disagree_are_named() -> None:
    same = [_COUNTS, 5, 0, 2, 7, 0]
    _check_headers([same, same, same], FakeGroup())
    with pytest.raises(UserError, match=r"got \(5, 'float32', 2\) on rank 1 and \(5, 'bfloat16', 2\)"):
        _check_headers([same, same, [_COUNTS, 5, 2, 2, 7, 0]], FakeGroup())
    with pytest.raises(UserError, match="on rank 1, another one on rank 2"):
        _check_headers([same, same, [_COUNTS, 5, 0, 2, 8, 0]], FakeGroup())
    with pytest.raises(UserError, match=r"rank\(s\) 0 running without the plan, others with it"):
        _check_headers([same, [*same[:-1], 1], [*same[:-1], 1]], FakeGroup())
    # A rank that runs a backward sends rows, which may be as large.
    with pytest.raises(UserError, match=r"got another collective of rank\(s\) 2.*LANCET_CHECK=1"):
        _check_headers([same, same, [3, 1, 4, 1, 5, 9]], FakeGroup())


# ---- groups by name


@pytest.fixture
def group_of_one() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_without_torch_distributed() -> None:
    assert not dist.is_initialized()
    assert group_name(None) == ""
    assert (group_size(""), group_rank("")) == (1, 0)


def test_ops_over_a_named_group_of_one(group_of_one: dist.ProcessGroup) -> None:
    """The path of many ranks with one: headers, splits and pending work, checked against the short cut."""
    assert group_name(None) == group_name(group_of_one) == "", "a group of one needs no communication"
    name = group_of_one.group_name
    assert group_of(name) is group_of_one
    assert (group_size(name), group_rank(name), group_device(name).type) == (1, 0, "cpu")
    count_WL = torch.tensor([[2, 0, 1]])
    rows = torch.randn(3, 4)
    received_WL = ops.exchange_counts(count_WL, 4, torch.float32, name)
    assert torch.equal(received_WL, count_WL)
    assert torch.equal(ops.all_to_all(rows, count_WL, received_WL, name, True), rows)
    assert torch.equal(ops.sum_over_ranks(count_WL, name), count_WL)
