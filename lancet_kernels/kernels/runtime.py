"""Whether kernels run compiled on a GPU, or in Triton's interpreter on the CPU.

TRITON_INTERPRET=1 in the environment, before Triton is imported, selects the interpreter. It is for tests,
not for speed: it runs the same kernels, one program after another, on CPU tensors.
"""

import time

import numpy as np
import torch
import triton

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.interpreter import prepare_once_per_launch

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

if INTERPRETED:
    prepare_once_per_launch()


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


def check_device(what: str, tensor: torch.Tensor) -> None:
    """Raise UserError if no kernel can run on the device of `tensor` in this process."""
    check_runs_on(what, tensor.device)


def check_runs_on(what: str, device: torch.device) -> None:
    """The same for what will be on a device."""
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
