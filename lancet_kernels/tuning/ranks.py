"""Agreement of ranks that tune together: rank 0 decides, and the time of the slowest rank counts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lancet_kernels.ops.comm.groups import from_first_rank, group_name
from lancet_kernels.ops.comm.waiting import waiting


class Ranks:
    """Values that all ranks must agree on; a single rank agrees with itself."""

    def __init__(self) -> None:
        self.together = dist.is_available() and dist.is_initialized()

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return from_first_rank(value, group_name(None), "what rank 0 decided")

    def slowest(self, times: list[float]) -> list[float]:
        """The largest of each over the ranks; infinity where one rank could not run it."""
        if not self.together:
            return times
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        numbers = torch.tensor(times, dtype=torch.float64, device=device)
        with waiting("all_reduce of measured times"):
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return numbers.tolist()

    def meet(self, device: torch.device) -> None:
        """Barrier: return when every rank has arrived and its device is idle."""
        if self.together:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            with waiting("barrier before a measurement"):
                dist.barrier()
