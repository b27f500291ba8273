"""Two programs for an H100 on a machine without a GPU, run by test_rehearsal.py: a rehearsal; and, with the
argument "variants", the variants of kernels that passes ask for.

A driver that is there in name only lets Triton compile for sm_90; loading is noted instead of done.
"""

import json
import sys
from dataclasses import replace

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class NoGpu:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def virtual_run():
    """Two PEs with the plain kernel as a GPU has it."""
    from lancet_kernels.kernels import runtime
    from lancet_kernels.kernels.overlap_config import overlap_tile
    from tests.lancet_kernels.kernels import virtual_pass
    from tests.lancet_kernels.kernels.overlap_cases import Case

    runtime.check_device = lambda what, tensor: None
    default = virtual_pass.default_overlap_config
    tile = overlap_tile(torch.bfloat16, 90)
    virtual_pass.default_overlap_config = lambda *args, **named: replace(
        default(*args, **named), gemm=tile, programs=66, tma=True
    )
    case = Case(world=2, tokens=40, capacity=30, width=64, hidden=32, dtype=torch.bfloat16)
    return virtual_pass.VirtualPass(case, torch.device("cpu"))


def rehearse() -> dict:
    from lancet_kernels.kernels.protocol.exchange import release_kernel
    from lancet_kernels.kernels.rehearsal import rehearsal

    loaded = []
    CompiledKernel._init_handles = lambda kernel: loaded.append(kernel)
    run = virtual_run()
    with rehearsal(release_kernel):
        for _ in range(2):
            run.pes.each(run.play)
    return {
        "launches": [kernel.name for kernel in loaded],
        "kernels": sorted({(kernel.name, kernel.hash): kernel.name for kernel in loaded}.values()),
        "sent": not all(bool(exchange.rows.local.isnan().all()) for exchange in run.exchanges),
        "epochs": [int(layer.forward._epoch) for layer in run.layers],
    }


def variants() -> dict:
    """Those of the first pass of a layer; and those of later ones, open at once, and of another layer."""
    from lancet_kernels.kernels.kernel_launch import compile_launch, recorded

    def asked_for(play) -> list:
        asked = set()
        JITFunction._do_compile = lambda kernel, key, *_: asked.add(f"{kernel.fn.__name__} {key}")
        with recorded() as launches:
            play()
        for launch in launches:
            compile_launch(launch)
        return sorted(asked)

    run, other = virtual_run().layers[0], virtual_run().layers[1]

    def later() -> None:
        for layer in (run, other):
            passes = [layer.run_forward() for _ in range(layer.forward.passes)]
            assert len({saved.use.place for _, saved in passes}) == 2
            for _, saved in passes:
                layer.run_backward(saved)

    return {"first": asked_for(run.run), "later": asked_for(later)}


if __name__ == "__main__":
    driver.set_active(NoGpu())
    print(json.dumps(variants() if "variants" in sys.argv else rehearse()))
