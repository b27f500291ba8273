"""How fused launches are cut: the configuration, its tiles, and what of them spills where.

`overlap.default_overlap_config` gives the one tuned for a device, or `OverlapConfig.for_gpu`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.gemm_config import GemmConfig

BODIES = ("triton", "gluon")


@dataclass(frozen=True)
class OverlapConfig:
    """How the launches are cut.

    Attributes:
        gemm: tile of all GEMMs in the launch but one (`first_columns`); its block_m is that of the exchange.
        put_rows, put_block: rows and elements of a row that one put step copies.
        reduce_tokens, reduce_block: tokens and elements of a row that one reduction step adds.
        programs: size of the grid; at most what the GPU holds at once, shared by all PEs on it.
        tma: load operands through tensor descriptors, in launches whose operands are all aligned for it.
        bodies: "triton", or "gluon": the warp-specialised kernel for sm_90 (`hopper/kernel.py`), in launches
            with tensor descriptors.
    """

    gemm: GemmConfig
    put_rows: int = 8
    put_block: int = 512
    reduce_tokens: int = 2
    reduce_block: int = 512
    programs: int = 1
    tma: bool = False
    bodies: str = "triton"

    def __post_init__(self) -> None:
        blocks = self.put_rows, self.put_block, self.reduce_tokens, self.reduce_block
        if any(b < 1 or b & (b - 1) for b in blocks):
            raise UserError(
                "put_rows, put_block, reduce_tokens, reduce_block",
                got=blocks,
                expected="powers of 2",
                do="round them up",
            )
        if self.programs < 1:
            raise UserError("programs", got=self.programs, expected="at least 1", do="give it one")
        if self.bodies not in BODIES:
            raise UserError("bodies", got=self.bodies, expected=" or ".join(BODIES), do="use one of these")

    @classmethod
    def for_gpu(cls, width: int, hidden: int, dtype: torch.dtype, arch: int, programs: int) -> OverlapConfig:
        """The heuristic default for compute capability `arch` and a grid of `programs`."""
        aligned = width * dtype.itemsize % 16 == 0 and hidden * dtype.itemsize % 16 == 0
        tile = overlap_tile(dtype, arch)
        return cls(
            tile if aligned else plain_tile(tile, dtype),
            programs=programs,
            tma=arch >= 90 and aligned,
        )


def overlap_tile(dtype: torch.dtype, arch: int) -> GemmConfig:
    """The tile that fits beside everything else in the kernel without spilling (compiled 2026-11-21).

    On sm_90 128x256 spills 24 to 40 bytes in the fused kernel. On
    sm_80, which loads operands through registers, 128x64 with 8 warps spills 16 bytes once weight gradients
    of other layers ride along; float32 with 32 columns a step spills some 450, and 64x64 16 bytes on sm_90
    (Triton 3.6).
    """
    if dtype.itemsize == 4:
        return GemmConfig(64, 32, 16, 8, 2)
    if arch >= 90:
        return GemmConfig(128, 128, 64, 8, 4)
    return GemmConfig(64, 64, 32, 8, 4)


def plain_tile(tile: GemmConfig, dtype: torch.dtype) -> GemmConfig:
    """What `tile`, one for tensor descriptors, becomes where not all operands are aligned for them.

    Plain loads need registers for addresses: 128x128x64 with 4 stages spills 1104 bytes in the forward and
    1724 in the backward with independent GEMMs (bfloat16, sm_90, Triton 3.6, compiled 2026-11-21); this does
    not. (64 columns do, 416 bytes, on sm_100 with Triton 3.9.) Spills are in memory that the driver grows at
    a launch, for which it waits until the device is idle: never, if a peer there waits for that launch.
    """
    if dtype.itemsize == 4:
        return replace(tile, num_stages=1)
    return replace(
        tile,
        block_n=min(tile.block_n, 32),
        block_k=min(tile.block_k, 32),
        num_stages=min(tile.num_stages, 3),
    )


def launch_tile(tile: GemmConfig, *, backward: bool) -> GemmConfig:
    """The tile of one plain launch of a configuration with `tile`; its block_m, the chunk of a signal, stays.

    Beside the backward's tasks, tiles of 128 columns spill 52 to 76 bytes on sm_90, and 88 to 104 with
    NVSHMEM's functions on sm_100 (Triton 3.9; compiled 2026-11-23).
    """
    return replace(tile, block_n=min(tile.block_n, 64)) if backward else tile


def first_columns(tile: GemmConfig, activation: str, *, backward: bool) -> int:
    """Columns of a tile of the first GEMM: half as many where it has two accumulators, forward with swiglu.

    Not fewer than 32, of which an epilogue does 8 at a time.
    """
    pair = activation == "swiglu" and not backward
    return max(32, tile.block_n // 2) if pair else tile.block_n


def most_registers(tile: GemmConfig) -> int:
    """Registers of a thread if a program has an SM's to itself, as in a persistent launch.

    Said aloud, because ptxas would rather spill (72 bytes, sm_80 forward) to fit two programs.
    """
    return min(255, 65536 // (32 * tile.num_warps))
