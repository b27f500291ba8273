"""Symmetric memory: regions that every PE has, and the addresses by which the others reach them.

`create` chooses the implementation for some ranks on a device, and says why, or what is missing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.kernels.symmetric.memory import Region, SymmetricMemory, VirtualMemory, virtual_memories
from lancet_kernels.kernels.symmetric.nvshmem import NvshmemMemory, init_module
from lancet_kernels.kernels.symmetric.one_machine import SharedMemory, TorchMemory, unreachable


def create(
    group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu", timeout_s: float = 60.0
) -> SymmetricMemory:
    """The symmetric memory of the ranks of `group`, on `device`. Collective.

    group: None means all ranks or, without torch.distributed, the one there is.
    timeout_s: how long any step may wait for a rank.

    | one     | any    | `VirtualMemory`: no peers                                          |
    | several | CPU    | `SharedMemory`: POSIX shared memory, ranks on one machine          |
    | several | CUDA   | `TorchMemory`: torch alone, GPUs of one machine, all over NVLink   |
    | several | CUDA   | `NvshmemMemory`: NVSHMEM, where not all peers are so reachable     |

    Raises UserError, on every rank, saying what is missing and what works instead; CommunicationError if a
    rank stays away.
    """
    device = torch.device(device)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        (memory,) = virtual_memories(1, device)
        return memory
    check_name("device of symmetric memory", device.type, ("cpu", "cuda"))
    if device.type == "cpu":
        return SharedMemory(group, timeout_s)
    not_torch = unreachable(group, device, timeout_s)
    if not not_torch:
        return TorchMemory(group, device, timeout_s)
    try:
        nvshmem_memory = NvshmemMemory(group, device, timeout_s)
    except UserError as error:
        raise UserError(
            "symmetric memory between GPUs",
            got=not_torch if not_torch == error.got else f"{not_torch}; {error.got}",
            expected=f"GPUs of one machine with NVLink, or {error.expected}",
            do=error.do,
        ) from error
    nvshmem_memory.reason += f" (not torch: {not_torch})"
    return nvshmem_memory
