"""Several PEs in one process: the same interface, on one device, without anything that waits."""

import ctypes

import pytest
import torch

from lancet_kernels import UserError
from lancet_kernels.kernels.symmetric import create, virtual_memories

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_pe_has_every_address(device, dtype):
    memories = virtual_memories(4, device)
    regions = [memory.allocate("x", (3, 5), dtype) for memory in memories]
    addresses = [region.local.data_ptr() for region in regions]
    assert len(set(addresses)) == 4
    for rank, (memory, region) in enumerate(zip(memories, regions, strict=True)):
        assert (memory.rank, memory.world, memory.device.type) == (rank, 4, device)
        assert region.local.shape == (3, 5)
        assert region.local.dtype == dtype
        assert region.peers.dtype == torch.int64
        assert region.peers.device == region.local.device
        assert region.peers.tolist() == addresses
        assert not region.local.view(torch.uint8).any()
        memory.barrier()


def test_puts_are_seen_bitwise():
    regions = [memory.allocate("x", (2, 3), torch.float32) for memory in virtual_memories(2)]
    row = torch.tensor([1.5, -0.0, float("inf")])
    ctypes.memmove(regions[0].peers[1].item() + 12, row.data_ptr(), 12)
    assert torch.equal(regions[1].local.view(torch.int32)[1], row.view(torch.int32))
    assert not regions[0].local.any()


@pytest.mark.parametrize("shape", [(0,), (3, 0, 5), ()])
def test_shapes_without_and_with_one_element(shape):
    regions = [memory.allocate("x", shape, torch.float32) for memory in virtual_memories(2)]
    assert all(region.local.shape == shape for region in regions)
    assert 0 not in regions[0].peers.tolist()
    assert all(address % 16 == 0 for address in regions[0].peers.tolist())


def test_mismatch_is_named():
    first, second, third = virtual_memories(3)
    first.allocate("x", (4,), torch.float32)
    second.allocate("x", (4,), torch.float32)
    with pytest.raises(UserError) as error:
        third.allocate("x", (4,), torch.float16)
    assert "allocate 'x' [4] float32 (rank 0), allocate 'x' [4] float16 (rank 2)" in str(error.value)
    third.allocate("x", (4,), torch.float32)
    third.allocate("z", (1,), torch.float32)
    with pytest.raises(UserError, match=r"allocate 'y' .* \(rank 0\), allocate 'z' .* \(rank 2\)"):
        first.allocate("y", (1,), torch.float32)


def test_close():
    first, second = virtual_memories(2)
    mine, other = (memory.allocate("x", (4,), torch.int64) for memory in (first, second))
    first.close()
    first.close()
    for use in (
        lambda: mine.local,
        lambda: mine.peers,
        first.barrier,
        lambda: first.allocate("y", (1,), torch.int64),
    ):
        with pytest.raises(UserError, match=r"a call after close\(\)"):
            use()
    # The others' copies and the addresses they know live on.
    ctypes.c_int64.from_address(other.peers[1].item()).value = 7
    assert other.local.tolist() == [7, 0, 0, 0]


def test_one_rank_is_a_virtual_pe():
    with create() as memory:
        assert (memory.rank, memory.world) == (0, 1)
        assert memory.reason == "virtual: one PE: no peers, on cpu"
        assert memory.allocate("x", (4,), torch.float32).peers.shape == (1,)
