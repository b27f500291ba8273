"""The paced measurements rehearsed for an H100 on a machine without a GPU: run by test_rehearse_paced.py.

Torch's part runs on the CPU, small; every launch of ours compiles for sm_90 and is not done.
"""

import json
from dataclasses import replace

import torch
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from tests.lancet_kernels.kernels.rehearse_without_gpu import NoGpu


def main() -> None:
    driver.set_active(NoGpu())
    loaded = []
    CompiledKernel._init_handles = lambda kernel: loaded.append(kernel)

    import gpu_overlap
    from gpu_paced import PacedLayer
    from gpu_sizes import Sizes, choices_of_tokens
    from gpu_step import Step
    from gpu_wire import JITTED
    from virtual_pes import rehearsal

    from lancet_kernels.kernels import overlap_checks, runtime
    from lancet_kernels.kernels.exchange import release_kernel
    from lancet_kernels.kernels.overlap_config import overlap_tile
    from lancet_kernels.kernels.overlap_data import Routing
    from lancet_kernels.kernels.overlap_tiles import write_dense_row_kernel
    from lancet_kernels.ops.gates.slots import slots_in_token_order
    from lancet_kernels.ops.send_rows import send_rows
    from lancet_kernels.training.models import ModelConfig

    def route(self: gpu_overlap.FusedLayer, tokens: int, rank: int) -> Routing:
        """Without kernels."""
        sizes = self.sizes
        expert = choices_of_tokens(tokens, sizes.experts, sizes.choices, self.device, seed=rank)
        slot, used = slots_in_token_order(expert, torch.zeros(sizes.experts, dtype=torch.int64))
        count = used.clamp(max=self.capacity)
        return Routing.of(expert, send_rows(expert, slot, count), torch.ones(expert.shape), count)

    gpu_overlap.FusedLayer._route = route
    runtime.check_device = lambda what, tensor: None
    overlap_checks.check_routing = lambda routing: None
    default, tile = gpu_overlap.default_overlap_config, overlap_tile("gelu", torch.bfloat16, 90)
    gpu_overlap.default_overlap_config = lambda *args, **named: replace(
        default(*args, **named), gemm=tile, programs=66, comm_programs=8, tma=True
    )
    sizes, place = Sizes("small", 64, 64, 256, 8, 1), (2, torch.device("cpu"), torch.bfloat16)
    with rehearsal(release_kernel, write_dense_row_kernel, *JITTED):
        layer = PacedLayer(sizes, *place)
        layer.virtual.each(layer.passes)
        model = ModelConfig("small", layers=4, width=64, heads=2, sequence=16, vocab=100)
        Step(model, sizes, *place).rehearse()
    kernels = {(kernel.name, kernel.hash): kernel for kernel in loaded}.values()
    found = {
        "kernels": sorted(kernel.name for kernel in kernels),
        "with a clock": sorted(k.name for k in kernels if "%globaltimer" in k.asm["ptx"]),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
