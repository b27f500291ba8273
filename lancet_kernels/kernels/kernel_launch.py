"""How is a kernel launched? On the device of its tensors, whichever device is the current one.

A kernel that may put over NVSHMEM is linked with its bitcode, and introduced to it once.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lancet_kernels.kernels import nvshmem_bitcode
from lancet_kernels.symmetric.nvshmem import init_module


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options), on the device of the first tensor.

    Triton launches on the current device, and torch changes it for its own ops only: without this, tensors on
    cuda:1 with cuda:0 current are an illegal memory access, or a kernel on the wrong GPU's stream.

    With NVSHMEM=True in the options, also all that NVSHMEM needs; other kernels carry nothing of it, and must
    not be introduced. Triton may compile a variant for these very arguments (their alignment, say), so each
    launch asks for its variant and introduces it if it is new; nothing of that waits for the device.
    Raises UserError if there is no bitcode, or NVSHMEM is not initialised or of another version.

    Example: launch(release_kernel, (world,), use.words, ..., NVSHMEM=exchange.nvshmem, num_warps=1)
    """
    device = next(value.device for value in (*args, *options.values()) if isinstance(value, Tensor))
    with on_device(device):
        if options.get("NVSHMEM"):
            options |= {"extern_libs": _libraries(device)}
            init_module(kernel.warmup(*args, grid=grid, **options))
        kernel[grid](*args, **options)


def on_device(device: torch.device) -> AbstractContextManager:
    """Inside, it is the current device. Nothing on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def small_kernel(nvshmem: bool) -> dict[str, int]:
    """Launch options of a kernel that only talks: one warp, and registers for NVSHMEM's functions.

    Left alone, ptxas 12.9 saves registers for occupancy, down to 32, and they spill.
    """
    return {"num_warps": 1} | ({"maxnreg": 128} if nvshmem else {})


@functools.cache
def _libraries(device: torch.device) -> tuple[tuple[str, str], ...]:
    """The bitcode for this GPU: looked for once, in files."""
    major, minor = torch.cuda.get_device_capability(device)
    return nvshmem_bitcode.extern_libs(10 * major + minor)
