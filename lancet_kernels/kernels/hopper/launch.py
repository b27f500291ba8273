"""How is the Hopper kernel launched? With the arguments of the plain one, and descriptors made here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

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


def launch_gluon(copy_counter: int, grid: tuple[int, ...], **arguments: Any) -> None:
    """Launch the Hopper kernel.

    Args: copy_counter: which word of the use counts the tasks of the copy warps. arguments: those of a launch
    of `overlap_kernel`, the options num_warps and num_stages included; what this kernel lacks is left out.
    """
    options = {
        "copy_counter": copy_counter,
        "STAGES": arguments["num_stages"],
        "WARPS": arguments["num_warps"],
        "PUT_SLOTS": put_slots(
            arguments["num_stages"],
            (arguments["BM"] + arguments["BN"]) * arguments["BK"],
            arguments["PUT_ROWS"] * arguments["PUT_BLOCK"],
        ),
        "TASKS": TASKS,
        "COPY_WARPS": COPY_WARPS,
        "COPY_REGISTERS": COPY_REGISTERS,
        "num_warps": arguments["num_warps"],
        "ptx_options": PTX_OPTIONS,
    }
    given = {name: arguments[name] for name in gluon_overlap_kernel.arg_names if name in arguments}
    # Producers claim a task ahead: what a tile of the second GEMM needs is finished a task later.
    given["lag"] = 2 * given["lag"]
    launch(gluon_overlap_kernel, grid, **given, **options, **descriptors(arguments))


def descriptors(arguments: dict[str, Any]) -> dict[str, TensorDescriptor]:
    """Descriptors of all received rows, of `hidden`, and of the weights of all experts, as matrices."""
    sizes = (arguments[name] for name in ("BM", "BN", "BN_IN", "BK"))
    box = boxes(*sizes, backward=arguments["BACKWARD"])
    tensors = {name: arguments[name.removesuffix("_desc") + "_ptr"] for name in box}
    return {name: _descriptor(tensor, box[name]) for name, tensor in tensors.items()}


def _descriptor(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    matrix = tensor.view(-1, tensor.shape[-1])
    layout = gl.NVMMASharedLayout.get_default_for(box, _ELEMENT[matrix.dtype])
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box, layout)
