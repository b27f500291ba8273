"""The grouped GEMM ops on a GPU, by torch's grouped_mm and expert by expert, against float64."""

import pytest
import torch

from lancet_kernels import ops

pytestmark = pytest.mark.gpu
COUNTS = torch.tensor([[0, 0, 30, 64], [20, 0, 1, 64]])


def results(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """y, dx, dw, dbias, in float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    rows = int(COUNTS.sum())
    x = randn(rows, 48)
    weight, bias = randn(4, 48, 72), randn(4, 72)
    dy = randn(rows, 72)
    # Values that bfloat16 has too, so that all dtypes start alike.
    x, weight, bias, dy = (t.bfloat16().to(device, dtype) for t in (x, weight, bias, dy))
    count = COUNTS.to(device)
    found = [
        ops.grouped_gemm(x, count, weight, bias),
        ops.grouped_gemm_dx(dy, count, weight),
        ops.grouped_gemm_dw(x, dy, count),
        ops.grouped_gemm_dbias(dy, count),
    ]
    return [t.double().cpu() for t in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_against_float64(dtype):
    exact, here, there = results("cpu", torch.float64), results("cpu", dtype), results("cuda", dtype)
    for name, right, cpu, gpu in zip(("y", "dx", "dw", "dbias"), exact, here, there, strict=True):
        scale = right.abs().max()
        allowed = 3 * float((cpu - right).abs().max() / scale) + torch.finfo(dtype).eps + 1e-6
        off = float((gpu - right).abs().max() / scale)
        assert off <= allowed, f"{name}: off by {off:.2e}, allowed {allowed:.2e}"
