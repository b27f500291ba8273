"""A tiny model of every family of transformers that has experts, from the family's own configuration class.

Sizes are set by their names in the configurations; `SPECIAL` says what a family needs beside that.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.transformers_models import with_random_values

VOCABULARY, TOKENS = 64, 6
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 20, "moe_intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2,
    "n_group": 1, "topk_group": 1, "num_expert_group": 1, "topk_groups": 1,
    "first_k_dense_replace": 0, "num_dense_layers": 0, "moe_layer_start_index": 0, "decoder_sparse_step": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "qk_head_dim": 8, "max_position_embeddings": 64, "shared_expert_intermediate_size": 12,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "output_router_logits": False,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "mlp_layer_types": ["sparse", "sparse"],
    "mlp_only_layers": [], "n_shared_experts": 1, "num_experts_shared": 1,
    "linear_head_dim": 8, "linear_num_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_ROPE_4 = {"head_dim": 4}
_BOTH = {"layer_types": ["linear_attention", "full_attention"]}
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": _ROPE_4,
    "bailing_hybrid": _BOTH,
    "dbrx": {
        "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4, "attn_pdrop": 0.0},
        "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 16},
    },
    "deepseek_ocr2": {"mlp_layer_types": ["sparse", "sparse"]},
    "deepseek_v3": _ROPE_4,
    "deepseek_v4": {"mlp_layer_types": ["moe", "moe"]},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [12, 12],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "gemma4": {
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 12,
        "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8, "per_layer_config": {},
    },
    "glm4v_moe": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                            "mrope_section": [1, 1, 0]},
    },
    "glm5_next": {
        "qk_rope_head_dim": 0, "head_dim": 0, "qk_head_dim": 8, "qk_nope_head_dim": 8, "linear_head_dim": 8,
        "linear_num_heads": 2, "index_head_dim": 8, "index_n_heads": 2,
        "layer_types": ["linear_attention"] * 2, "indexer_types": ["full"] * 2,
    },
    "granitemoehybrid": {"layer_types": ["full_attention"] * 2, "mamba_n_heads": 4, "mamba_d_head": "auto"},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _BOTH,
    "lfm2_moe": {"layer_types": ["full_attention"] * 2},
    "llama4": {"intermediate_size_mlp": 20, "interleave_moe_layer_step": 1},
    "longcat_flash": _ROPE_4
    | {"num_layers": 2, "expert_ffn_hidden_size": 12, "ffn_hidden_size": 20, "zero_expert_num": 2},
    "mimo_v2_flash": {"layer_types": ["full_attention"] * 2},
    "mistral4": _ROPE_4,
    "muse_spark": {"moe_hidden_size": 16},
    "qwen3_5_moe": _BOTH,
    "qwen3_next": _BOTH,
    "qwen4_exp": _BOTH | {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "step3p7": {"layer_types": ["full_attention"] * 2, "share_expert_dim": 12, "sliding_window": 4},
    "vitpose_backbone": {"part_features": 4},
    "zaya": {"router_hidden_size": 8, "num_experts_per_tok": 1},
}  # fmt: skip
"""By family, sizes in addition."""
FLOAT32 = ("beam", "inkling2", "muse_spark", "nemotron_h", "openai_privacy_filter")
"""Families that compute in float32 in a float64 model, or cannot be one."""
_ENDINGS = (
    "ForCausalLM", "TextModel", "Model", "ForTokenClassification", "ForConditionalGeneration", "Backbone",
)  # fmt: skip


def families() -> Iterator[str]:
    """The families whose code has experts."""
    root = Path(inspect.getfile(importlib.import_module("transformers.models"))).parent
    for file in sorted(root.glob("*/modeling_*.py")):
        if re.search(r"self\.experts\b", file.read_text(encoding="utf-8")):
            yield file.parent.name


def model_class(family: str) -> type[nn.Module]:
    """The language model of a family, with a head if there is one; of one for images its backbone."""
    from transformers import PreTrainedModel

    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    own = {
        name: c
        for name, c in vars(module).items()
        if inspect.isclass(c) and issubclass(c, PreTrainedModel) and c.__module__ == module.__name__
    }
    named = [name for name in own if not re.search("Vision|PreTrained", name)]
    ranked = [(k, name) for k, ending in enumerate(_ENDINGS) for name in named if name.endswith(ending)]
    return own[min(ranked)[1]]


def tiny_config(family: str, other: Mapping[str, Any] | None = None) -> Any:
    """Args: other: sizes in place of those of `SIZES`."""
    of, own = model_class(family).config_class, SPECIAL.get(family, {})
    known = {**of().to_dict(), **getattr(of, "attribute_map", {})}
    sizes = {**SIZES, **(other or {}), **own}
    return of(**{name: value for name, value in sizes.items() if name in known or name in own})


def tiny_model(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model with random parameters and buffers, the same at every call, that routes unevenly."""
    torch.manual_seed(0)
    dtype = torch.float32 if family == "inkling2" else dtype
    return with_random_values(model_class(family)(tiny_config(family)).to(dtype).eval())


class FamilyStep(nn.Module):
    """Token ids [B, S] -> a loss: cross entropy of the next token, and the load-balance loss of the routers
    where the model has one; of a headless model the mean sine."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        has_option = "output_router_logits" in inspect.signature(model.forward).parameters
        self.options = {"output_router_logits": True} if has_option else {}

    def forward(self, input_ids: Tensor) -> Tensor:
        output = self.model(input_ids=input_ids, use_cache=False, **self.options)
        if "logits" not in output:
            return output.last_hidden_state.sin().mean()
        loss = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        return loss + output.aux_loss if "aux_loss" in output else loss


def tiny_batch(rank: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(rank))
