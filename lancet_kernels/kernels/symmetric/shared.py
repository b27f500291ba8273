"""Symmetric memory between CPU processes of one machine: POSIX shared memory, mapped by every rank.

Each rank makes a segment (a file in /dev/shm) for its copy of a region and maps those of all others. Then the
names are removed, that of a rank that died in between, too: so the system frees the memory with the last of
the processes that map it, however that one ends.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.symmetric.agree import Meetings, MemoryOfRanks, machine

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
        said = meetings.meet("regions on the CPU", [prefix, f"{machine()} {FOLDER.stat().st_dev}"])
        others = [rank for rank, (_, machine) in enumerate(said) if machine != said[0][1]]
        if others:
            raise UserError(
                "symmetric memory",
                got=f"rank(s) {', '.join(map(str, others))} that share no memory with rank 0",
                expected="ranks on one machine, with one /dev/shm",
                do="start them there; torch.distributed's collectives work between machines",
            )
        self._prefixes = [prefix for prefix, _ in said]
        self._count = 0
        self._mapped: list[list[Tensor]] = []

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
        self._mapped.append(mapped)
        return mapped[self.rank], [copy.data_ptr() for copy in mapped]

    def _free(self) -> None:
        # Unmapped with the last tensor on it; peers keep what they have mapped.
        self._mapped.clear()


def _create(file: Path, num_bytes: int) -> None:
    with open(file, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as handle:
        # Reserves the pages: without it a full /dev/shm would be a SIGBUS at the first store.
        os.posix_fallocate(handle.fileno(), 0, num_bytes)


def _map(file: Path, num_bytes: int) -> Tensor:
    """uint8 [num_bytes]; the tensor keeps the mapping alive."""
    with open(file, "r+b") as handle:
        return torch.frombuffer(mmap.mmap(handle.fileno(), num_bytes), dtype=torch.uint8)
