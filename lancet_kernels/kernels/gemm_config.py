"""The tile of a GEMM, and on which GPU it fits."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k} w{self.num_warps} s{self.num_stages}"

    def operand_bytes(self, dtype: torch.dtype, accumulators: int = 1) -> int:
        """Shared memory of the operands in flight. Two accumulators (swiglu) read two blocks of weights."""
        columns = self.block_m + accumulators * self.block_n
        return self.num_stages * columns * self.block_k * dtype.itemsize

    def accumulator_registers(self, accumulators: int = 1) -> int:
        """float32 accumulators of one thread."""
        return accumulators * self.block_m * self.block_n // (32 * self.num_warps)

    def is_valid(self, dtype: torch.dtype, arch: int, accumulators: int = 1) -> bool:
        """Does it fit the shared memory and the registers of `arch`, and does `tl.dot` take the shapes?"""
        # block_n / 2: the epilogue works on quarters of a tile, 8 columns or more.
        blocks = (self.block_m, self.block_n // 2, self.block_k)
        powers = all(b >= 16 and b & (b - 1) == 0 for b in (*blocks, 16 * self.num_warps))
        return (
            powers
            and self.num_warps <= 16
            and self.num_stages >= 1
            and self.operand_bytes(dtype, accumulators) <= shared_memory(arch)
            and self.accumulator_registers(accumulators) <= MOST_ACCUMULATOR_REGISTERS
        )
