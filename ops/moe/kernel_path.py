"""Do the Triton kernels take these tensors, or does torch compute?

On a GPU the kernels do: they read counts where they are, while torch's way (nonzero) makes the host
wait for the device, which costs time and cannot be captured in a CUDA graph. Without Triton, on a CPU, and
for types that a kernel does not know, torch does; both give the same.
"""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def runs_in_kernels(tensor: Tensor) -> bool:
    """Is there a kernel for tensors of this device, and of this dtype?"""
    return tensor.dtype in FLOATS and _kernels_run_on(tensor.device)


def _kernels_run_on(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        from lancet_kernels.kernels.runtime import INTERPRETED
    except ImportError:
        return False
    # TRITON_INTERPRET is for tensors on the CPU.
    return not INTERPRETED
