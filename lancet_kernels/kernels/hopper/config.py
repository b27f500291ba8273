"""How the Hopper kernel is cut, and for what it can be used: warps, registers, boxes of descriptors.

Bytes of puts in flight. NVLink carries 450 GB/s in each direction of a GPU; until a row that is read arrives,
1 to 2 us pass. By Little's law 450 to 900 kB must be on their way to fill the link: 3.4 to 6.8 kB in each of
132 programs, which all put. A put reads ahead into a ring in shared memory, beside the operands of the GEMMs:

    stages   ring     programs that fill the link
    4        16 KiB   27 to 55
    3        64 KiB    7 to 14

and its stores at the peer are on their way besides, since a program waits for them only before the signal of
a chunk, of at most 128 rows. 32 KiB a program would need the shared memory of a stage (48 KiB): none has
measured whether the GEMMs can spare it, so 4 stages are the default, and the ring grows with a configuration
that has 3. Bulk copies would free the two copy warps of the stores, but a release does not cover them: they
are of the async proxy, and the wait for their writes (not only reads) is missing in Triton before 3.8.
"""

from __future__ import annotations

import torch

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.overlap_config import OverlapConfig

# Warps that copy, in one warpgroup with the one that loads by TMA and the one that signals.
COPY_WARPS = 2
# Of ptxas. At its default of 5 it keeps the number of the thread, which all partitions need and which begins
# where each has 24 registers, in local memory; up to 3 it does not, and the loops over the contraction are
# the same, instruction for instruction. It is a beta option: `lancet kernels` says what holds.
PTX_OPTIONS = "--register-usage-level=3"
# Registers of a thread of producer, copy and signal warps, one warpgroup; the consumers share the rest, 208.
# More warps would not compile: with 512 threads a kernel starts with 128 registers in each, and ptxas refuses
# a wgmma with as many accumulators.
COPY_REGISTERS = 88
# Tasks that are handed over and not stored yet. A third one would wait for stages of operands anyway.
TASKS = 2
# Shared memory of a program; what of it epilogues, mbarriers, tasks and targets take, compiled, rounded up.
SHARED_BYTES = 227 * 1024
EPILOGUE_BYTES = 18 * 1024
HOPPER_TILE = GemmConfig(128, 256, 64, 8, 4)


def hopper_config(programs: int = 1) -> OverlapConfig:
    """The default: puts in steps of 4 KiB, of which each program has `put_slots` on their way."""
    return OverlapConfig(
        HOPPER_TILE,
        put_rows=2,
        put_block=1024,
        reduce_tokens=2,
        reduce_block=512,
        programs=programs,
        tma=True,
        bodies="gluon",
    )


def put_slots(stages: int, stage_elements: int, step_elements: int) -> int:
    """Steps of a put that a program has on the way: as many as fit beside operands and epilogue, up to 16."""
    free = SHARED_BYTES - EPILOGUE_BYTES - 2 * stages * stage_elements
    return max(2, min(16, free // (2 * step_elements)))


def total_warps(num_warps: int) -> int:
    """Warps of a program with `num_warps` consumers: the others are one warpgroup."""
    return num_warps + 4


def boxes(
    block_m: int, block_n: int, columns_in: int, block_k: int, *, backward: bool
) -> dict[str, list[int]]:
    """What one load of each descriptor brings. Weights of the backward are multiplied transposed.

    columns_in: of a tile of the first GEMM; forward with swiglu there are two loads, for gate and up.
    """
    rows = [block_m, block_k]

    def weight(columns: int) -> list[int]:
        return [columns, block_k] if backward else [block_k, columns]

    return {
        "rows_desc": rows,
        "weight_in_desc": weight(columns_in),
        "hidden_desc": rows,
        "weight_out_desc": weight(block_n),
    }


def check_gluon(
    config: OverlapConfig, width: int, hidden: int, dtype: torch.dtype, device: torch.device, nvshmem: bool
) -> None:
    """Raise UserError unless the Hopper kernel can do what `config` asks it to.

    Operands that are not aligned for descriptors are another matter: such a launch has the plain bodies.
    """
    if config.bodies != "gluon" or runtime.recording:
        return
    arch = 0
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = 10 * major + minor
    for what, got, expected in refusals(config, width, hidden, dtype, arch, nvshmem):
        raise UserError(
            f"{what} of a fused launch with bodies='gluon'",
            got=got,
            expected=expected,
            do="use bodies='triton'",
        )


def refusals(
    config: OverlapConfig, width: int, hidden: int, dtype: torch.dtype, arch: int, nvshmem: bool
) -> list[tuple[str, object, str]]:
    """(what, what it is, what it should be) of all that keeps the Hopper kernel from running.

    arch: 90 for compute capability 9.0, 0 for no GPU. nvshmem: rows travel by it.
    """
    tile = config.gemm
    fixed = (tile.block_m, tile.block_n, tile.block_k, tile.num_warps) == (128, 256, 64, 8)
    checks = (
        ("tile", str(tile), "128x256x64 with 8 warps and 2 to 4 stages", fixed and 2 <= tile.num_stages <= 4),
        ("tma", config.tma, "True", config.tma),
        ("type", dtype, "torch.bfloat16 or torch.float16", dtype in (torch.bfloat16, torch.float16)),
        (
            "widths of model and experts",
            (width, hidden),
            f"multiples of {tile.block_k}",
            width % tile.block_k == 0 and hidden % tile.block_k == 0,
        ),
        ("transport", "NVSHMEM" if nvshmem else "pointers", "pointers to all peers", not nvshmem),
        (
            "device",
            f"compute capability {arch // 10}.{arch % 10}" if arch else "no GPU",
            "a GPU of compute capability 9.0",
            arch == 90,
        ),
    )
    return [(what, got, expected) for what, got, expected, fits in checks if not fits]
