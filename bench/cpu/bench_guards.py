"""What it costs to check, at every call of an optimized module, that its plan still holds."""

import time

import torch
from torch import nn

import lancet_kernels
from lancet_kernels import MoELayer


class Step(nn.Module):
    """A small step: a few blocks of width 64 with experts, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        block = (nn.Linear(64, 64), nn.GELU(), MoELayer(64, 128, 4, top_k=2, gate="topk"), nn.LayerNorm(64))
        self.blocks = nn.Sequential(*block)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.blocks(x) - target).square().mean()


def bench_guards(benchmark) -> None:
    """`share_of_step` in extra_info: the check over the step, forward and backward. -s shows it."""
    torch.manual_seed(0)
    inputs = torch.randn(8, 128, 64), torch.randn(8, 128, 64)
    step = lancet_kernels.optimize(Step(), inputs, cluster="p3dn")

    def train() -> None:
        step.zero_grad(set_to_none=True)
        step(*inputs).backward()

    train()
    seconds = []
    for _ in range(20 if benchmark.enabled else 1):
        begin = time.perf_counter()
        train()
        seconds.append(time.perf_counter() - begin)
    assert not step.fallbacks
    shapes = step._shapes
    assert shapes is not None
    assert benchmark(shapes.step_for, (inputs, {})) is shapes.first
    step_s = sorted(seconds)[len(seconds) // 2]
    benchmark.extra_info["step_ms"] = 1e3 * step_s
    if benchmark.enabled:
        share = benchmark.extra_info["share_of_step"] = benchmark.stats.stats.median / step_s
        print(f"guards: {share:.2%} of a step of {1e3 * step_s:.1f} ms")
