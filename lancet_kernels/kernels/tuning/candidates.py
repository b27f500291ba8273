"""Which configurations of the fused launches of a layer are worth timing, and on which device?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from lancet_kernels.kernels.config import GemmConfig, OverlapConfig
from lancet_kernels.kernels.runtime import architecture
from lancet_kernels.kernels.tuning.tuned import Shape, key_of
from lancet_kernels.kernels.tuning.workloads import Workload

# Tiles of the plain kernel, by bytes of an element: (block_m, block_n, block_k, warps, stages).
_TILES = {
    2: (
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 64, 4, 4),
        (128, 64, 64, 8, 4),
        (64, 128, 64, 4, 4),
        (64, 64, 32, 8, 4),
    ),
    4: ((64, 64, 16, 8, 3), (64, 32, 16, 4, 3), (128, 32, 16, 8, 2), (64, 32, 32, 8, 2)),
}


# Multiprocessors of the A100, the H100 and the B200, by architecture.
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}


@dataclass(frozen=True)
class Place:
    """The GPU of this machine (`device`), or an architecture for a dry run (device None).

    Attributes: name: of the device in the cache's keys. arch: 90 for sm_90. sms: multiprocessors.
    """

    device: torch.device | None
    name: str
    arch: int
    sms: int

    @staticmethod
    def here(device: torch.device) -> Place:
        properties = torch.cuda.get_device_properties(device)
        return Place(device, properties.name, architecture(device), properties.multi_processor_count)

    @staticmethod
    def elsewhere(arch: int) -> Place:
        return Place(None, f"sm_{arch}", arch, MULTIPROCESSORS[arch])


@dataclass(frozen=True)
class Task:
    """The fused launches of a layer."""

    workload: Workload
    dtype: torch.dtype

    @property
    def shape(self) -> Shape:
        w = self.workload
        return w.width, w.hidden, w.activation, 1

    def key(self, device: str) -> str:
        """As it is looked up."""
        return key_of(self.shape, str(self.dtype).removeprefix("torch."), device)


def candidates(task: Task, place: Place) -> list[OverlapConfig]:
    """The default first, then changes of one property of each kernel at a time: put step, tile.

    All combinations would be several hundred configurations, which take too long to compile.
    """
    w = task.workload
    given = w.width, w.hidden, task.dtype, place.arch, place.sms
    default, plain = OverlapConfig.for_gpu(*given), OverlapConfig.for_gpu(*given, portable=True)
    listed = [default]
    if default.bodies == "gluon":
        listed += [replace(default, put_block=2048), replace(default, put_rows=8, put_block=512)]
        listed.append(replace(default, gemm=replace(default.gemm, num_stages=3)))
    accumulators = 2 if w.activation == "swiglu" else 1
    tiles = [GemmConfig(*sizes) for sizes in _TILES[task.dtype.itemsize]]
    changes: list[dict[str, Any]] = [{}, {"put_rows": 4, "put_block": 1024}]
    changes += [{"gemm": tile} for tile in tiles if tile.is_valid(task.dtype, place.arch, accumulators)]
    return list(dict.fromkeys([*listed, *(replace(plain, **change) for change in changes)]))
