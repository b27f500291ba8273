"""Several PEs in one process: the same interface, on one device, without anything that waits."""

from contextlib import closing

import pytest
import torch

from lancet_kernels import UserError
from lancet_kernels.kernels.symmetric import create, virtual_memories

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 5), (0,), (3, 0, 5), ()])
def test_every_pe_has_every_address(device, shape):
    memories = virtual_memories(4, device)
    regions = [memory.allocate("x", shape, torch.bfloat16) for memory in memories]
    addresses = regions[0].peers.tolist()
    assert len(set(addresses)) == 4
    assert not any(address == 0 or address % 16 for address in addresses)
    for rank, (memory, region) in enumerate(zip(memories, regions, strict=True)):
        assert (memory.rank, memory.world, memory.device.type) == (rank, 4, device)
        assert (region.local.shape, region.local.dtype) == (shape, torch.bfloat16)
        assert region.peers.device == region.local.device
        assert region.peers.tolist() == addresses
        assert 0 in shape or region.local.data_ptr() == addresses[rank]
        assert not region.local.any()
        memory.barrier()


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


def test_one_rank_is_a_virtual_pe():
    with closing(create()) as memory:
        assert (memory.rank, memory.world) == (0, 1)
        assert memory.reason == "virtual: one PE: no peers, on cpu"
        assert memory.allocate("x", (4,), torch.float32).peers.shape == (1,)
