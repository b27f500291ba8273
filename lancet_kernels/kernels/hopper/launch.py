"""How is the Hopper kernel launched? With the arguments of the portable one, and descriptors made here.

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

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lancet_kernels.kernels.config import GemmConfig
from lancet_kernels.kernels.hopper.kernel import gluon_overlap_kernel
from lancet_kernels.kernels.kernel_launch import launch

# Of ptxas. At its default of 5 it keeps the number of the thread, which all partitions need and which begins
# where each has 24 registers, in local memory; up to 3 it does not, and the loops over the contraction are
# the same, instruction for instruction. It is a beta option: `lancet kernels` says what holds.
PTX_OPTIONS = "--register-usage-level=3"
# Shared memory of a program; what of it epilogues, mbarriers, tasks and targets take, compiled, rounded up.
SHARED_BYTES = 227 * 1024
EPILOGUE_BYTES = 18 * 1024
_ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def launch_gluon(grid: tuple[int, ...], tile: GemmConfig, arguments: dict[str, Any]) -> None:
    """Launch the Hopper kernel with the arguments of a launch of `overlap_kernel`."""
    given = {name: value for name, value in arguments.items() if name in gluon_overlap_kernel.arg_names}
    step = arguments["PUT_ROWS"] * arguments["PUT_BLOCK"]
    launch(
        gluon_overlap_kernel, grid, **given, **descriptors(arguments),
        STAGES=tile.num_stages, WARPS=tile.num_warps,
        PUT_SLOTS=put_slots(tile.num_stages, (tile.block_m + tile.block_n) * tile.block_k, step),
        num_warps=tile.num_warps, ptx_options=PTX_OPTIONS,
    )  # fmt: skip


def descriptors(arguments: dict[str, Any]) -> dict[str, TensorDescriptor]:
    """Descriptors of all received rows, of `hidden`, and of the weights of all experts, as matrices."""
    sizes = (arguments[name] for name in ("BM", "BN", "BN_IN", "BK"))
    box = boxes(*sizes, backward=arguments["gradients"] is not None)
    gemms = arguments["gemms"]
    tensors = {
        "rows_desc": arguments["arrivals"].rows,
        "weight_in_desc": gemms.weight_in,
        "hidden_desc": gemms.hidden,
        "weight_out_desc": gemms.weight_out,
    }
    return {name: _descriptor(tensor, box[name]) for name, tensor in tensors.items()}


def _descriptor(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    matrix = tensor.view(-1, tensor.shape[-1])
    layout = gl.NVMMASharedLayout.get_default_for(box, _ELEMENT[matrix.dtype])
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box, layout)


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
