"""Do kernels run compiled on a GPU, or in Triton's interpreter on the CPU? May they have these tensors?

TRITON_INTERPRET=1 in the environment, before Triton is imported, selects the interpreter. It is for tests,
not for speed: it runs the same kernels, one program after another, on CPU tensors.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from lancet_kernels.errors import UserError

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


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


# Set while launches are recorded instead of run (`kernel_launch.recorded`): any device will do.
recording = False


def check_runs_on(what: str, device: torch.device) -> None:
    """Raise UserError if no kernel of this process can read tensors on `device`."""
    if recording:
        return
    if INTERPRETED:
        check_interpreter()
    if INTERPRETED and device.type != "cpu":
        raise UserError(
            what,
            got=f"a tensor on {device}",
            expected="one on the CPU, because TRITON_INTERPRET is set",
            do="unset it to run on a GPU",
        )
    if not INTERPRETED and device.type != "cuda":
        raise UserError(
            what,
            got=f"a tensor on {device}",
            expected="one on a CUDA device",
            do="set TRITON_INTERPRET=1 before Python starts to run the kernels on a CPU, for proof not speed",
        )


def check_tensor(
    what: str,
    tensor: Tensor,
    *,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:
    """Raise UserError unless the tensor is contiguous, with this shape (None: any size) and one of these
    dtypes.

    Args: device: of the other tensors of the launch; None: any device on which kernels can run.
    """
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
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise UserError(
            f"shape of {what}", got=list(tensor.shape), expected=f"[{wanted}]", do="check the sizes"
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

    Triton keeps the allocator per context (a thread of autograd has its own), so launchers call this
    each time.
    """
    if not INTERPRETED:
        triton.set_allocator(_scratch)


def clock_ns() -> int:
    """The time. Only the interpreter calls it, at each look at a signal.

    It sleeps for a moment, because the peer that is waited for may need this processor.
    """
    time.sleep(NAP_S)
    return time.monotonic_ns()


NAP_S = 500e-6
# Triton takes no other functions in a kernel, not even in a branch that it never compiles.
vars(clock_ns)["__triton_builtin__"] = True


@functools.cache
def _languages(fn: Callable[..., Any]) -> frozenset[str]:
    """The modules of triton.language that a kernel sees: those the interpreter prepares for it."""
    seen = (value for value in fn.__globals__.values() if inspect.ismodule(value))
    return frozenset(module.__name__ for module in seen if module in (tl, tl.core))


def prepare_once_per_launch() -> None:
    """From now on the interpreter prepares triton.language once per launch, not at every device function.

    As it comes, it looks through all of triton.language and puts its own functions in, at each launch and
    again at each call of a @triton.jit function inside, where they are in already: a large part of the time
    of small kernels. A Triton that prepares in another way is left as it is.
    """
    prepare = getattr(interpreter, "_patch_lang", None)
    scope_type = getattr(interpreter, "_LangPatchScope", None)
    if prepare is None or scope_type is None or hasattr(prepare, "__wrapped__"):
        return
    prepared: set[str] = set()  # by the launch that runs, and by what it has called; empty between launches

    @functools.wraps(prepare)
    def prepare_what_is_not(fn: Callable[..., Any]) -> Any:
        languages = _languages(fn)
        if languages and prepared >= languages:
            return scope_type()
        by_a_launch = not prepared
        scope = prepare(fn)
        prepared.update(languages)
        if by_a_launch:
            restore = scope.restore

            def forget_and_restore() -> None:
                prepared.clear()
                restore()

            scope.restore = forget_and_restore
        return scope

    interpreter._patch_lang = prepare_what_is_not


if INTERPRETED:
    prepare_once_per_launch()
