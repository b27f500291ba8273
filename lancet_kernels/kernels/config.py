"""How is a fused launch cut, and which kernel runs it? Tiles, puts, grid; what a GPU can hold of them.

`tuning.tuned` gives what was tuned for a device, or else `OverlapConfig.for_gpu`; of a configuration `cut`
makes each launch. Also the names of activations. This file does not need Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lancet_kernels.errors import UserError

ACTIVATIONS = ("gelu", "silu", "swiglu")
"""The activations that the kernels compute."""
INTERLEAVED = "interleaved-clamped-swiglu"
"""As "clamped-swiglu", with gate and up in alternate columns."""
CLAMPED = ("clamped-swiglu", INTERLEAVED)
"""The activations of GPT-OSS."""
ALL_ACTIVATIONS = (*ACTIVATIONS, *CLAMPED)
"""The activations of layers with backend "torch"; those of GPT-OSS are computed by plain torch ops."""
GATED = ("swiglu", *CLAMPED)
"""The activations whose input holds gate and up, so is twice as wide as the output."""

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


def check_activation(kind: str, what: str = "activation", supported: tuple[str, ...] = ACTIVATIONS) -> None:
    """Raise UserError unless `kind` is one of `supported`."""
    if kind not in supported:
        is_other = kind in ALL_ACTIVATIONS or "(" in kind  # or an expression of `ops.moe.expert_activation`
        do = 'use backend="torch"' if is_other else "check the name"
        raise UserError(what, got=repr(kind), expected=f"one of {', '.join(supported)}", do=do)


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

    def is_valid(self, dtype: torch.dtype, arch: int, accumulators: int = 1) -> bool:
        """Does it fit the shared memory and the registers of `arch`, and does `tl.dot` take the shapes?

        Two accumulators (swiglu) read two blocks of weights.
        """
        columns = self.block_m + accumulators * self.block_n
        operand_bytes = self.num_stages * columns * self.block_k * dtype.itemsize
        # block_n / 2: the epilogue works on quarters of a tile, 8 columns or more.
        blocks = (self.block_m, self.block_n // 2, self.block_k)
        powers = all(b >= 16 and b & (b - 1) == 0 for b in (*blocks, 16 * self.num_warps))
        return (
            powers
            and self.num_warps <= 16
            and self.num_stages >= 1
            and operand_bytes <= shared_memory(arch)
            and accumulators * self.block_m * self.block_n <= MOST_ACCUMULATOR_REGISTERS * 32 * self.num_warps
        )


class Cut(NamedTuple):
    """The tile of a launch, the columns of one of the first GEMM, whether descriptors load operands, and
    whether the Hopper kernel runs."""

    gemm: GemmConfig
    columns_in: int
    tma: bool
    gluon: bool


@dataclass(frozen=True)
class OverlapConfig:
    """How the launches are cut.

    Attributes:
        gemm: tile of the GEMMs, of which `cut` may make a smaller one; its block_m is that of the exchange.
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
        if self.bodies not in ("triton", "gluon"):
            raise UserError("bodies", got=self.bodies, expected="triton or gluon", do="use one of these")

    @classmethod
    def for_gpu(
        cls,
        width: int,
        hidden: int,
        dtype: torch.dtype,
        arch: int,
        programs: int,
        far: bool = False,
        portable: bool = False,
    ) -> OverlapConfig:
        """The heuristic default for compute capability `arch` and a grid of `programs`.

        The Hopper kernel where it can run: puts in steps of 4 KiB. Else, or with `portable`, the portable
        one, with a tile that fits beside everything else in it without spilling (compiled 2026-11-21). On
        sm_90 128x256 spills 24 to 40 bytes; on sm_80, which loads operands through registers, 128x64 with 8
        warps 16 bytes once independent GEMMs ride along; float32 with 32 columns a step some 450, and 64x64
        16 bytes on sm_90 (Triton 3.6). far: some peers are reached by NVSHMEM only.
        """
        tile = GemmConfig(128, 256, 64, 8, 4)
        hopper = cls(tile, put_rows=2, put_block=1024, programs=programs, tma=True, bodies="gluon")
        if not portable and not hopper.refusals(width, hidden, dtype, arch, far):
            return hopper
        if dtype.itemsize == 4:
            tile = GemmConfig(64, 32, 16, 8, 2)
        elif arch >= 90:
            tile = GemmConfig(128, 128, 64, 8, 4)
        else:
            tile = GemmConfig(64, 64, 32, 8, 4)
        return cls(tile, programs=programs, tma=arch >= 90)

    def refusals(
        self, width: int, hidden: int, dtype: torch.dtype, arch: int, far: bool
    ) -> list[tuple[str, object, str]]:
        """(what, what it is, what it should be) of all that keeps the Hopper kernel from running.

        arch: 90 for compute capability 9.0, 0 for no GPU. far: some peers are reached by NVSHMEM only.
        """
        tile, block = self.gemm, self.gemm.block_k
        fits = tile in [GemmConfig(128, 256, 64, 8, stages) for stages in (2, 3, 4)]
        divides = width % block == 0 and hidden % block == 0
        here = f"compute capability {arch // 10}.{arch % 10}" if arch else "no GPU"
        checks = (
            ("tile", str(tile), "128x256x64 with 8 warps and 2 to 4 stages", fits),
            ("tma", self.tma, "True", self.tma),
            ("type", dtype, "torch.bfloat16 or torch.float16", dtype in (torch.bfloat16, torch.float16)),
            ("widths of model and experts", (width, hidden), f"multiples of {block}", divides),
            ("transport", "NVSHMEM" if far else "pointers", "pointers to all peers", not far),
            ("device", here, "a GPU of compute capability 9.0", arch == 90),
        )
        return [(what, got, expected) for what, got, expected, fits in checks if not fits]

    def cut(self, dtype: torch.dtype, activation: str, *, aligned: bool, backward: bool) -> Cut:
        """How one launch is cut; block_m stays. aligned: are all its operands, for tensor descriptors?

        Plain loads need registers for addresses: 128x128x64 with 4 stages spills 1104 bytes in the forward
        and 1724 in the backward with independent GEMMs (bfloat16, sm_90, Triton 3.6, compiled 2026-11-21), 64
        columns 416 bytes on sm_100. Beside the backward's tasks 128 columns spill 52 to 104 bytes (Triton
        3.9; 2026-11-23). Spills are in memory that the driver grows at a launch, for which it waits until the
        device is idle: never, if a peer there waits for that launch.
        """
        tile, tma = self.gemm, self.tma and aligned
        if not aligned and dtype.itemsize == 4:
            tile = replace(tile, num_stages=1)
        elif not aligned:
            columns, step = min(tile.block_n, 32), min(tile.block_k, 32)
            tile = replace(tile, block_n=columns, block_k=step, num_stages=min(tile.num_stages, 3))
        gluon = self.bodies == "gluon" and tma
        if backward and not gluon:
            tile = replace(tile, block_n=min(tile.block_n, 64))
        # Half as many where there are two accumulators, but 32 at least: an epilogue does 8 at a time.
        pair = activation == "swiglu" and not backward
        return Cut(tile, max(32, tile.block_n // 2) if pair else tile.block_n, tma, gluon)


def most_registers(tile: GemmConfig) -> int:
    """Registers of a thread if a program has an SM's to itself, as in a persistent launch.

    Said aloud, because ptxas would rather spill (72 bytes, sm_80 forward) to fit two programs.
    """
    return min(255, 65536 // (32 * tile.num_warps))
