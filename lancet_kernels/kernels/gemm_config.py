"""The tiles of a GEMM: valid configurations for each GPU, a heuristic default, and candidates for the
tuner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

# Maximal shared memory of one program, in bytes, by architecture (CUDA programming guide, compute
# capabilities).
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
REGISTERS_OF_A_THREAD = 255
REGISTERS_OF_AN_SM = 64 << 10
# With more registers for accumulators, a thread has too few for the epilogue.
MOST_ACCUMULATOR_REGISTERS = 128


def shared_memory(arch: int) -> int:
    """Bytes of shared memory for one program on compute capability `arch` (90 for 9.0)."""
    return SHARED_MEMORY[max((a for a in SHARED_MEMORY if a <= arch), default=80)]


@dataclass(frozen=True)
class GemmConfig:
    """One way to tile a GEMM.

    Attributes:
        block_m, block_n: tile of the output; block_k: step along the contraction.
        num_warps: warps of a program; num_stages: steps whose operands are in shared memory at once.
        group_m: number of vertically adjacent tiles that share the columns of the other operand in L2.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k} w{self.num_warps} s{self.num_stages}"

    def operand_bytes(self, dtype: torch.dtype, accumulators: int = 1) -> int:
        """Shared memory of the operands in flight. Two accumulators (swiglu) read two blocks of weights."""
        columns = self.block_m + accumulators * self.block_n
        return self.num_stages * columns * self.block_k * dtype.itemsize

    def accumulator_registers(self, accumulators: int = 1) -> int:
        """float32 accumulators of one thread."""
        return accumulators * self.block_m * self.block_n // (32 * self.num_warps)

    def programs_per_sm(self, dtype: torch.dtype, arch: int, accumulators: int = 1) -> int:
        """How many programs are sure to be resident on one SM, if a thread takes all registers it can."""
        by_memory = shared_memory(arch) // self.operand_bytes(dtype, accumulators)
        by_registers = REGISTERS_OF_AN_SM // (REGISTERS_OF_A_THREAD * 32 * self.num_warps)
        return max(1, min(by_memory, by_registers))

    def is_valid(self, dtype: torch.dtype, arch: int, accumulators: int = 1) -> bool:
        """Does it fit the shared memory and the registers of `arch`, and does `tl.dot` take the shapes?"""
        # block_n / 2: the epilogue works on quarters of a tile, 8 columns or more.
        blocks = (self.block_m, self.block_n // 2, self.block_k)
        powers = all(b >= 16 and b & (b - 1) == 0 for b in (*blocks, 16 * self.num_warps))
        return (
            powers
            and self.num_warps <= 16
            and self.num_stages >= 1
            and self.group_m >= 1
            and self.operand_bytes(dtype, accumulators) <= shared_memory(arch)
            and self.accumulator_registers(accumulators) <= MOST_ACCUMULATOR_REGISTERS
        )


def default_config(
    m: int, n: int, k: int, dtype: torch.dtype, arch: int, accumulators: int = 1
) -> GemmConfig:
    """A tile for an [m, k] @ [k, n] product, m being the rows that one group has at most.

    16-bit on sm_90 and sm_100: 128x256x64 feeds the tensor cores with the fewest bytes per FLOP
    (BM * BN / (BM + BN) FLOPs per element read), 3 stages fill 144 of 227 KiB. sm_80 has 163 KiB and
    reads operands through registers, so 128x128. float32 runs on the plain cores (ieee), where 64x64 keeps
    enough programs in flight. Fewer rows or columns than a tile has take a smaller one. Two accumulators
    halve block_n. On sm_100 128x128x64 with 4 warps and 64x64x16 with 3 stages spill 12 bytes in the dW
    kernel (compiled 2026-11-21), so there they have 8 warps and 2 stages.
    """
    hopper_like = arch >= 90 and shared_memory(arch) > shared_memory(80)
    if dtype.itemsize == 4:
        config = GemmConfig(64, 64 // accumulators, 16, 4, 2 if arch >= 100 else 3)
    elif m <= 64:
        config = GemmConfig(64, 128 // accumulators, 64, 4, 4)
    elif not hopper_like:
        config = GemmConfig(128, 128 // accumulators, 32, 8, 4)
    elif n * accumulators > 128:
        config = GemmConfig(128, 256 // accumulators, 64, 8, 3)
    else:
        config = GemmConfig(128, 128 // accumulators, 64, 8 if arch >= 100 else 4, 4)
    assert config.is_valid(dtype, arch, accumulators), config
    return config


# Tiles that the tuner times, by bytes of an element: (block_m, block_n, block_k, warps, stages).
_TILES = {
    2: (
        (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 256, 32, 8, 4), (256, 128, 64, 8, 3),
        (256, 128, 32, 8, 4), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 64, 4, 4),
        (128, 128, 32, 8, 4), (128, 128, 32, 4, 5), (128, 64, 64, 4, 4), (128, 64, 64, 8, 4),
        (64, 256, 64, 8, 3), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4), (64, 64, 128, 4, 3), (64, 32, 64, 4, 4),
    ),
    4: (
        (64, 64, 16, 4, 2), (64, 64, 16, 4, 4), (64, 64, 32, 4, 2), (64, 64, 32, 4, 3), (64, 64, 16, 8, 3),
        (128, 64, 16, 4, 3), (128, 64, 16, 8, 3), (128, 64, 32, 8, 2), (64, 128, 16, 4, 3),
        (64, 128, 16, 8, 3), (128, 128, 16, 8, 2), (128, 128, 16, 8, 3), (128, 128, 32, 8, 2),
        (64, 32, 16, 4, 3), (64, 32, 32, 4, 3),
    ),
}  # fmt: skip


def candidates(
    m: int, n: int, k: int, dtype: torch.dtype, arch: int, accumulators: int = 1
) -> Iterator[GemmConfig]:
    """The configurations to time for this product, at most 20, the default first.

    Large tiles (128x256, 256x128) read the fewest bytes per FLOP; small ones (64x64, 64x32) keep all
    multiprocessors busy when there are few rows or columns. Between them, 4 and 8 warps where the
    accumulators fit the registers, and different steps and stages along the contraction. Other values of
    group_m are tried with the default tile only: which operand stays in L2 hardly depends on the tile. Two
    accumulators halve block_n.
    """
    default = default_config(m, n, k, dtype, arch, accumulators)
    tiles = [
        GemmConfig(block_m, max(32, block_n // accumulators), block_k, num_warps, num_stages)
        for block_m, block_n, block_k, num_warps, num_stages in _TILES[dtype.itemsize]
    ]
    grouped = [replace(default, group_m=group_m) for group_m in (4, 16)]
    yield default
    for config in dict.fromkeys([*tiles, *grouped]):
        too_large = config.block_m > max(64, 2 * m) or config.block_n > max(32, 2 * n)
        if config != default and not too_large and config.is_valid(dtype, arch, accumulators):
            yield config
