"""What may a tuner try for the fused kernel, and what does the launch model say about it?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.launch_model import LAUNCH_US, MEMORY_LATENCY_US, Facts, Gemms, Hardware, gemm_ms
from lancet_kernels.kernels.overlap_config import OverlapConfig

# (block_m, block_n, block_k, warps, stages); 256 columns are there to be refused where they spill.
_TILES = (
    (128, 128, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 128, 64, 4, 4),
    (128, 64, 64, 8, 4),
    (128, 64, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 4),
    (128, 256, 64, 8, 3),
    (128, 64, 32, 4, 4),
    (64, 64, 32, 4, 3),
    (64, 64, 16, 4, 3),
)
_COMM_SHARES = (16, 8, 4)  # one of this many programs puts
_PUTS = ((8, 512), (4, 1024), (16, 256))


def candidates(
    default: OverlapConfig, activation: str, dtype: torch.dtype, arch: int
) -> Iterator[OverlapConfig]:
    """Every valid configuration that is worth a try, the default first."""
    yield default
    accumulators = 2 if activation == "swiglu" else 1
    tiles = [GemmConfig(*tile) for tile in _TILES]
    tiles = [default.gemm, *(t for t in tiles if t != default.gemm and t.is_valid(dtype, arch, accumulators))]
    for tile, share, (rows, block), split in product(tiles, _COMM_SHARES, _PUTS, (False, True)):
        comm = max(1, default.programs // share)
        config = replace(default, gemm=tile, comm_programs=comm, put_rows=rows, put_block=block, split=split)
        if config != default:
            yield config


def overlap_ms(
    config: OverlapConfig,
    gemms: list[Gemms],
    put_bytes: float,
    hardware: Hardware,
    facts: Facts | None = None,
) -> float:
    """Milliseconds of one direction: the GEMMs, the first of which needs the `put_bytes`.

    Programs that put do not compute meanwhile; a program has put_rows x put_block elements in flight. In one
    launch all GEMMs hide the puts and only the first chunk of rows is waited for; split in two, the first
    GEMM alone hides them.
    """
    gemms_ms = [gemm_ms(config.gemm, gemm, hardware, facts) for gemm in gemms]
    size = gemms[0].dtype.itemsize
    per_program = config.put_rows * config.put_block * size / MEMORY_LATENCY_US  # bytes per us
    per_program = min(per_program, hardware.memory_gb_per_s * 1e3 / hardware.sms * 4)
    put_ms = put_bytes / (config.comm_programs * per_program) * 1e-3
    first_ms = config.gemm.block_m * gemms[0].k * size / per_program * 1e-3
    putting_ms = put_ms * config.comm_programs / config.programs
    if config.split:
        return max(gemms_ms[0] + putting_ms, put_ms) + sum(gemms_ms[1:]) + first_ms + 2 * LAUNCH_US * 1e-3
    return max(sum(gemms_ms) + putting_ms, put_ms) + first_ms + LAUNCH_US * 1e-3
