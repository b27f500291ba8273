"""Ops on a GPU, where Triton kernels run them: what the CPU gives, and the host waits only where it must."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from lancet_kernels import ops
from lancet_kernels.ops.moe.gates import GATES, parse_gate

pytestmark = pytest.mark.gpu
TOKENS, EXPERTS, CAPACITY, WIDTH = 333, 8, 70, 48


@contextmanager
def host_never_waits() -> Iterator[None]:
    """Inside, whatever makes the host wait for the device raises RuntimeError."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def routing_of(name: str, device: str) -> tuple[torch.Tensor, ...]:
    gate = parse_gate(name)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    given = (
        logits if gate.uses_logits else None,
        torch.zeros(EXPERTS, dtype=torch.int64),
        torch.arange(TOKENS) if gate.key else None,
        torch.linspace(-0.2, 0.2, EXPERTS) if gate.uses_correction_bias else None,
    )
    there = [None if t is None else t.to(device) for t in given]
    top_k = 1 if gate.name == "switch" else 2
    if device == "cpu":
        return ops.gate(*there, name, top_k, CAPACITY)
    ops.gate(*there, name, top_k, CAPACITY)  # compiles
    with host_never_waits():
        return ops.gate(*there, name, top_k, CAPACITY)


@pytest.mark.parametrize("name", GATES)
def test_gate(name):
    expert, slot, weight, used = (t.cpu() for t in routing_of(name, "cuda"))
    here = routing_of(name, "cpu")
    if name not in ("batch-prioritized", "expert-choice"):
        # Those two order tokens by a softmax, whose last bit may differ.
        assert torch.equal(expert, here[0])
        assert torch.equal(slot, here[1])
        torch.testing.assert_close(weight, here[2], rtol=1e-5, atol=1e-6)
    assert torch.equal(used, here[3])


@pytest.mark.parametrize("kind", ["gelu", "silu", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_through_the_experts_and_back(kind, dtype):
    expert, slot, weight, used = routing_of("topk", "cpu")
    count = ops.kept_counts(used, CAPACITY, 1)
    generator = torch.Generator().manual_seed(1)
    randn = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()  # noqa: E731
    x, dy = randn(TOKENS, WIDTH), randn(TOKENS, WIDTH)
    wide = 2 * WIDTH if kind == "swiglu" else WIDTH
    w1, w2 = 0.1 * randn(EXPERTS, WIDTH, wide), 0.1 * randn(EXPERTS, WIDTH, WIDTH)

    def through(x, dy, weight, w1, w2, expert, slot, count):
        row = ops.send_rows(expert, slot, count)
        most = min(row.numel(), EXPERTS * CAPACITY)
        sent = ops.dispatch(x, row, None, most)
        h = ops.grouped_gemm(sent, count, w1, None)
        a = ops.expert_activation(h, count, kind)
        back = ops.grouped_gemm(a, count, w2, None)
        y = ops.combine(back, row, weight)
        dback = ops.dispatch(dy, row, weight, most)
        dweight = ops.combine_dweight(dy, back, row)
        da = ops.grouped_gemm_dx(dback, count, w2)
        dh = ops.expert_activation_backward(da, h, count, kind)
        dw1, dw2 = ops.grouped_gemm_dw(sent, dh, count), ops.grouped_gemm_dw(a, dback, count)
        dx = ops.combine(ops.grouped_gemm_dx(dh, count, w1), row, None)
        return y, dweight, dw1, dw2, dx

    def on(device, dtype):
        floats = [t.to(device, dtype) for t in (x, dy)] + [weight.to(device)]
        floats += [t.to(device, dtype) for t in (w1, w2)]
        given = (*floats, expert.to(device), slot.to(device), count.to(device))
        if device == "cuda":
            through(*given)  # compiles
            # torch's grouped_mm reads counts on the device, in bfloat16 and since Hopper.
            waits = dtype != torch.bfloat16 or torch.cuda.get_device_capability() < (9, 0)
            with nullcontext() if waits else host_never_waits():
                return through(*given)
        return through(*given)

    exact, here, there = on("cpu", torch.float64), on("cpu", dtype), on("cuda", dtype)
    assert_as_good_as_the_cpu(("y", "dweight", "dw1", "dw2", "dx"), exact, here, there, dtype)


def assert_as_good_as_the_cpu(names, exact, here, there, dtype: torch.dtype) -> None:
    """Errors are at most three times as large as those of the CPU in the same dtype, and a rounding."""
    for name, right, cpu, gpu in zip(names, exact, here, there, strict=True):
        scale = right.abs().max()
        allowed = 3 * float((cpu - right).abs().max() / scale) + torch.finfo(dtype).eps + 1e-6
        off = float((gpu.cpu() - right).abs().max() / scale)
        assert off <= allowed, f"{name}: off by {off:.2e}, allowed {allowed:.2e}"


COUNTS = torch.tensor([[0, 0, 30, 64], [20, 0, 1, 64]])


def grouped_gemms(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
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
def test_grouped_gemms(dtype):
    """By torch's grouped_mm and expert by expert."""
    exact, here, there = (
        grouped_gemms("cpu", torch.float64),
        grouped_gemms("cpu", dtype),
        grouped_gemms("cuda", dtype),
    )
    assert_as_good_as_the_cpu(("y", "dx", "dw", "dbias"), exact, here, there, dtype)
