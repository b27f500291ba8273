"""How the Hopper kernel is cut: warps, registers, rings, boxes of descriptors, and what it can be used for."""

from __future__ import annotations

from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.overlap_config import OverlapConfig

# Warps that copy, beside one that loads by TMA. Four, a whole warpgroup: registers are given by warpgroups.
COPY_WARPS = 2
# Registers of a thread. A put step keeps 16 loads of 16 bytes in flight: 64 registers.
PRODUCER_REGISTERS = 104
COPY_REGISTERS = 104
# Tasks that the producer may be ahead by.
TASKS = 2
HOPPER_TILE = GemmConfig(128, 256, 64, 8, 4)


def hopper_config(programs: int = 1) -> OverlapConfig:
    """The default. A put step is 32 KiB, and so much of a launch's puts each program has in flight."""
    return OverlapConfig(
        HOPPER_TILE,
        put_rows=4,
        put_block=2048,
        reduce_tokens=8,
        reduce_block=256,
        programs=programs,
        tma=True,
    )


def total_warps(tile: GemmConfig) -> int:
    """Of a program, as the GPU counts them: whole warpgroups for the producer and for those that copy."""
    return tile.num_warps + 4


def boxes(tile: GemmConfig, columns_in: int, *, backward: bool) -> dict[str, list[int]]:
    """What one load of each descriptor brings. Weights of the backward are multiplied transposed."""
    rows = [tile.block_m, tile.block_k]

    def weight(columns: int) -> list[int]:
        return [columns, tile.block_k] if backward else [tile.block_k, columns]

    return {
        "rows_desc": rows,
        "weight_in_desc": weight(columns_in),
        "hidden_desc": rows,
        "weight_out_desc": weight(tile.block_n),
    }
