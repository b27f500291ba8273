"""torch's symmetric memory as a maker: who reaches whom, and bitwise puts, against a stand-in.

The stand-in has the functions of torch 2.11 to 2.13 that we call, over POSIX shared memory between the ranks.
Each rank's tensor begins elsewhere in its buffer, as with torch's pools. That torch's own functions do the
same on GPUs is for `bench/gpu/several_ranks.py`.
"""

import ctypes
import mmap
import os
import secrets
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lancet_kernels.kernels.symmetric import TorchMemory, one_machine
from lancet_kernels.kernels.symmetric.one_machine import unreachable

CPU = torch.device("cpu")
BEGIN = 64
"""Rank r's tensor begins r times as many bytes behind its buffer."""


class StandIn:
    """`torch.distributed._symmetric_memory`, between processes of this machine."""

    def __init__(self) -> None:
        self.files: dict[int, str] = {}
        self.mapped: list[torch.Tensor] = []

    def empty(self, num_bytes, *, dtype, device):
        begin = BEGIN * dist.get_rank()
        name = f"/dev/shm/lancet-test-{os.getpid()}-{secrets.token_hex(4)}"
        Path(name).write_bytes(b"\xff" * (num_bytes + BEGIN * dist.get_world_size()))
        raw = self._map(name)[begin : begin + num_bytes]
        self.files[raw.data_ptr()] = name
        return raw

    def rendezvous(self, tensor, group):
        names = [None] * dist.get_world_size(group)
        dist.all_gather_object(names, self.files[tensor.data_ptr()], group)
        own = dist.get_rank(group)
        buffers = [
            tensor.data_ptr() - BEGIN * own if rank == own else self._map(name).data_ptr()
            for rank, name in enumerate(names)
        ]
        dist.barrier(group)
        Path(names[own]).unlink()
        return SimpleNamespace(rank=own, buffer_ptrs=buffers)

    def _map(self, name):
        handle = os.open(name, os.O_RDWR)
        try:
            tensor = torch.frombuffer(mmap.mmap(handle, 0), dtype=torch.uint8)
        finally:
            os.close(handle)
        self.mapped.append(tensor)
        return tensor


def put_on_rank() -> dict:
    """Every rank puts a row to every rank, by address alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stand_in = StandIn()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, one_machine.SYMMETRIC_MEMORY, stand_in)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        with closing(TorchMemory(None, CPU, timeout_s=20)) as memory:
            rows = memory.allocate("rows", (world, 6), torch.float64)
            zero = not rows.local.any()
            memory.barrier()
            for peer, address in enumerate(rows.peers.tolist()):
                row = torch.arange(6, dtype=torch.float64) + 100 * rank + 10 * peer
                ctypes.memmove(address + rank * 48, row.data_ptr(), 48)
            memory.barrier()
            return {"zero": zero, "rows": rows.local.clone(), "reason": memory.reason, "far": memory.far}


def test_puts_arrive_bitwise(pool):
    for rank, found in enumerate(pool.run(put_on_rank, ranks=3)):
        sent = [torch.arange(6, dtype=torch.float64) + 100 * source + 10 * rank for source in range(3)]
        assert torch.equal(found["rows"], torch.stack(sent))
        assert found["zero"]
        assert not found["far"]
        assert found["reason"].startswith("torch: 3 GPUs of one machine")


def reach_on_rank(
    gpus: list[str], links: list[tuple[int, int]], machines: list[str], lacks: list[str]
) -> str:
    """What `unreachable` says, with GPUs of these names and NVLink where `links` says."""
    rank = dist.get_rank()
    reach = lambda device, gpu: gpu == gpus[rank] or (rank, gpus.index(gpu)) in links  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_machine, "missing", lambda device: lacks[rank])
        patch.setattr(one_machine, "gpu_id", lambda device: gpus[rank])
        patch.setattr(one_machine, "signals_reach", reach)
        patch.setattr(one_machine, "machine", lambda: machines[rank])
        return unreachable(None, CPU, 20)


BOTH = [(0, 1), (1, 0)]
CASES = [
    (["a", "b"], BOTH, ["x", "x"], ["", ""], ""),
    (["a", "b"], [(0, 1)], ["x", "x"], ["", ""], "no NVLink from rank 1 to rank 0"),
    (["a", "b"], BOTH, ["x", "y"], ["", ""], "ranks on 2 machines"),
    (["a", "a"], BOTH, ["x", "x"], ["", ""], "ranks that share a GPU: a (rank 0, 1)"),
    (["a", "b"], BOTH, ["x", "x"], ["", "no CUDA device"], "no CUDA device (rank 1)"),
]


def reach_cases_on_rank() -> list[str]:
    return [reach_on_rank(*case[:-1]) for case in CASES]


def test_every_rank_says_alike_why_it_is_unreachable(pool):
    assert pool.run(reach_cases_on_rank) == [[case[-1] for case in CASES]] * 2
