"""Process groups as ops see them: by name, because an op's arguments are plain data.

The empty name means "one rank": no torch.distributed needed.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group


def group_name(group: dist.ProcessGroup | None) -> str:
    """The name to hand to the ops. None means all ranks, or the one rank there is."""
    if not dist.is_available() or not dist.is_initialized():
        return ""
    group = group or dist.group.WORLD
    return group.group_name if group.size() > 1 else ""


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of a name from `group_name` (not of the empty one)."""
    return _resolve_process_group(name)


def group_size(name: str) -> int:
    """How many ranks; 1 for the empty name."""
    return group_of(name).size() if name else 1


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """How long a collective of the group may wait for a rank."""
    device = next(iter(group._device_types))
    return group._get_backend(device).options._timeout.total_seconds()


def new_group_like(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of all ranks, whose waits are bounded as those of `group` (torch's default: 30 minutes).

    Collective over all ranks.
    """
    return dist.new_group(timeout=timedelta(seconds=group_timeout_s(group)))


def group_rank(name: str) -> int:
    """This rank's place in the group; 0 for the empty name."""
    return group_of(name).rank() if name else 0


def group_device(name: str) -> torch.device:
    """Where a tensor must be for the group's collectives: the CPU if its backend takes that, else the GPU."""
    kinds = {device.type for device in group_of(name)._device_types}
    return torch.device("cpu") if "cpu" in kinds else torch.device("cuda", torch.cuda.current_device())
