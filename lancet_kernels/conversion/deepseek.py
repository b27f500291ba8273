"""DeepSeek's families: groups of experts, scaled weights, shared experts."""

from __future__ import annotations

from torch import Tensor, nn

from lancet_kernels.conversion.family import Family, Routed, Unsupported, setting
from lancet_kernels.conversion.layouts import Block
from lancet_kernels.ops.moe.gates import Gate, Sigmoid, TopK


class Deepseek(Family):
    """What the families have in common: logits in float32, and shared experts."""

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
