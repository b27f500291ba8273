"""Symmetric memory between processes: who puts where, who asked for what, and what is left behind."""

import ctypes
import time

import pytest
import torch
import torch.distributed as dist

from lancet_kernels.symmetric import SharedMemory

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]


def payload(writer: int, reader: int, num_bytes: int) -> bytes:
    """What `writer` puts to `reader`: any rank can work it out."""
    seed = 1000 * writer + reader
    data = torch.randint(0, 256, (num_bytes,), generator=torch.Generator().manual_seed(seed))
    return bytes(data.tolist())


def put_on_rank(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Every rank puts a row to every rank, by address alone. -> what this rank's copy holds then, as bytes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with SharedMemory(timeout_s=10) as memory:
        region = memory.allocate("rows", (world, *shape), dtype)
        assert (memory.rank, memory.world) == (rank, world)
        assert region.local.shape == (world, *shape)
        assert region.local.dtype == dtype
        assert not region.local.view(torch.uint8).any(), "not zero-filled"
        assert region.peers.tolist()[rank] == region.local.data_ptr()
        assert all(address % 16 == 0 for address in region.peers.tolist())
        memory.barrier()  # whoever is ahead would put into what another still looks at
        row = region.local[0].numel() * dtype.itemsize
        for peer, address in enumerate(region.peers.tolist()):
            ctypes.memmove(address + rank * row, payload(rank, peer, row), row)
        memory.barrier()
        return bytes(region.local.view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_puts_are_seen_bitwise(pool, dtype, ranks):
    row = 3 * 5 * dtype.itemsize
    for rank, seen in enumerate(pool.run(put_on_rank, dtype, (3, 5), ranks=ranks)):
        assert seen == b"".join(payload(writer, rank, row) for writer in range(ranks))


def put_while_it_runs_on_rank() -> float:
    """Rank 1 looks at its copy until rank 0 has put, without any call in between. -> seconds that it took."""
    with SharedMemory(timeout_s=10) as memory:
        flag = memory.signals("flag", 1)
        begin = time.monotonic()
        if memory.rank == 0:
            time.sleep(0.2)
            ctypes.c_int64.from_address(flag.peers[1].item()).value = 7
        else:
            while flag.local[0] != 7:
                assert time.monotonic() - begin < 10
        return time.monotonic() - begin


def test_puts_are_seen_while_the_peer_runs(pool):
    assert pool.run(put_while_it_runs_on_rank)[1] > 0.1
