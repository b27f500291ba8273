"""Families whose router takes the k largest softmax probabilities: Mixtral, OLMoE, Qwen3-MoE, Qwen2-MoE."""

from __future__ import annotations

import torch
from torch import Tensor

from lancet_kernels.conversion.family import Family, Unsupported, setting
from lancet_kernels.conversion.layouts import Block, Listed
from lancet_kernels.ops.moe.gates import Gate, TopK


class _Softmax(Family):
    def choices(self, *chosen: Tensor) -> tuple[Tensor, Tensor] | None:
        weight_TK, expert_TK = chosen
        return expert_TK, weight_TK


class Mixtral(_Softmax):
    """Weights of the chosen experts sum to 1."""

    name = "Mixtral"
    blocks = ("MixtralSparseMoeBlock",)
    in_files = Listed("w1", "w3", "w2")
    block_in_files = "block_sparse_moe"

    def gate(self, block: Block) -> Gate:
        return TopK(renormalize=True)

    def check(self, block: Block) -> None:
        super().check(block)
        if getattr(block, "jitter_noise", 0):
            raise Unsupported(f"router_jitter_noise={block.jitter_noise} (set it to 0 in the config)")


class Olmoe(_Softmax):
    """The weights are renormalized if the config says so."""

    name = "OLMoE"
    blocks = ("OlmoeSparseMoeBlock",)

    def gate(self, block: Block) -> Gate:
        return TopK(renormalize=bool(setting(block, "norm_topk_prob")))


class Qwen3Moe(Olmoe):
    """Routed like OLMoE."""

    name = "Qwen3-MoE"
    blocks = ("Qwen3MoeSparseMoeBlock",)


class Qwen2Moe(Olmoe):
    """Routed like OLMoE, with a shared expert whose output a sigmoid gate scales."""

    name = "Qwen2-MoE"
    blocks = ("Qwen2MoeSparseMoeBlock",)

    def shared(self, block: Block, x_TD: Tensor) -> Tensor:
        return torch.sigmoid(block.shared_expert_gate(x_TD)) * block.shared_expert(x_TD)
