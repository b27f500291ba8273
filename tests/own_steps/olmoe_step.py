"""transformers' OLMoE with its experts in `MoELayer`s: OLMoE-1B-7B's sizes, or smaller ones."""

import torch
from torch import Tensor, nn
from transformers import OlmoeConfig, OlmoeForCausalLM

from lancet_kernels import MoELayer


class Step(nn.Module):
    """(ids[B, S]) -> loss of the next token."""

    def __init__(self, config: OlmoeConfig) -> None:
        super().__init__()
        self.model = OlmoeForCausalLM(config)
        for layer in self.model.model.layers:
            layer.mlp = MoELayer(
                config.hidden_size,
                config.intermediate_size,
                config.num_experts,
                top_k=config.num_experts_per_tok,
                gate="topk",
                capacity_factor=None,
                activation="swiglu",
            )

    def forward(self, ids_BS: Tensor) -> Tensor:
        logits_BSV = self.model(input_ids=ids_BS, use_cache=False).logits
        return nn.functional.cross_entropy(logits_BSV[:, :-1].flatten(0, 1).float(), ids_BS[:, 1:].flatten())


def make_step() -> tuple[nn.Module, dict[str, Tensor]]:
    """All 16 layers, 64 experts, 8 per token, bfloat16."""
    return Step(OlmoeConfig()).to(torch.bfloat16), {"ids_BS": torch.zeros(4, 2048, dtype=torch.int64)}


def make_small_step() -> tuple[nn.Module, dict[str, Tensor]]:
    """Two narrow layers."""
    config = OlmoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    return Step(config), {"ids_BS": torch.zeros(8, 32, dtype=torch.int64)}
