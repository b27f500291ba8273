"""The fused launches of a layer on one GPU: right first, then how fast beside the products alone.

One PE on all of the GPU: rows travel within its memory. Beside each direction stand the same matrix products,
without activation and rows that travel: torch's `grouped_mm`, and quack's where it can be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bench.gpu.gpu_report import letters, ratio, spread
from bench.peers import Absent, quack_gemm
from lancet_kernels import ops
from lancet_kernels.kernels.overlap import default_overlap_config
from lancet_kernels.kernels.overlap_data import SavedPass
from lancet_kernels.measuring.fused_pass import FusedPasses
from lancet_kernels.measuring.timing import Clock
from lancet_kernels.ops.moe.expert_activation import activate
from lancet_kernels.tuning.workloads import WORKLOADS, Workload

FUSED, TORCH, QUACK = "lancet_kernels, fused", "torch grouped_mm", "quack"
DIRECTIONS = ("forward", "backward")
# Relative to the largest value, in bf16.
DIFFERENCE_ALLOWED = 2e-2
SIZES = (
    *(WORKLOADS[name] for name in ("wide", "fine-grained", "middle")),
    replace(WORKLOADS["gpt2-s-moe"], name="paper"),
)
# In the interpreter every task of a pass takes milliseconds, whatever its size: few experts.
SMOKE = (Workload("smoke", 16, 16, 32, 2, 2), Workload("smoke swiglu", 16, 16, 32, 2, 2, "swiglu"))


class FusedLayer:
    """The passes of the sizes, and their rows sorted by expert, as grouped GEMMs want them.

    Attributes:
        absent: who cannot take part, and why.
    """

    def __init__(self, sizes: Workload, device: torch.device, dtype: torch.dtype) -> None:
        self.sizes, self.passes = sizes, FusedPasses(sizes, dtype, device)
        self.config = default_overlap_config(sizes.width, sizes.hidden, sizes.activation, dtype, device)
        routing = self.passes.routing
        self.count = routing.count[None]
        self.choice = routing.choice[: int(self.count.sum())].long()
        self.token = self.choice // sizes.choices
        self.x, self.dy = self.passes.x[self.token], self.passes.dy[self.token]
        self.pre = self.x.new_zeros(len(self.token), sizes.wide)
        self.hidden = self.x.new_zeros(len(self.token), sizes.hidden)
        self.dw1, self.dw2 = (torch.empty_like(w) for w in (self.passes.experts.w1, self.passes.experts.w2))
        self.absent: dict[str, str] = {}
        self._quack: Callable | None = None
        try:
            self._quack = quack_gemm(device)
        except Absent as error:
            self.absent[QUACK] = str(error)

    def right(self) -> Tensor:
        """What the forward should give, float32, from the products of torch."""
        experts, routing = self.passes.experts, self.passes.routing
        pre = ops.grouped_gemm(self.x, self.count, experts.w1, None)
        hidden = activate(pre.float(), self.sizes.activation).to(pre.dtype)
        y = ops.grouped_gemm(hidden, self.count, experts.w2, None).float()
        weight = routing.weight.reshape(-1)[self.choice, None]
        return torch.zeros_like(self.passes.x, dtype=torch.float32).index_add_(0, self.token, y * weight)

    def products(self, direction: str) -> dict[str, Callable[[], object]]:
        """By contender."""
        experts, x, dy, pre, hidden = self.passes.experts, self.x, self.dy, self.pre, self.hidden
        w1, w2, count, quack = experts.w1, experts.w2, self.count, self._quack
        offset = torch.cat([count.new_zeros(1), count[0].cumsum(0)]).to(torch.int32)

        def by_torch() -> object:
            if direction == "forward":
                return ops.grouped_gemm(x, count, w1, None), ops.grouped_gemm(hidden, count, w2, None)
            dx = ops.grouped_gemm_dx(dy, count, w2), ops.grouped_gemm_dx(pre, count, w1)
            return dx, ops.grouped_gemm_dw(hidden, dy, count), ops.grouped_gemm_dw(x, pre, count)

        def by_quack(quack: Callable[..., object]) -> None:
            if direction == "forward":
                quack(x, w1, out=pre, cu_seqlens_m=offset)
                quack(hidden, w2, out=dy, cu_seqlens_m=offset)
                return
            quack(dy, w2.transpose(1, 2), out=hidden, cu_seqlens_m=offset)
            quack(pre, w1.transpose(1, 2), out=x, cu_seqlens_m=offset)
            quack(hidden.t(), dy, out=self.dw2, cu_seqlens_k=offset)
            quack(x.t(), pre, out=self.dw1, cu_seqlens_k=offset)

        return {TORCH: by_torch} | ({} if quack is None else {QUACK: partial(by_quack, quack)})

    def try_peers(self) -> None:
        """Each once: what fails here takes no part."""
        for direction in DIRECTIONS:
            if self._quack is not None:
                try:
                    self.products(direction)[QUACK]()
                except Exception as error:
                    self.absent[QUACK] = f"failed: {type(error).__name__}: {error}"
                    self._quack = None

    def rehearse(self) -> None:
        """What makes the kernels compile."""
        self.passes.forward_backward(self.config)


def measure(clock: Clock, layer: FusedLayer, rounds: int, warmup: int) -> Iterator[dict]:
    """A figure for each direction."""
    passes, config, sizes = layer.passes, layer.config, layer.sizes
    right = layer.right()
    difference = float((passes.forward(config).float() - right).abs().max() / right.abs().max())
    layer.try_peers()
    saved: list[SavedPass] = []
    runs: dict[tuple[str, str], Callable[[], object]] = {
        ("forward", FUSED): lambda: saved.append(passes.begin(config)[1]),
        ("backward", FUSED): lambda: passes.backward(config, saved.pop()),
    }
    for direction in DIRECTIONS:
        runs |= {(direction, who): run for who, run in layer.products(direction).items()}
    times = clock.rounds(runs, rounds, warmup)
    for exchange in passes.exchanges(config):
        exchange.check()
    flops = 2.0 * len(layer.token) * sizes.width * (sizes.wide + sizes.hidden)
    for direction in DIRECTIONS:
        ms = {who: values for (of, who), values in times.items() if of == direction}
        work = flops * (1 if direction == "forward" else 2)
        yield {
            "figure": f"fused launch, {direction}",
            "sizes": letters(sizes),
            "name": sizes.name,
            "ms": {who: spread(values) for who, values in ms.items()},
            "tflops": {who: work / spread(values)["median"] * 1e-9 for who, values in ms.items()},
            "largest_difference": difference,
            "difference_allowed": DIFFERENCE_ALLOWED,
            "absent": layer.absent,
            "ratios": [ratio(f"rate over {who}", ms[FUSED], ms[who]) for who in ms if who != FUSED],
        }
