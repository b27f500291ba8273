"""The real launches of a pass, on a driver that notes them and runs nothing: a program, run by a test.

It prints what was launched, as JSON. Triton compiles for sm_90, makes its launchers and calls them; tensors
are on the CPU. Needs a C compiler, and the variables that `build` returns.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")


def build(folder: Path) -> dict[str, str]:
    """Compile the driver into the folder. -> variables of a process that is to have it."""
    from triton.backends import nvidia

    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    include = Path(nvidia.__file__).parent / "include"
    library = folder / "libcuda.so.1"
    command = [compiler, "-O1", "-shared", "-fPIC", f"-I{include}", HERE / "stub_libcuda.c", "-o", library]
    subprocess.run(command, check=True)
    libraries = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    return {
        "STUB_LOG": str(folder / "log"), "TRITON_LIBCUDA_PATH": str(folder), "LD_LIBRARY_PATH": libraries,
        "TRITON_INTERPRET": "0",
    }  # fmt: skip


def pretend() -> list[int]:
    """Let torch and Triton take the driver for an H100. -> sizes of the scratch that they get."""
    import torch
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    from lancet_kernels.kernels import runtime

    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    driver = CudaDriver()
    driver.get_current_device = lambda: 0
    driver.set_current_device = lambda device: None
    driver.get_current_stream = lambda device: 0
    driver.get_device_capability = lambda device=None: (9, 0)
    triton.runtime.driver.set_active(driver)
    asked: list[int] = []

    def scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        asked.append(size)
        return torch.empty(size, dtype=torch.int8)

    runtime._scratch = scratch
    runtime.check_runs_on = lambda what, device: None
    torch.set_num_threads(1)
    return asked


def layers():
    """A layer of each PE, for the Hopper kernel."""
    import torch

    from lancet_kernels.kernels.config import OverlapConfig
    from lancet_kernels.kernels.symmetric import virtual_memories
    from tests.lancet_kernels.kernels.overlap_cases import Case
    from tests.lancet_kernels.kernels.overlap_ranks import virtual_layers

    case = Case(
        tokens=64, capacity=64, width=128, hidden=192, activation="swiglu", bias=False, dtype=torch.bfloat16
    )
    config = OverlapConfig.for_gpu(case.width, case.hidden, case.dtype, 90, 132 // case.world)
    return virtual_layers(virtual_memories(case.world), case, config, 8.0)


def launches() -> dict:
    """A warm-up, a pass, and passes that should need no other kernel."""
    asked = pretend()
    from lancet_kernels.kernels.hopper.kernel import gluon_overlap_kernel
    from lancet_kernels.kernels.overlap import variants, warm_up
    from lancet_kernels.kernels.runtime import recorded

    log = Path(os.environ["STUB_LOG"])

    def noted(call: Callable[[], object]) -> list[str]:
        before = len(log.read_text()) if log.exists() else 0
        call()
        return log.read_text()[before:].splitlines()

    layer, other = layers()

    def warm_up_all() -> None:
        for each in (layer, other, layer):
            warm_up(each.forward, each.backward, each.x, each.routing, each.experts, each.config)

    result: dict = {"warmed_up": noted(warm_up_all), "variants": variants()}
    result["epochs"] = [int(each.forward._epoch) for each in (layer, other)]
    kernels = [k for cache in gluon_overlap_kernel.device_caches.values() for k in cache[0].values()]
    result["scratch"] = [k.metadata.global_scratch_size * 66 for k in kernels]
    del asked[:]
    result["pass"] = noted(layer.run)
    result["asked"] = [*asked]
    with recorded(gluon_overlap_kernel) as recorded_launches:
        _, saved = layer.run_forward()
    (launch,) = recorded_launches
    of_kernel = [
        re.search(r"\.entry gluon_overlap_kernel\((.*?)\)", k.asm["ptx"], re.DOTALL) for k in kernels
    ]
    os.environ["STUB_PARAMETERS"] = str(min(entry[1].count(".param") for entry in of_kernel))
    lines = noted(lambda: launch.kernel[launch.grid](**launch.arguments))
    del os.environ["STUB_PARAMETERS"]
    result["parameters"] = [int(word, 16) for word in lines[-1].split()[5:]]
    given = launch.arguments
    named = (*given["of_pass"], *given["arrivals"], *given["returns"], *given["sending"], *given["gemms"])
    result["pointers"] = [tensor.data_ptr() for tensor in named if tensor is not None]
    layer.run_backward(saved)

    def more() -> None:
        """Two open passes, the other PE, a second layer."""
        saved = [layer.run_forward()[1] for _ in range(2)]
        for each in reversed(saved):
            layer.run_backward(each)
        other.run()
        layers()[0].run()

    result["more"] = noted(more)
    result["variants after more"] = variants()
    return result


if __name__ == "__main__":
    print(json.dumps(launches()), flush=True)
