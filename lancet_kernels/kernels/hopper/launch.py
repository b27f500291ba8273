"""How is the Hopper kernel launched? With the arguments of the portable one, and descriptors made here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.hopper.config import (
    COPY_REGISTERS,
    COPY_WARPS,
    PTX_OPTIONS,
    TASKS,
    boxes,
    put_slots,
)
from lancet_kernels.kernels.hopper.kernel import gluon_overlap_kernel
from lancet_kernels.kernels.kernel_launch import launch

_ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def launch_gluon(grid: tuple[int, ...], tile: GemmConfig, arguments: dict[str, Any]) -> None:
    """Launch the Hopper kernel with the arguments of a launch of `overlap_kernel`."""
    given = {name: value for name, value in arguments.items() if name in gluon_overlap_kernel.arg_names}
    step = arguments["PUT_ROWS"] * arguments["PUT_BLOCK"]
    launch(
        gluon_overlap_kernel, grid, **given, **descriptors(arguments),
        STAGES=tile.num_stages, WARPS=tile.num_warps,
        PUT_SLOTS=put_slots(tile.num_stages, (tile.block_m + tile.block_n) * tile.block_k, step),
        TASKS=TASKS, COPY_WARPS=COPY_WARPS, COPY_REGISTERS=COPY_REGISTERS,
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
