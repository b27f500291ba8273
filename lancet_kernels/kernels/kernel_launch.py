"""How is a kernel launched? On the device of its tensors, whichever device is the current one.

A kernel that may put over NVSHMEM is linked with its bitcode, and introduced to it once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.symmetric import nvshmem
from lancet_kernels.kernels.symmetric.nvshmem import init_module


class Launch(NamedTuple):
    """A launch that was recorded: kernel[grid](**arguments), options included."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]


@contextmanager
def recorded(*kernels: Any) -> Iterator[list[Launch]]:
    """Inside, launches of these kernels (of all, if none is named) are recorded here, and do not run.

    That needs no GPU: tensors may be on the CPU.
    """
    launches: list[Launch] = []
    before = _recorder.get()
    token = _recorder.set((kernels, launches))
    runtime.recording = not kernels or runtime.recording
    try:
        yield launches
    finally:
        _recorder.reset(token)
        runtime.recording = before is not None and not before[0]


_recorder: ContextVar[tuple[tuple[Any, ...], list[Launch]] | None] = ContextVar("recorder", default=None)


def launch(kernel: Any, grid: tuple[int, ...], **options: Any) -> None:
    """kernel[grid](**options), on the device of the first tensor.

    Triton launches on the current device, and torch changes it for its own ops only: without this, tensors on
    cuda:1 with cuda:0 current are an illegal memory access, or a kernel on the wrong GPU's stream.

    With NVSHMEM=True in the options, also all that NVSHMEM needs; other kernels carry nothing of it, and must
    not be introduced. Triton may compile a variant for these very arguments (their alignment, say), so each
    launch asks for its variant and introduces it if it is new; nothing of that waits for the device.
    Raises UserError if there is no bitcode, or NVSHMEM is not initialised or of another version.

    Example: launch(release_kernel, (world,), words_ptr=words, ..., NVSHMEM=exchange.nvshmem, num_warps=1)
    """
    recorder = _recorder.get()
    if recorder is not None and (not recorder[0] or kernel in recorder[0]):
        recorder[1].append(Launch(kernel, grid, options))
        return
    with _linked(options):
        if options.get("NVSHMEM"):
            init_module(kernel.warmup(grid=grid, **options))
        kernel[grid](**options)


def compile_launch(record: Launch) -> Any:
    """-> the compiled kernel of a launch that was recorded, which stays in Triton's cache."""
    with _linked(record.arguments):
        return record.kernel.warmup(grid=record.grid, **record.arguments)


@contextmanager
def _linked(options: dict[str, Any]) -> Iterator[None]:
    """Inside, the device of the first tensor is the current one; what may use NVSHMEM gets its bitcode."""
    device = next(_tensors(options.values())).device
    with on_device(device):
        if options.get("NVSHMEM"):
            options["extern_libs"] = _libraries(device)
        yield


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """All of them, also in tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


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
    return nvshmem.extern_libs(10 * major + minor)
