"""The model families that can be converted, by the class name of their MoE block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lancet_kernels.ops.moe.expert_activation import CLAMP, SLOPE
from lancet_kernels.ops.moe.gates import Gate, Sigmoid, TopK
from lancet_kernels.transformers.family import Family, Routed, Unsupported, setting
from lancet_kernels.transformers.layouts import Block, Interleaved, Layout, Listed


class _Softmax(Family):
    """The router takes the k largest softmax probabilities."""

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


class Deepseek(Family):
    """What the families have in common: groups of experts, logits in float32, and shared experts."""

    def route(self, block: Block, x_TD: Tensor) -> Routed:
        first = block.gate(x_TD.unsqueeze(0))[0]
        if first.is_floating_point():
            return Routed(first)
        # transformers 4.5x: the router returns experts and weights, no logits.
        return Routed(nn.functional.linear(x_TD.float(), block.gate.weight.float()))

    def shared(self, block: Block, x_TD: Tensor) -> Tensor | None:
        experts = getattr(block, "shared_experts", None)
        return None if experts is None else experts(x_TD)


class DeepseekV3(Deepseek):
    """Sigmoid scores, with a bias that affects only the selection."""

    name = "DeepSeek-V3"
    blocks = ("DeepseekV3MoE",)

    def gate(self, block: Block) -> Gate:
        groups = "num_group" if hasattr(block.gate, "num_group") else "n_group"
        return Sigmoid(
            groups=int(setting(block, groups)),
            top_groups=int(setting(block, "topk_group")),
            renormalize=bool(setting(block, "norm_topk_prob")),
            scale=float(setting(block, "routed_scaling_factor")),
        )

    def selection_bias(self, block: Block) -> Tensor:
        return block.gate.e_score_correction_bias


class DeepseekV2(Deepseek):
    """Softmax probabilities as weights, scaled; groups rated by their best expert."""

    name = "DeepSeek-V2"
    blocks = ("DeepseekV2Moe", "DeepseekV2MoE")

    def gate(self, block: Block) -> Gate:
        scale, method = float(setting(block, "routed_scaling_factor")), setting(block, "topk_method")
        if method == "greedy":
            return TopK(scale=scale)
        if method != "group_limited_greedy":
            raise Unsupported(f"topk_method={method!r} (supported: 'greedy', 'group_limited_greedy')")
        groups, top_groups = int(setting(block, "num_group")), int(setting(block, "topk_group"))
        return TopK(groups=groups, top_groups=top_groups, scale=scale)


class GptOss(Family):
    """A router with a bias, softmax over the chosen, experts with biases and a clamped SwiGLU.

    The block returns the weights of the chosen experts in addition.
    """

    name = "GPT-OSS"
    blocks = ("GptOssMLP",)
    activation = "clamped-swiglu"
    bias = True
    in_files = Interleaved()

    def gate(self, block: Block) -> Gate:
        return TopK(softmax="after")

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


FAMILIES: tuple[Family, ...] = (
    Mixtral(),
    Olmoe(),
    Qwen3Moe(),
    Qwen2Moe(),
    DeepseekV3(),
    DeepseekV2(),
    GptOss(),
)

BY_BLOCK = {block: family for family in FAMILIES for block in family.blocks}
