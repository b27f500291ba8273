"""Which maker is picked, for which ranks; and what happens when the ranks do not agree on it."""

from contextlib import closing

import torch
import torch.distributed as dist

from lancet_kernels.kernels.symmetric import SharedMemory, create
from tests.refusals import refusal


def create_for_groups_on_rank() -> list:
    """All ranks, then rank 0 and 2 as a group of their own; a region without elements among others."""
    rank, said = dist.get_rank(), []
    pair = dist.new_group([0, 2])
    for group in (None, pair) if rank in (0, 2) else (None,):
        with closing(create(group, timeout_s=10)) as memory:
            assert isinstance(memory, SharedMemory)
            empty = memory.allocate("empty", (3, 0), torch.bfloat16)
            words = memory.allocate("words", (2,), torch.int64)
            assert empty.local.shape == (3, 0)
            assert 0 not in empty.peers.tolist()
            said.append((memory.rank, memory.world, memory.reason, len(words.peers), words.local.tolist()))
            memory.barrier()
    alone = dist.new_group([1])
    if rank == 1:
        with closing(create(alone)) as memory:
            said.append((memory.rank, memory.world, memory.reason, 1, [0, 0]))
    return said


def test_cpu_ranks_share_memory(pool):
    results = pool.run(create_for_groups_on_rank, ranks=3)
    reason = "shared: {} CPU processes of one machine, over POSIX shared memory"
    for rank, said in enumerate(results):
        assert said[0] == (rank, 3, reason.format(3), 3, [0, 0])
    assert results[0][1] == (0, 2, reason.format(2), 2, [0, 0])
    assert results[2][1] == (1, 2, reason.format(2), 2, [0, 0])
    assert results[1][1] == (0, 1, "virtual: one PE: no peers, on cpu", 1, [0, 0])


def create_on_different_devices() -> str:
    return refusal(lambda: create(device="cuda" if dist.get_rank() == 1 else "cpu", timeout_s=10))


def test_ranks_on_different_devices(pool):
    for message in pool.run(create_on_different_devices):
        assert "got regions on the CPU (rank 0), regions on GPUs (rank 1)" in message
