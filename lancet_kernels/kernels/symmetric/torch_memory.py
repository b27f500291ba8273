"""Symmetric memory between the GPUs of one machine with torch alone: what NVLink reaches, every rank maps.

Regions come from `torch.distributed._symmetric_memory` (its CUDA backend); the table of peers' addresses is
that of its handle. Of torch's own signals nothing is used: its signal pads are shared by all groups of an
allocation. Signals are regions like all others.

    ranks 0, 1; rank 1's tensor begins 64 bytes behind the buffer that torch maps:
    buffer_ptrs on rank 0 = [0x7000, 0x9000], begins = [0, 64] -> peers = [0x7000, 0x9040]
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.kernels.symmetric.agree import Meetings, MemoryOfRanks, machine
from lancet_kernels.kernels.symmetric.memory import by_rank

SYMMETRIC_MEMORY = "torch.distributed._symmetric_memory"
SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Environment variable of torch: may several ranks have their copies on one GPU? For tests."""


def missing(device: torch.device) -> str:
    """What torch's symmetric memory lacks on this rank, in words; "" if regions on `device` can be tried."""
    if not torch.cuda.is_available():
        return f"no CUDA device that torch {torch.__version__} can use"
    try:
        backend = import_module(SYMMETRIC_MEMORY).get_backend(device)
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} without symmetric memory ({error})"
    if backend != "CUDA":
        return f"torch's symmetric memory with backend {backend} (TORCH_SYMMMEM; pointers need CUDA)"
    return ""


def unreachable(group: dist.ProcessGroup | None, device: torch.device, timeout_s: float) -> str:
    """Why these ranks cannot have a `TorchMemory`, the same on every rank; "" if they can. Collective."""
    meetings = Meetings(group, timeout_s)
    lack = missing(device)
    gpu = gpu_id(device) if not lack else ""
    machines, lacks, gpus = zip(*meetings.meet("regions on GPUs", [machine(), lack, gpu]), strict=True)
    if any(lacks):
        own = by_rank({rank: lack for rank, lack in enumerate(lacks) if lack})
    elif len(set(machines)) > 1:
        own = f"ranks on {len(set(machines))} machines"
    elif len(set(gpus)) < len(gpus) and os.environ.get(SHARED_GPU) != "1":
        own = f"ranks that share a GPU: {by_rank(dict(enumerate(gpus)))}"
    else:
        far = [str(rank) for rank, other in enumerate(gpus) if not signals_reach(device, other)]
        own = f"no NVLink from rank {meetings.rank} to rank {', '.join(far)}" if far else ""
    return next(filter(None, meetings.meet("regions on GPUs: reach", own)), "")


class TorchMemory(MemoryOfRanks):
    """One rank of a process group whose ranks are on GPUs of one machine that reach each other."""

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, timeout_s: float = 60.0
    ) -> None:
        """As `create`, where `unreachable` said "". torch's own exchange of handles has the timeout of the
        process group."""
        meetings = Meetings(group, timeout_s)
        gpus = f"{meetings.world} GPUs of one machine"
        super().__init__(
            meetings, device, f"torch: {gpus}, torch's symmetric memory, pointers to all of them"
        )
        self._group = group or dist.group.WORLD
        self._regions_of_torch: list[tuple[Tensor, Any]] = []

    def _allocate(self, request: str, num_bytes: int) -> tuple[Tensor, list[int]]:
        torch_memory = import_module(SYMMETRIC_MEMORY)
        raw = self._meetings.together(
            f"{request}: allocate",
            lambda: torch_memory.empty(num_bytes, dtype=torch.uint8, device=self.device).zero_(),
            do="make the region smaller, or free memory of the GPU",
        )
        handle = self._meetings.together(
            f"{request}: map",
            lambda: torch_memory.rendezvous(raw, self._group),
            do="look at NCCL_DEBUG=INFO, or use the torch backend",
        )
        self._regions_of_torch.append((raw, handle))
        torch.cuda.synchronize(self.device)
        # Where the tensor begins in the buffer may differ: torch may cut it out of a pool.
        begin = raw.data_ptr() - handle.buffer_ptrs[self.rank]
        # Nobody puts before all have zeroed.
        begins = self._meetings.meet(f"{request}: zero", begin)
        return raw, [p + b for p, b in zip(handle.buffer_ptrs, begins, strict=True)]

    def _free(self) -> None:
        # Peers keep what they have mapped.
        self._regions_of_torch.clear()


def gpu_id(device: torch.device) -> str:
    """The same in every process that sees this GPU, under whatever index."""
    return str(torch.cuda.get_device_properties(device).uuid)


def signals_reach(device: torch.device, gpu: str) -> bool:
    """Can signals go to the GPU of this `gpu_id` through a pointer? Over PCIe stores arrive, atomics do not.

    A GPU that this process does not see has a pointer over NVLink or none at all.
    """
    seen = [i for i in range(torch.cuda.device_count()) if gpu_id(torch.device("cuda", i)) == gpu]
    if not seen or seen[0] == device.index:
        return True
    try:
        runtime = import_module("cuda.bindings.runtime")
    except ImportError:  # cuda-python is optional; all GPUs with NVLink between them have native atomics
        links = nvlinks()
        return links is not None and links[device.index][seen[0]] > 0
    attribute = runtime.cudaDeviceP2PAttr.cudaDevP2PAttrNativeAtomicSupported
    _, native = runtime.cudaDeviceGetP2PAttribute(attribute, device.index, seen[0])
    return bool(native)


def nvlinks() -> list[list[int]] | None:
    """NVLinks between each two GPUs of this machine, by torch's own query of NVML; None if it cannot tell."""
    try:
        device_type = import_module("torch._C._autograd").DeviceType.CUDA
        detect = import_module("torch._C._distributed_c10d")._detect_dma_connectivity
        return detect(device_type, "nvlink").matrix
    except (ImportError, RuntimeError, AttributeError):
        return None
