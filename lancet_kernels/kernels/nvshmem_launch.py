"""How is a kernel launched that may put over NVSHMEM? Linked with its bitcode, and introduced to it once.

Kernels without NVSHMEM=True are launched as always: they carry nothing of it, and must not be introduced.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from lancet_kernels.kernels import nvshmem_bitcode
from lancet_kernels.kernels.kernel_launch import device_of, on_device
from lancet_kernels.kernels.kernel_launch import launch as launch_on_device
from lancet_kernels.symmetric.nvshmem import init_module


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`launch.launch`; with NVSHMEM=True in the options, also all that NVSHMEM needs.

    Triton may compile a variant for these very arguments (their alignment, say), so each launch asks for
    its variant and introduces it if it is new; nothing of that waits for the device.
    Raises UserError if there is no bitcode, or NVSHMEM is not initialised or of another version.

    Example: launch(release_kernel, (world,), use.words, ..., NVSHMEM=exchange.nvshmem, num_warps=1)
    """
    if options.get("NVSHMEM"):
        device = device_of((*args, *options.values()))
        with on_device(device):
            options |= {"extern_libs": _libraries(device)}
            init_module(kernel.warmup(*args, grid=grid, **options))
    launch_on_device(kernel, grid, *args, **options)


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
