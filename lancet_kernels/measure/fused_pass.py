"""Times only the fused kernels of a layer, without gate and parameters, for layer sizes that other libraries
report, and those of the Lancet paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import symmetric
from lancet_kernels.kernels.config import ACTIVATIONS, OverlapConfig
from lancet_kernels.kernels.overlap import (
    ExpertGradients,
    Experts,
    Routing,
    SavedPass,
    moe_backward,
    moe_forward,
)
from lancet_kernels.kernels.protocol.exchange import Exchange
from lancet_kernels.ops.moe.dispatch import kept_counts, send_rows
from lancet_kernels.ops.moe.router import gate


@dataclass(frozen=True)
class Workload:
    """An MoE layer on one rank.

    Attributes: tokens T here, width D, hidden F, experts E in all, choices K, activation of the experts.
    """

    name: str
    tokens: int
    width: int
    hidden: int
    experts: int
    choices: int
    activation: str = "gelu"

    @property
    def wide(self) -> int:
        """Columns of the first weight: F, for swiglu 2F."""
        return 2 * self.hidden if self.activation == "swiglu" else self.hidden

    @property
    def capacity(self) -> int:
        """C of a perfect balance: T * K / E, rounded up."""
        return -(-self.tokens * self.choices // self.experts)

    def small(self) -> Workload:
        """The same kind of layer in a size for the interpreter: a pass takes a second instead of an hour."""
        experts, choices = min(self.experts, 4), min(self.choices, 2)
        return replace(self, tokens=32, width=32, hidden=32, experts=experts, choices=choices)

    def __str__(self) -> str:
        sizes = f"T{self.tokens} D{self.width} F{self.hidden} E{self.experts} K{self.choices}"
        return f"{self.name} ({sizes} {self.activation})"


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("wide", 32768, 4096, 1024, 64, 4, "swiglu"),
        Workload("fine-grained", 40960, 768, 256, 128, 8, "swiglu"),
        Workload("middle", 24576, 1536, 512, 64, 4, "swiglu"),
        # 24 and 8 sequences of 512 tokens: the paper's batch on A100 (small), on V100 (large).
        Workload("gpt2-s-moe", 12288, 768, 3072, 16, 1),
        Workload("gpt2-l-moe", 4096, 1024, 4096, 16, 1),
    )
}


def parse_workload(text: str) -> Workload:
    """A name of WORKLOADS, or `T,D,F,E,K` with an activation after it if it is not gelu.

    Example: `8192,1024,4096,16,2,swiglu`. Raises UserError for anything else.
    """
    if text in WORKLOADS:
        return WORKLOADS[text]
    *sizes, last = text.split(",")
    activation = last if last in ACTIVATIONS else "gelu"
    numbers = sizes if activation == last else [*sizes, last]
    if len(numbers) != 5 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise UserError(
            "workload",
            got=repr(text),
            expected=f"one of {', '.join(WORKLOADS)}, or T,D,F,E,K[,activation]",
            do="give five numbers, for example 8192,1024,4096,16,2",
        )
    tokens, width, hidden, experts, choices = map(int, numbers)
    if choices > experts:
        raise UserError("workload", got=repr(text), expected="K at most E", do="lower the number of choices")
    return Workload("given", tokens, width, hidden, experts, choices, activation)


# Short, so that a peer that fails does not delay tuning for long.
TIMEOUT_S = 20.0


def most_rows(workload: Workload, world: int) -> dict[str, int]:
    """Room for any routing of the workload's tokens on `world` ranks."""
    sent = workload.tokens * workload.choices
    each = min(workload.capacity, workload.tokens) * (workload.experts // world)
    return {"send_rows": sent, "receive_rows": world * min(sent, each)}


class FusedPasses:
    """Random rows, routing and experts of a workload on this rank. The constructor and each pass are
    collective."""

    def __init__(self, workload: Workload, dtype: torch.dtype, device: torch.device) -> None:
        self.workload, self.dtype, self.device = workload, dtype, device
        self.memory = symmetric.create(None, device, TIMEOUT_S)
        self.local_experts = workload.experts // self.memory.world
        self._generator = torch.Generator(device).manual_seed(self.memory.rank)
        self.experts = Experts(
            self._random(self.local_experts, workload.width, workload.wide),
            None,
            self._random(self.local_experts, workload.hidden, workload.width),
            None,
            workload.activation,
        )
        self.route(workload.tokens, workload.capacity)
        self._exchanges: dict[int, tuple[Exchange, Exchange]] = {}

    def _random(self, *shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=self._generator, device=self.device, dtype=torch.float32)
        return (values * 0.1).to(self.dtype)

    def route(self, tokens: int, capacity: int, skew: float = 0.0) -> None:
        """Draw new tokens for this rank, at most `workload.tokens`; an expert takes at most `capacity`.

        skew: 0: experts are equally likely; the larger, the more tokens go to the first ones.
        """
        w = self.workload
        self.x, self.dy = (self._random(tokens, w.width) for _ in range(2))
        score = self._random(tokens, w.experts).float()
        score -= 0.1 * skew * torch.arange(1, w.experts + 1, device=self.device).log()
        used = torch.zeros(w.experts, dtype=torch.int64, device=self.device)
        expert, slot, weight, used = gate(score, used, None, None, "topk", w.choices, capacity)
        kept = kept_counts(used, capacity, 1).view(-1)
        self.routing = Routing.of(expert, send_rows(expert, slot, kept), weight, kept)

    def exchanges(self, config: OverlapConfig) -> tuple[Exchange, Exchange]:
        """Forward and backward exchange; configurations with the same rows per signal share them."""
        rows = config.gemm.block_m
        if rows not in self._exchanges:
            sizes: dict[str, Any] = {
                "local_experts": self.local_experts,
                **most_rows(self.workload, self.memory.world),
                "width": self.workload.width,
                "dtype": self.dtype,
                "chunk_rows": rows,
                "timeout_s": TIMEOUT_S,
            }
            forward, backward = (
                Exchange(self.memory, f"{name}{rows}", **sizes) for name in ("forward", "backward")
            )
            self._exchanges[rows] = forward, backward
        return self._exchanges[rows]

    def begin(self, config: OverlapConfig) -> tuple[torch.Tensor, SavedPass]:
        """A forward pass; `backward` must follow."""
        exchange, _ = self.exchanges(config)
        return moe_forward(exchange, self.x, self.routing, self.experts, config)

    def forward_backward(self, config: OverlapConfig) -> ExpertGradients:
        """One forward and its backward pass."""
        _, saved = self.begin(config)
        return self.backward(config, saved)

    def backward(self, config: OverlapConfig, saved: SavedPass) -> ExpertGradients:
        """The backward of a pass of `begin`."""
        forward, backward = self.exchanges(config)
        gradients = moe_backward(forward, saved, backward, self.dy, self.routing, self.experts, config)
        forward.release(saved.opened)
        for exchange in (forward, backward):
            exchange.watch()
        return gradients
