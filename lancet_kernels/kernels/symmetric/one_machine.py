"""Symmetric memory of ranks on one machine: between GPUs that of torch, between CPU processes shared memory.

Between GPUs regions come from `torch.distributed._symmetric_memory` (its CUDA backend); the table of peers'
addresses is that of its handle. Signals are regions like all others: torch's own signal pads are shared by
all groups of an allocation.

    ranks 0, 1; rank 1's tensor begins 64 bytes behind the buffer that torch maps:
    buffer_ptrs on rank 0 = [0x7000, 0x9000], begins = [0, 64] -> peers = [0x7000, 0x9040]

Between CPU processes each rank makes a segment (a file in /dev/shm) for its copy of a region and maps those
of all others. Then the names are removed, that of a rank that died in between, too: so the system frees the
memory with the last of the processes that map it, however that one ends.
"""

from __future__ import annotations

import mmap
import os
import secrets
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.symmetric.agree import Meetings, MemoryOfRanks, machine
from lancet_kernels.kernels.symmetric.memory import by_rank

SYMMETRIC_MEMORY = "torch.distributed._symmetric_memory"
SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Environment variable of torch: may several ranks have their copies on one GPU? For tests."""


def missing(device: torch.device) -> str:
    """The missing requirement of torch's symmetric memory; "" if regions on `device` can be tried."""
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
        """As `create`, if `unreachable` is "". torch's own exchange of handles has the timeout of the
        process group."""
        meetings = Meetings(group, timeout_s)
        gpus = f"{meetings.world} GPUs of one machine"
        super().__init__(
            meetings, device, f"torch: {gpus}, torch's symmetric memory, pointers to all of them"
        )
        self._group = group or dist.group.WORLD

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
        self._held.append((raw, handle))
        torch.cuda.synchronize(self.device)
        # Where the tensor begins in the buffer may differ: torch may cut it out of a pool.
        begin = raw.data_ptr() - handle.buffer_ptrs[self.rank]
        # Nobody puts before all have zeroed.
        begins = self._meetings.meet(f"{request}: zero", begin)
        return raw, [p + b for p, b in zip(handle.buffer_ptrs, begins, strict=True)]


def gpu_id(device: torch.device) -> str:
    """The same in every process that sees this GPU, under whatever index."""
    return str(torch.cuda.get_device_properties(device).uuid)


def signals_reach(device: torch.device, gpu: str) -> bool:
    """Can signals go to the GPU of this `gpu_id` through a pointer? Over PCIe stores arrive, atomics do not.

    A GPU that this process does not see has a pointer over NVLink or none at all.
    """
    matches = [i for i in range(torch.cuda.device_count()) if gpu_id(torch.device("cuda", i)) == gpu]
    if not matches or matches[0] == device.index:
        return True
    try:
        runtime = import_module("cuda.bindings.runtime")
    except ImportError:  # cuda-python is optional; all GPUs with NVLink between them have native atomics
        links = nvlinks()
        return links is not None and links[device.index][matches[0]] > 0
    attribute = runtime.cudaDeviceP2PAttr.cudaDevP2PAttrNativeAtomicSupported
    _, native = runtime.cudaDeviceGetP2PAttribute(attribute, device.index, matches[0])
    return bool(native)


def nvlinks() -> list[list[int]] | None:
    """NVLinks between each two GPUs of this machine, by torch's own query of NVML; None if it cannot tell."""
    try:
        device_type = import_module("torch._C._autograd").DeviceType.CUDA
        detect = import_module("torch._C._distributed_c10d")._detect_dma_connectivity
        return detect(device_type, "nvlink").matrix
    except (ImportError, RuntimeError, AttributeError):
        return None


# Where Linux shows POSIX shared memory.
FOLDER = Path("/dev/shm")


class SharedMemory(MemoryOfRanks):
    """One rank of a process group whose ranks are processes of one machine."""

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = 60.0):
        """As `create`. Raises UserError unless the ranks share one /dev/shm, on one machine."""
        meetings = Meetings(group, timeout_s)
        reason = f"shared: {meetings.world} CPU processes of one machine, over POSIX shared memory"
        super().__init__(meetings, torch.device("cpu"), reason)
        prefix = f"lancet-{os.getpid()}-{secrets.token_hex(4)}"
        # Processes that see the same /dev/shm: of one machine, and with the same file system there.
        answers = meetings.meet("regions on the CPU", [prefix, f"{machine()} {FOLDER.stat().st_dev}"])
        others = [rank for rank, (_, machine) in enumerate(answers) if machine != answers[0][1]]
        if others:
            raise UserError(
                "symmetric memory",
                got=f"rank(s) {', '.join(map(str, others))} that share no memory with rank 0",
                expected="ranks on one machine, with one /dev/shm",
                do="start them there; torch.distributed's collectives work between machines",
            )
        self._prefixes = [prefix for prefix, _ in answers]
        self._count = 0

    def _allocate(self, request: str, num_bytes: int) -> tuple[Tensor, list[int]]:
        files = [FOLDER / f"{prefix}-{self._count}" for prefix in self._prefixes]
        self._count += 1
        try:
            self._meetings.together(
                f"{request}: create",
                lambda: _create(files[self.rank], num_bytes),
                do="make /dev/shm larger (docker run --shm-size) or the region smaller",
            )
            mapped = self._meetings.together(
                f"{request}: map",
                lambda: [_map(file, num_bytes) for file in files],
                do="run the ranks as one user, where they share /dev/shm",
            )
        finally:
            # Every rank has mapped them, or it failed on every rank: a dead rank's name is removed as well.
            for file in files:
                file.unlink(missing_ok=True)
        # Unmapped with the last tensor on it.
        self._held.append(mapped)
        return mapped[self.rank], [copy.data_ptr() for copy in mapped]


def _create(file: Path, num_bytes: int) -> None:
    with open(file, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as handle:
        # Reserves the pages: without it a full /dev/shm would be a SIGBUS at the first store.
        os.posix_fallocate(handle.fileno(), 0, num_bytes)


def _map(file: Path, num_bytes: int) -> Tensor:
    """uint8 [num_bytes]; the tensor keeps the mapping alive."""
    with open(file, "r+b") as handle:
        return torch.frombuffer(mmap.mmap(handle.fileno(), num_bytes), dtype=torch.uint8)
