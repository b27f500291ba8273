"""A rehearsal for an H100 on a machine without a GPU: a program, run by test_rehearsal.py.

A driver that is there in name only lets Triton compile for sm_90; loading is noted instead of done.
"""

import json
from dataclasses import replace

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver


class NoGpu:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main() -> None:
    driver.set_active(NoGpu())
    loaded = []
    CompiledKernel._init_handles = lambda kernel: loaded.append(kernel)

    from lancet_kernels.kernels import runtime
    from lancet_kernels.kernels.overlap_config import overlap_tile
    from lancet_kernels.kernels.protocol.exchange import release_kernel
    from lancet_kernels.kernels.rehearsal import rehearsal
    from tests.lancet_kernels.kernels import virtual_pass
    from tests.lancet_kernels.kernels.overlap_cases import Case

    runtime.check_device = lambda what, tensor: None
    default = virtual_pass.default_overlap_config
    tile = overlap_tile(torch.bfloat16, 90)
    virtual_pass.default_overlap_config = lambda *args, **named: replace(
        default(*args, **named), gemm=tile, programs=66, tma=True
    )
    case = Case(world=2, tokens=40, capacity=30, width=64, hidden=32, dtype=torch.bfloat16)
    run = virtual_pass.VirtualPass(case, torch.device("cpu"))
    with rehearsal(release_kernel):
        for _ in range(2):
            run.pes.each(run.play)
    found = {
        "launches": [kernel.name for kernel in loaded],
        "kernels": sorted({(kernel.name, kernel.hash): kernel.name for kernel in loaded}.values()),
        "sent": not all(bool(exchange.rows.local.isnan().all()) for exchange in run.exchanges),
        "epochs": [int(layer.forward._epoch) for layer in run.layers],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
