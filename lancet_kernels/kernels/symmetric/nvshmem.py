"""Symmetric memory between GPUs: NVSHMEM's heap, through nvshmem4py.

Where NVLink does not reach (another node, PCIe) the table of peers has 0, and kernels compiled with
NVSHMEM=True use NVSHMEM's puts.

NVSHMEM exists once in a process, and its PEs are the ranks that initialised it, with the first memory: of all
groups of a job only one can have it. Nothing of NVSHMEM is imported before it is needed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
import weakref
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.symmetric.agree import Meetings, MemoryOfRanks
from lancet_kernels.kernels.symmetric.memory import by_rank
from lancet_kernels.kernels.symmetric.one_machine import gpu_id, signals_reach

INSTALL = "pip install 'lancet-kernels[cuda]'"
INSTEAD = (
    "without NVSHMEM these work: NCCL's collectives between GPUs, several PEs on one GPU "
    "(virtual_memories), CPU ranks over shared memory"
)
# In every kernel that is linked with NVSHMEM's bitcode; what nvshmemx_cumodule_init looks for.
LINKED_SYMBOL = "nvshmemi_device_lib_version_d"


def missing() -> str:
    """The missing requirement of NVSHMEM, with advice; "" if regions on a GPU can be tried."""
    if not torch.cuda.is_available():
        return f"no CUDA device that torch {torch.__version__} can use"
    built_for = {f"cu{(torch.version.cuda or '').split('.')[0]}"}
    installed = {name.rpartition("-")[2] for name in _distributions("nvshmem4py-cu")}
    if installed and not installed & built_for:
        versions = ", ".join(sorted(installed))
        return f"nvshmem4py for {versions}, but torch is built for CUDA {torch.version.cuda}"
    try:
        importlib.import_module("nvshmem.core").get_version()
    except Exception as error:
        # Also a library that it loads and that is not there.
        return f"no nvshmem.core that works ({type(error).__name__}: {error}; {INSTALL})"
    return ""


class NvshmemMemory(MemoryOfRanks):
    """One rank of a process group whose ranks have a GPU each."""

    # NVSHMEM belongs to the process. Initialised by us?
    _started: ClassVar[bool] = False

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cuda",
        timeout_s: float = 60.0,
    ):
        """As `create`. Raises UserError, on every rank, if one lacks something, two share a GPU, or another
        group has NVSHMEM."""
        device = torch.device(device)
        meetings = Meetings(group, timeout_s)
        lacks = {rank: lack for rank, lack in enumerate(meetings.meet("nvshmem", missing())) if lack}
        if lacks:
            raise UserError("NVSHMEM", got=by_rank(lacks), expected="NVSHMEM on every rank", do=INSTEAD)
        self._core = importlib.import_module("nvshmem.core")
        self._bindings = importlib.import_module("nvshmem.bindings")
        super().__init__(meetings, device, "")
        mine = [gpu_id(self.device), NvshmemMemory._started]
        gpus, started = zip(*meetings.meet("nvshmem: GPUs", mine), strict=True)
        if len(set(gpus)) < self.world:
            raise UserError(
                "NVSHMEM",
                got=f"ranks on one GPU: {by_rank(dict(enumerate(gpus)))}",
                expected="a GPU for each rank",
                do="start fewer ranks or set another device; one process can play several PEs on one GPU "
                "(virtual_memories)",
            )
        # Where only some have, their PEs are those of another group: nothing to join.
        if not any(started):
            self._start(meetings)
        meetings.together("nvshmem: PEs", self._check_pes, do="use that group for every NVSHMEM memory")
        self._pointer_ok = [signals_reach(self.device, gpu) for gpu in gpus]
        near = self._core.team_n_pes(self._core.Teams.TEAM_SHARED)
        version = self._core.get_version().libnvshmem_version
        self.reason = f"nvshmem: {self.world} GPUs, NVSHMEM {version}, pointers to {near} of them at most"

    def barrier(self, timeout_s: float | None = None) -> None:
        super().barrier(timeout_s)
        # All are here, so it does not wait for long: it completes the puts that no kernel has waited for.
        self._bindings.barrier_all()

    def _start(self, meetings: Meetings) -> None:
        """Initialise NVSHMEM: rank 0 makes an id, and all join under it."""
        from cuda.core import Device

        current = Device(self.device.index)
        current.set_current()
        uid = meetings.together(
            "nvshmem: id",
            lambda: self._core.get_unique_id(empty=self.rank != 0),
            do="look at NVSHMEM_DEBUG=INFO",
        )
        num_bytes = self._bindings.uniqueid_dtype.itemsize
        (id_of_0, *_) = meetings.meet("nvshmem: send id", ctypes.string_at(uid.ptr, num_bytes).hex())
        ctypes.memmove(uid.ptr, bytes.fromhex(id_of_0), num_bytes)
        meetings.together(
            "nvshmem: initialise",
            lambda: self._core.init(
                device=current, uid=uid, rank=self.rank, nranks=self.world, initializer_method="uid"
            ),
            do="look at NVSHMEM_DEBUG=INFO",
        )
        NvshmemMemory._started = True

    def _check_pes(self) -> None:
        if not NvshmemMemory._started:
            raise RuntimeError("NVSHMEM was initialised with a group that this rank is not in")
        own = (self._core.my_pe(), self._core.n_pes())
        if own != (self.rank, self.world):
            raise RuntimeError(f"PE {own[0]} of {own[1]}: NVSHMEM was initialised with another group")

    def _allocate(self, request: str, num_bytes: int) -> tuple[Tensor, list[int]]:
        raw = self._meetings.together(
            f"{request}: allocate",
            lambda: self._core.tensor((num_bytes,), dtype=torch.uint8, except_on_del=False),
            do="set NVSHMEM_SYMMETRIC_SIZE larger, or make the region smaller",
        )
        # Freeing is collective in NVSHMEM: without the others the memory stays until the process ends.
        self._held.append(raw)
        raw.zero_()
        torch.cuda.synchronize(self.device)
        addresses = [
            self._bindings.ptr(raw.data_ptr(), peer) if usable else 0
            for peer, usable in enumerate(self._pointer_ok)
        ]
        # Nobody puts before all have zeroed.
        self.far = any(self._meetings.meet(f"{request}: zero", not all(addresses)))
        return raw, addresses


_initialised: weakref.WeakSet[Any] = weakref.WeakSet()


def init_module(kernel: Any) -> None:
    """Let a compiled Triton kernel use NVSHMEM's device functions. Call it before the first launch.

    kernel: what `fn.warmup(..., grid=...)` returns. Later calls do nothing, nor do those for kernels that are
    not linked with NVSHMEM, which must not get it.
    Raises UserError if NVSHMEM is not initialised or refuses.
    """
    if kernel in _initialised or LINKED_SYMBOL not in kernel.asm["ptx"]:
        return
    if not NvshmemMemory._started:
        raise UserError(
            "init_module",
            got="a kernel that uses NVSHMEM, which is not initialised",
            expected="an NvshmemMemory created before",
            do="make it first (lancet_kernels.kernels.symmetric.create)",
        )
    # Loads it; Triton does so at the first launch, which is too late.
    kernel._init_handles()
    status = importlib.import_module("nvshmem.bindings").cumodule_init(kernel.module)
    if status:
        raise UserError(
            "init_module",
            got=f"status {status} from nvshmemx_cumodule_init",
            expected="0",
            do="link the kernel with the bitcode of the NVSHMEM version that runs (same package)",
        )
    _initialised.add(kernel)


def _distributions(prefix: str) -> list[str]:
    names = (distribution.metadata["Name"] or "" for distribution in metadata.distributions())
    return [name for name in names if name.startswith(prefix)]


PACKAGE = "nvidia-nvshmem-cu13"
# The architectures whose bitcode NVSHMEM 3.8 brings; a GPU takes the newest that is not newer than itself.
ARCHITECTURES = (100, 90, 89, 80, 75)


def find_bitcode(arch: int) -> Path | None:
    """The bitcode for GPUs of `arch` (90 for sm_90), or None: in $NVSHMEM_HOME/lib if that is set, else in
    the wheel; one file per architecture since 3.8, one for all before."""
    names = [f"libnvshmem_device_sm_{a}.bc" for a in ARCHITECTURES if a <= arch] + ["libnvshmem_device.bc"]
    for folder in _folders():
        for name in names:
            if (folder / name).is_file():
                return folder / name
    return None


@functools.cache
def extern_libs(arch: int) -> tuple[tuple[str, str], ...]:
    """The launch option of kernels with NVSHMEM=True. Raises UserError if there is no bitcode."""
    file = find_bitcode(arch)
    if file is None:
        raise UserError(
            "NVSHMEM's device bitcode",
            got=f"none for sm_{arch} in {' or '.join(map(str, _folders())) or 'any folder'}",
            expected="libnvshmem_device*.bc",
            do=f"pip install --no-deps {PACKAGE}, or set NVSHMEM_HOME",
        )
    return (("libnvshmem_device", str(file)),)


def bitcode_version() -> str | None:
    """The version of the wheel that the bitcode comes from; None if it comes from elsewhere or is missing."""
    elsewhere = os.environ.get("NVSHMEM_HOME") or not _distributions(PACKAGE)
    return None if elsewhere else metadata.version(PACKAGE)


def _folders() -> list[Path]:
    if home := os.environ.get("NVSHMEM_HOME"):
        return [Path(home) / "lib"]
    # Not by importing nvidia.nvshmem: other wheels share that namespace, and some make it a package.
    folders = [Path(entry) / "nvidia" / "nvshmem" / "lib" for entry in sys.path if entry]
    return [folder for folder in folders if folder.is_dir()]
