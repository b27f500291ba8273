"""Runs kernels, compiled on a GPU or in Triton's interpreter on the CPU: checks their tensors, launches them,
records launches, and compiles ahead.

TRITON_INTERPRET=1 in the environment, before Triton is imported, selects the interpreter. It is for tests,
not for speed: it runs the same kernels, one program after another, on CPU tensors.

A launch is on the device of its tensors, whichever device is the current one. A kernel that may put over
NVSHMEM is linked with its bitcode, and introduced to it once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.errors import OutOfResources

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.symmetric import nvshmem
from lancet_kernels.kernels.symmetric.nvshmem import init_module

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
# With more compilations at once, Python's part of them (the GIL) is the bottleneck.
COMPILING_THREADS = 12


def check_interpreter(triton_version: str = triton.__version__, numpy_version: str = np.__version__) -> None:
    """Raise UserError if Triton's interpreter does not run with this numpy: that of 3.6 turns arrays of one
    element into numbers, which numpy 2.4 and newer refuse."""
    release = tuple(map(int, numpy_version.split(".")[:2]))
    if triton_version.startswith("3.6.") and release >= (2, 4):
        raise UserError(
            "TRITON_INTERPRET=1",
            got=f"Triton {triton_version} with numpy {numpy_version}",
            expected="numpy older than 2.4, or Triton 3.7 or newer",
            do="pip install 'numpy<2.4'",
        )


def check_runs_on(what: str, device: torch.device) -> None:
    """Raise UserError if no kernel of this process can read tensors on `device`; any will do for a record."""
    if records_all():
        return
    if INTERPRETED:
        check_interpreter()
        kind, expected = "cpu", "one on the CPU, because TRITON_INTERPRET is set"
        do = "unset it to run on a GPU"
    else:
        kind, expected = "cuda", "one on a CUDA device"
        do = "set TRITON_INTERPRET=1 before Python starts to run the kernels on a CPU, for proof not speed"
    if device.type != kind:
        raise UserError(what, got=f"a tensor on {device}", expected=expected, do=do)


def check_tensor(
    what: str,
    tensor: Tensor,
    *,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:
    """Raise UserError unless the tensor is contiguous, with this shape (None: any size), one of these dtypes,
    and on this device; None: on any on which kernels can run."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.dtype not in dtypes:
        raise UserError(
            f"dtype of {what}",
            got=tensor.dtype,
            expected=" or ".join(map(str, dtypes)),
            do="convert it, or use backend='torch'",
        )
    fits = len(shape) == tensor.ndim and all(n in (None, m) for n, m in zip(shape, tensor.shape, strict=True))
    if not fits:
        sizes = ", ".join("any" if n is None else str(n) for n in shape)
        raise UserError(
            f"shape of {what}", got=list(tensor.shape), expected=f"[{sizes}]", do="check the sizes"
        )
    if device is None:
        check_runs_on(what, tensor.device)
    elif tensor.device != device:
        raise UserError(
            f"device of {what}", got=tensor.device, expected=device, do="move all tensors to one device"
        )
    if not tensor.is_contiguous():
        raise UserError(
            f"layout of {what}",
            got=f"strides {tensor.stride()} for shape {list(tensor.shape)}",
            expected="a contiguous tensor",
            do="call .contiguous() on it",
        )


def architecture(device: torch.device) -> int:
    """Compute capability, 90 for 9.0. In the interpreter that of the newest code path."""
    if INTERPRETED:
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def provide_scratch() -> None:
    """Let the next launches have global memory for the tensor descriptors that they build on the device.

    Each time, since Triton keeps the allocator per context, and a thread of autograd has its own.
    """
    if not INTERPRETED:
        triton.set_allocator(_scratch)


def clock_ns() -> int:
    """The time, after a moment in which the peer that is waited for may have this processor. Only the
    interpreter calls it, at each look at a signal."""
    time.sleep(NAP_S)
    return time.monotonic_ns()


NAP_S = 500e-6
# Triton takes no other functions in a kernel, not even in a branch that it never compiles.
vars(clock_ns)["__triton_builtin__"] = True


class Launch(NamedTuple):
    """A launch that was recorded: kernel[grid](**arguments), options included."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]


@contextmanager
def recorded(*kernels: Any) -> Iterator[list[Launch]]:
    """Inside, launches of these kernels (of all, if none is named) are recorded here, and do not run."""
    launches: list[Launch] = []
    token = _recorder.set((kernels, launches))
    try:
        yield launches
    finally:
        _recorder.reset(token)


_recorder: ContextVar[tuple[tuple[Any, ...], list[Launch]] | None] = ContextVar("recorder", default=None)


def records_all() -> bool:
    """Are all launches recorded now, and none run?"""
    recorder = _recorder.get()
    return recorder is not None and not recorder[0]


def launch(kernel: Any, grid: tuple[int, ...], **options: Any) -> None:
    """kernel[grid](**options), on the device of the first tensor.

    Triton launches on the current device, and torch changes it for its own ops only: without this, tensors on
    cuda:1 with cuda:0 current are an illegal memory access, or a kernel on the wrong GPU's stream.

    With NVSHMEM=True in the options, also all that NVSHMEM needs. Triton may compile a variant for these very
    arguments (their alignment, say), so each launch asks for its variant and introduces it if it is new.
    Raises UserError if there is no bitcode, or NVSHMEM is not initialised or of another version.
    """
    recorder = _recorder.get()
    if recorder is not None and (not recorder[0] or kernel in recorder[0]):
        recorder[1].append(Launch(kernel, grid, options))
        return
    with _linked(options):
        if options.get("NVSHMEM"):
            init_module(kernel.warmup(grid=grid, **options))
        kernel[grid](**options)


def compile_together(launches: Sequence[Launch]) -> None:
    """Compile what these launches need side by side, and load it.

    What does not compile is left to the launch that needs it, which says so.
    """
    with (
        ThreadPoolExecutor(COMPILING_THREADS) as threads,
        triton.AsyncCompileMode(threads, ignore_errors=True),
    ):
        compiled = []
        for record in launches:
            with _linked(record.arguments):
                compiled.append(record.kernel.warmup(grid=record.grid, **record.arguments))
    for kernel in compiled:
        # A kernel of this process is there at once, another one is compiled in the background.
        if isinstance(kernel, triton.FutureKernel):
            kernel = kernel.kernel
        if kernel is not None:
            with suppress(OutOfResources):  # as above
                kernel._init_handles()


@contextmanager
def _linked(options: dict[str, Any]) -> Iterator[None]:
    """Inside, the device of the first tensor is the current one; what may use NVSHMEM gets its bitcode."""
    device = next(_tensors(options.values())).device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if options.get("NVSHMEM"):
            options["extern_libs"] = nvshmem.extern_libs(architecture(device))
        yield


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """All of them, also in tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def small_kernel(nvshmem: bool) -> dict[str, int]:
    """Launch options of a kernel that only talks: one warp, and registers for NVSHMEM's functions.

    Left alone, ptxas 12.9 saves registers for occupancy, down to 32, and they spill.
    """
    return {"num_warps": 1} | ({"maxnreg": 128} if nvshmem else {})


def prepare_once_per_launch() -> None:
    """From now on the interpreter puts its functions into triton.language once per launch, not again at each
    call of a @triton.jit function inside: half the time of a small fused layer. A Triton that prepares in
    another way is left as it is."""
    prepare = getattr(interpreter, "_patch_lang", None)
    scope_type = getattr(interpreter, "_LangPatchScope", None)
    if prepare is None or scope_type is None or hasattr(prepare, "__wrapped__"):
        return
    # All that a kernel, or what it calls, can see of triton.language.
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    prepared = False

    @functools.wraps(prepare)
    def prepare_launch(fn: Callable[..., Any]) -> Any:
        nonlocal prepared
        if prepared:
            return scope_type()
        prepared, scope = True, prepare(everything)
        restore = scope.restore

        def forget_and_restore() -> None:
            nonlocal prepared
            prepared = False
            restore()

        scope.restore = forget_and_restore
        return scope

    interpreter._patch_lang = prepare_launch


if INTERPRETED:
    prepare_once_per_launch()
