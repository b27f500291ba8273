"""All experts' products in one launch: forward, dX and dW of the first GEMM, at a perfect balance.

Peers: torch's grouped_mm (16-bit), and a loop of GEMMs, one for each expert.
"""

import pytest
import torch

from lancet_kernels.kernels import grouped_gemm_kernel


@pytest.mark.parametrize("contender", ["ours", "torch grouped_mm", "loop of GEMMs"])
@pytest.mark.parametrize("kernel", ["forward", "dx", "dw"])
def bench_grouped_gemm(measure, workload, device, dtype, kernel, contender) -> None:
    if contender == "torch grouped_mm" and not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip(f"torch {torch.__version__} has no grouped_mm")
    experts, rows, k, n = workload.experts, workload.capacity, workload.width, workload.wide
    x = torch.randn(experts, rows, k, dtype=dtype, device=device)
    dy = torch.randn(experts, rows, n, dtype=dtype, device=device)
    weight = torch.randn(experts, k, n, dtype=dtype, device=device)
    offset = torch.arange(experts + 1, device=device) * rows
    end = offset[1:].to(torch.int32)
    flat_x, flat_dy = x.view(-1, k), dy.view(-1, n)
    transposed = weight.transpose(1, 2)

    def loop(a: torch.Tensor, b: torch.Tensor) -> object:
        return lambda: [torch.mm(a[e], b[e]) for e in range(experts)]

    grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)
    ours = {
        "forward": lambda: grouped_gemm_kernel.grouped_gemm_forward(flat_x, offset, weight),
        "dx": lambda: grouped_gemm_kernel.grouped_gemm_dx(flat_dy, offset, weight),
        "dw": lambda: grouped_gemm_kernel.grouped_gemm_dw(flat_x, flat_dy, offset),
    }
    torch_ones = {
        "forward": lambda: grouped_mm(flat_x, weight, offs=end),
        "dx": lambda: grouped_mm(flat_dy, transposed, offs=end),
        "dw": lambda: grouped_mm(flat_x.t(), flat_dy, offs=end),
    }
    loops = {"forward": loop(x, weight), "dx": loop(dy, transposed), "dw": loop(x.transpose(1, 2), dy)}
    runs = {"ours": ours, "torch grouped_mm": torch_ones, "loop of GEMMs": loops}
    measure(
        runs[contender][kernel],
        group=f"grouped GEMM {kernel}",
        name=contender,
        ours=contender == "ours",
        workload=workload,
        flops=2.0 * experts * rows * k * n,
        moved_bytes=dtype.itemsize * experts * (rows * (k + n) + k * n),
    )
