"""A model of the time of a launch: waves of tiles, operand traffic, and programs resident on a
multiprocessor.

It ranks configurations before they are timed, or where nothing can be timed. Only the comparison of two
configurations is meaningful, not the milliseconds themselves, which must never be presented as measurements.

    GEMM   programs resident on an SM: by shared memory, registers and threads
           a step along k takes the longest of   tensor cores: 2 BM BN BK FLOPs
                                                 shared memory: what the matrix instructions read from it
                                                 L2: (BM + BN) BK elements
           and, however fast these are, the latency of memory over the steps in flight (stages - 1)
           a tile: its steps, then its epilogue, which overlaps with other tiles only if there are any
           a launch: waves of tiles, or its HBM traffic if that takes longer. A weight comes from HBM once
           per band of group_m row tiles.
    Rows   bytes over the bandwidth that the bytes in flight can fill (Little's law), and waves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lancet_kernels.kernels.gemm_config import REGISTERS_OF_AN_SM, GemmConfig, shared_memory

LAUNCH_US = 4.0
MEMORY_LATENCY_US = 0.8
# Barriers and addresses of one step along k, which nothing hides.
STEP_US = 0.02
WARPS_OF_AN_SM = 64
PROGRAMS_OF_AN_SM = 32
# Shared memory of an SM delivers 32 banks x 4 bytes per clock.
SHARED_BYTES_PER_CLOCK = 128


@dataclass(frozen=True)
class Hardware:
    """A GPU as its vendor describes it; L2 bandwidth and clock are rounded, and only weigh against the rest.

    Attributes: tflops16: dense bf16 or fp16 with tensor cores; tflops32: float32 on the plain cores.
    """

    name: str
    arch: int
    sms: int
    clock_ghz: float
    tflops16: float
    tflops32: float
    memory_gb_per_s: float
    l2_gb_per_s: float
    l2_mb: float

    def tflops(self, dtype: torch.dtype) -> float:
        return self.tflops16 if dtype.itemsize == 2 else self.tflops32


HARDWARE = (
    Hardware("A100", 80, 108, 1.41, 312.0, 19.5, 2039.0, 4500.0, 40.0),
    Hardware("H100", 90, 132, 1.75, 989.0, 67.0, 3350.0, 9000.0, 50.0),
    Hardware("H200", 90, 132, 1.75, 989.0, 67.0, 4800.0, 9000.0, 50.0),
    Hardware("B200", 100, 148, 1.85, 2250.0, 80.0, 8000.0, 14000.0, 126.0),
)


def hardware_of(arch: int, name: str = "") -> Hardware:
    """The GPU with this name, or the first of this architecture, or the newest one of an older
    architecture."""
    for hardware in HARDWARE:
        if hardware.arch == arch and hardware.name in name:
            return hardware
    older = [hardware for hardware in HARDWARE if hardware.arch <= arch] or HARDWARE[:1]
    return next(hardware for hardware in HARDWARE if hardware.arch == older[-1].arch)


@dataclass(frozen=True)
class Facts:
    """The resources of a compiled kernel: registers of a thread, shared memory of a program."""

    registers: int
    shared_bytes: int


@dataclass(frozen=True)
class Gemms:
    """`groups` products of one size, [m, k] @ [k, n], in one launch; `accumulators` 2: two weights (swiglu).

    Attributes: weights: how many different second operands; several groups may share one.
    """

    groups: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    accumulators: int = 1
    weights: int | None = None

    @property
    def flops(self) -> float:
        return 2.0 * self.groups * self.m * self.n * self.k * self.accumulators

    @property
    def bytes(self) -> float:
        """Each operand and the result moved once: the floor."""
        weights = self.weights or self.groups
        rows = self.groups * (self.m * self.k + self.m * self.n)
        return self.dtype.itemsize * (rows + weights * self.k * self.n * self.accumulators)


def resident_programs(
    config: GemmConfig, gemms: Gemms, hardware: Hardware, facts: Facts | None = None
) -> int:
    """Programs of a launch that one SM holds at once; at least 1, even for one that does not fit."""
    launched = config.programs_per_sm(gemms.dtype, hardware.arch, gemms.accumulators)
    if facts is None:
        return launched
    # Registers are allocated to warps in units of 8 per thread.
    registers = -(-facts.registers // 8) * 8 * 32 * config.num_warps
    by_registers = REGISTERS_OF_AN_SM // max(1, registers)
    by_memory = shared_memory(hardware.arch) // max(1, facts.shared_bytes)
    return max(1, min(launched, by_registers, by_memory))


def gemm_ms(config: GemmConfig, gemms: Gemms, hardware: Hardware, facts: Facts | None = None) -> float:
    """Milliseconds of a grouped GEMM by the model above."""
    programs = resident_programs(config, gemms, hardware, facts)
    tiles = gemms.groups * -(-gemms.m // config.block_m) * -(-gemms.n // config.block_n)
    slots = programs * hardware.sms
    waves = -(-tiles // slots)
    # In the last wave fewer programs share an SM.
    last = min(programs, -(-(tiles - (waves - 1) * slots) // hardware.sms))
    full = _tile_us(config, gemms, hardware, programs)
    busy_us = (waves - 1) * full + _tile_us(config, gemms, hardware, last)
    traffic_us = _hbm_bytes(config, gemms, hardware) / hardware.memory_gb_per_s * 1e-3
    return (max(busy_us, traffic_us) + LAUNCH_US) * 1e-3


def _tile_us(config: GemmConfig, gemms: Gemms, hardware: Hardware, programs: int) -> float:
    """Microseconds of one tile of each of `programs` programs that share an SM."""
    columns = config.block_n * gemms.accumulators
    size = gemms.dtype.itemsize
    flops_per_us = hardware.tflops(gemms.dtype) * 1e6 / hardware.sms
    math_us = 2.0 * config.block_m * columns * config.block_k / flops_per_us
    shared_bytes = _shared_reads(config, columns, hardware.arch) * config.block_k * size
    shared_us = shared_bytes / (SHARED_BYTES_PER_CLOCK * hardware.clock_ghz * 1e3)
    loaded_bytes = (config.block_m + columns) * config.block_k * size
    load_us = loaded_bytes / (hardware.l2_gb_per_s * 1e3 / hardware.sms)
    steps = -(-gemms.k // config.block_k)
    latency_us = MEMORY_LATENCY_US / max(1, config.num_stages - 1)
    step_us = max(programs * max(math_us, shared_us, load_us), latency_us) + STEP_US
    stored_bytes = config.block_m * columns * size
    store_us = programs * stored_bytes / (hardware.l2_gb_per_s * 1e3 / hardware.sms)
    # First operands and last store of a tile: other tiles work meanwhile, if there are any.
    edge_us = (MEMORY_LATENCY_US + store_us) / programs
    return steps * step_us + edge_us


def _shared_reads(config: GemmConfig, columns: int, arch: int) -> float:
    """Elements read from shared memory for one k of a tile.

    sm_90 and newer: instructions of 64 rows read A once and all of B. Before, each warp reads its own part
    of both, taken as square.
    """
    if arch >= 90:
        return config.block_m + config.block_m / 64 * columns
    side = math.sqrt(config.block_m * columns / config.num_warps)
    return config.num_warps * 2 * side


def _hbm_bytes(config: GemmConfig, gemms: Gemms, hardware: Hardware) -> float:
    """HBM traffic if L2 keeps the operands that are shared within a band of tiles, but not beyond it."""
    size = gemms.dtype.itemsize
    columns = gemms.n * gemms.accumulators
    row_tiles = -(-gemms.m // config.block_m)
    bands = -(-row_tiles // config.group_m)
    band_bytes = min(config.group_m, row_tiles) * config.block_m * gemms.k * size
    # A band's rows are read again for every column of tiles unless they stay in L2.
    passes = 1 if band_bytes <= hardware.l2_mb * 1e6 / 2 else -(-gemms.n // config.block_n)
    rows = gemms.m * gemms.k * passes
    return size * gemms.groups * (rows + bands * gemms.k * columns + gemms.m * columns)


def rows_ms(
    block: tuple[int, int],
    num_warps: int,
    sizes: tuple[int, int],
    itemsize: int,
    hardware: Hardware,
    copies: Sequence[float],
    index_bytes: float,
    facts: Facts | None = None,
) -> float:
    """Milliseconds of a kernel that moves rows, a tile `block` = (rows, columns) of `sizes` per program.

    Args: copies: elements that one element of the tile causes to be read, and to be written.
        index_bytes: read per row by every program that has a part of it.
    """
    tiles = -(-sizes[0] // block[0]) * -(-sizes[1] // block[1])
    registers = 64 if facts is None else facts.registers
    by_registers = REGISTERS_OF_AN_SM // (-(-registers // 8) * 8 * 32 * num_warps)
    programs = max(1, min(PROGRAMS_OF_AN_SM, WARPS_OF_AN_SM // num_warps, by_registers))
    elements = block[0] * block[1]
    # A thread moves 16 bytes at a time; with fewer than that in its part, lanes idle.
    used = min(1.0, elements * itemsize / (16 * 32 * num_warps))
    tile_bytes = (elements * itemsize * sum(copies) + block[0] * index_bytes) / used
    waves = -(-tiles // (programs * hardware.sms))
    in_flight = programs * elements * itemsize * max(copies)
    needed = hardware.memory_gb_per_s * 1e3 / hardware.sms * MEMORY_LATENCY_US
    bandwidth = hardware.memory_gb_per_s * 1e3 / hardware.sms * min(1.0, in_flight / needed)
    # First the indices are loaded, then the rows: two latencies per wave.
    return (waves * (programs * tile_bytes / bandwidth + 2 * MEMORY_LATENCY_US) + LAUNCH_US) * 1e-3


def roofline_ms(flops: float, moved_bytes: float, dtype: torch.dtype, hardware: Hardware) -> float:
    """A lower bound for the time of this work: arithmetic at peak, or every byte moved once."""
    return max(flops / hardware.tflops(dtype) * 1e-9, moved_bytes / hardware.memory_gb_per_s * 1e-6)
