"""Groups by name, on one rank: without torch.distributed, and with a group of one."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from lancet_kernels import ops
from lancet_kernels.ops.comm.groups import group_device, group_name, group_of, group_rank, group_size


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
