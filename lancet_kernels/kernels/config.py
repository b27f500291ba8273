"""The configuration of a layer's fused launches: their tiles, and the kernel that runs them.

It is what `lancet tune` put into the user's cache, or else `OverlapConfig.for_gpu`; `cut` derives each launch
from it. An entry of the cache that is unreadable, or not valid on the device, is ignored with a warning. All
ranks of a job must have the same entries: one file, or files written by the same collective `lancet tune`.

Also the dtypes and the names of activations, since this file does not need Triton.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.files import CacheFile, cache_folder, locked

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of rows that the kernels take."""
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

SMS_VARIABLE = "LANCET_FUSED_SMS"
# Width, hidden width, activation, PEs on the device.
Shape = tuple[int, int, str, int]
FORMAT = "lancet-tuned-configurations"
VERSION = 1
# Environment variable with another path of the user's cache.
CACHE_VARIABLE = "LANCET_TUNED"
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
    is_other = kind in ALL_ACTIVATIONS or "(" in kind  # or an expression of `ops.moe.expert_ops`
    check_name(what, kind, supported, 'use backend="torch"' if is_other else "check the name")


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
        bodies: "triton", or "gluon": the kernel of `hopper/`, in launches with tensor descriptors.
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
        check_name("bodies", self.bodies, ("triton", "gluon"))

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
        if not portable and hopper.runs_on_hopper(width, hidden, dtype, arch, far):
            return hopper
        if dtype.itemsize == 4:
            tile = GemmConfig(64, 32, 16, 8, 2)
        elif arch >= 90:
            tile = GemmConfig(128, 128, 64, 8, 4)
        else:
            tile = GemmConfig(64, 64, 32, 8, 4)
        return cls(tile, programs=programs, tma=arch >= 90)

    def runs_on_hopper(self, width: int, hidden: int, dtype: torch.dtype, arch: int, far: bool) -> bool:
        """Can the Hopper kernel run with it? Args: as of `for_gpu`."""
        step = self.gemm.block_k
        return (
            self.gemm in [GemmConfig(128, 256, 64, 8, stages) for stages in (2, 3, 4)]
            and self.tma
            and dtype in (torch.bfloat16, torch.float16)
            and width % step == hidden % step == 0
            and not far
            and arch == 90
        )

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
    """Registers of a thread if a program has an SM's to itself. Set explicitly: ptxas would otherwise spill
    (72 bytes, sm_80 forward) to fit two programs."""
    return min(REGISTERS_OF_A_THREAD, REGISTERS_OF_AN_SM // (32 * tile.num_warps))


def default_overlap_config(
    width: int,
    hidden: int,
    activation: str,
    dtype: torch.dtype,
    device: torch.device,
    pes_here: int = 1,
    far: bool = False,
) -> OverlapConfig:
    """The tuned configuration for the device, else a default.

    Args: pes_here: PEs that share the device. far: some peers are reached by NVSHMEM only.
    Raises: UserError for a wrong LANCET_FUSED_SMS.

    In the interpreter a tile costs the same milliseconds whatever its size; small sizes still have several.
    """
    if device.type != "cuda" and max(width, hidden) <= 64:
        tile = GemmConfig(16, 32, 16, 1, 1)
        return OverlapConfig(tile, put_rows=4, put_block=32, reduce_tokens=4, reduce_block=32)
    if device.type != "cuda":
        tile = GemmConfig(32, 256, 128, 1, 1)
        return OverlapConfig(tile, put_rows=32, put_block=256, reduce_tokens=32, reduce_block=256)
    config = tuned((width, hidden, activation, pes_here), dtype, device)
    gpu = torch.cuda.get_device_properties(device)
    programs = max(1, multiprocessors(gpu.multi_processor_count) // pes_here)
    here = width, hidden, dtype, 10 * gpu.major + gpu.minor
    if config is None or (config.bodies == "gluon" and not config.runs_on_hopper(*here, far)):
        config = OverlapConfig.for_gpu(*here, programs, far)
    return replace(config, programs=min(config.programs, programs))


def multiprocessors(of_device: int) -> int:
    """The most streaming multiprocessors of a fused launch: all, or LANCET_FUSED_SMS, so that NCCL
    reduces gradients on the others meanwhile."""
    text = os.environ.get(SMS_VARIABLE)
    if not text:
        return of_device
    if not text.isdecimal() or not 1 <= int(text) <= of_device:
        raise UserError(SMS_VARIABLE, got=text, expected=f"1 to {of_device}, all of the GPU", do="unset it")
    return int(text)


def default_cache() -> Path:
    """The user's cache of tuned configurations, or the file that LANCET_TUNED names."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else cache_folder() / "tuned.json"


class TunedCache:
    """Entries in a JSON file. Several processes may write it; no entry is lost."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = CacheFile(path, FORMAT, VERSION)

    def entries(self) -> dict[str, Entry]:
        """All valid entries by key, from the current file."""
        return self._file.records("entries", "tuned configuration", _from_json)

    def check_writable(self) -> None:
        """Raise UserError if the file cannot be written; called before hours of tuning."""
        with locked(self.path):
            pass

    def put(self, new: Iterable[Entry]) -> None:
        """Add or replace. Raises UserError if the file cannot be written."""
        with self._file.changed() as sections:
            entries = self.entries() | {entry.key: entry for entry in new}
            sections["entries"] = {key: dataclasses.asdict(entries[key]) for key in sorted(entries)}
        user_cache.cache_clear()


@dataclass(frozen=True)
class Entry:
    """One tuned configuration.

    Attributes:
        device: a GPU's name. triton: its version. date: ISO.
        milliseconds, default_milliseconds: of this configuration and of the heuristic default.
    """

    shape: Shape
    dtype: str
    device: str
    config: OverlapConfig
    milliseconds: float
    default_milliseconds: float
    triton: str
    date: str

    @property
    def key(self) -> str:
        return key_of(self.shape, self.dtype, self.device)


def key_of(shape: Shape, dtype: str, device: str) -> str:
    """The key of an entry, as one readable line.

    Example: `overlap width=768 hidden=3072 activation=gelu pes_here=1 bfloat16 on NVIDIA H100 80GB HBM3`.
    """
    names = ("width", "hidden", "activation", "pes_here")
    sizes = " ".join(f"{name}={value}" for name, value in zip(names, shape, strict=True))
    return f"overlap {sizes} {dtype} on {device}"


def _from_json(raw: Any) -> Entry:
    """The entry. Raises if it is not valid."""
    config = OverlapConfig(**{**raw["config"], "gemm": GemmConfig(**raw["config"]["gemm"])})
    numbers = {**vars(config), **vars(config.gemm), "gemm": 0, "bodies": 0}
    if dataclasses.asdict(config) != raw["config"] or not all(isinstance(n, int) for n in numbers.values()):
        raise ValueError(f"values {raw['config']}")
    entry = Entry(**{**raw, "shape": tuple(raw["shape"]), "config": config})
    if not all(math.isfinite(t) and t >= 0 for t in (entry.milliseconds, entry.default_milliseconds)):
        raise ValueError("a time that is not a number >= 0")
    return entry


def tuned(shape: Shape, dtype: torch.dtype, device: torch.device) -> OverlapConfig | None:
    """The tuned configuration for a GPU, or None. The file is read once, until this process writes it."""
    name, arch = device_name(device)
    key = key_of(shape, str(dtype).removeprefix("torch."), name)
    entry = user_cache().get(key)
    if entry is not None and not entry.config.gemm.is_valid(dtype, arch):
        warnings.warn(f"tuned configuration {key!r} cannot run on sm_{arch} and is ignored", stacklevel=2)
        return None
    return None if entry is None else entry.config


@functools.cache
def user_cache() -> dict[str, Entry]:
    return TunedCache(default_cache()).entries()


def device_name(device: torch.device) -> tuple[str, int]:
    """(name of the GPU, compute capability: 90 for 9.0)."""
    properties = torch.cuda.get_device_properties(device)
    return properties.name, 10 * properties.major + properties.minor
