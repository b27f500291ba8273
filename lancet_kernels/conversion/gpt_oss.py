"""GPT-OSS: a router with a bias, softmax over the chosen, experts with biases and a clamped SwiGLU.

gate_up_proj [E, D, 2F], gate and up in alternate columns        w1 [L, D, 2F] = [gate | up]
gate_up_proj_bias [E, 2F]                                        b1 [L, 2F]
down_proj [E, F, D], down_proj_bias [E, D]                       w2 [L, F, D], b2 [L, D]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lancet_kernels.conversion.family import Family, Routed, Unsupported
from lancet_kernels.conversion.layouts import Block, ExpertSizes, Layout, Read, Stacked
from lancet_kernels.ops.moe.expert_activation import CLAMP, SLOPE
from lancet_kernels.ops.moe.gates import Gate, TopK


@dataclass(frozen=True)
class Interleaved(Stacked):
    """All experts in four parameters, gate and up in alternate columns."""

    weights = ("w1", "b1", "w2", "b2")
    names: ClassVar[dict[str, str]] = {
        "w1": "gate_up_proj", "b1": "gate_up_proj_bias", "w2": "down_proj", "b2": "down_proj_bias",
    }  # fmt: skip

    def sizes(self, experts: Block) -> ExpertSizes:
        num_experts, d_ff, d_model = experts.down_proj.shape
        return ExpertSizes(num_experts, d_model, d_ff)

    def of_expert(self, read: Read, weight: str, expert: int) -> Tensor:
        value = read(self.names[weight], expert)
        return torch.cat([value[..., ::2], value[..., 1::2]], -1) if weight in ("w1", "b1") else value

    def restore(self, weight: str, value_E: Tensor) -> Iterator[tuple[str, Tensor]]:
        if weight in ("w1", "b1"):
            value_E = torch.stack(value_E.chunk(2, -1), -1).flatten(-2)
        yield self.names[weight], value_E.contiguous()


class GptOss(Family):
    """The block returns the weights of the chosen experts in addition."""

    name = "GPT-OSS"
    blocks = ("GptOssMLP",)
    activation = "clamped-swiglu"
    bias = True
    in_files = Interleaved()

    def gate(self, block: Block) -> Gate:
        return TopK(softmax="after")

    def router(self, block: Block) -> nn.Module:
        return block.router

    def top_k(self, block: Block) -> int:
        return int(block.router.top_k)

    def layout(self, block: Block) -> Layout:
        names = {name for name, _ in block.experts.named_parameters()}
        if names != set(Interleaved.names.values()):
            raise Unsupported(f"its experts have the parameters {', '.join(sorted(names)) or 'none'}")
        return Interleaved()

    def check(self, block: Block) -> None:
        slope, clamp = block.experts.alpha, block.experts.limit
        if (slope, clamp) != (SLOPE, CLAMP):
            raise Unsupported(f"its activation has alpha={slope}, limit={clamp}, not {SLOPE}, {CLAMP}")

    def route(self, block: Block, x_TD: Tensor) -> Routed:
        first, second, *_ = result = block.router(x_TD)
        if len(result) == 3:
            return Routed(first, second)
        # transformers 4.5x: the router returns the weights of the chosen experts and their ids, no logits.
        return Routed(nn.functional.linear(x_TD, block.router.weight, block.router.bias), first)
