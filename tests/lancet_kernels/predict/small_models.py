"""config.json of tiny models of transformers, one MoE and one with dense layers first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QWEN3 = {
    "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_hidden_layers": 4, "first_k_dense_replace": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 16, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 4, "max_position_embeddings": 256,
}  # fmt: skip
SPARSE_ATTENTION = DEEPSEEK | {
    "model_type": "deepseek_v32", "index_n_heads": 2, "index_head_dim": 16, "index_topk": 16,
}  # fmt: skip
DENSE = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip


def written(folder: Path, config: dict[str, Any], **changes: Any) -> str:
    """The path of a config.json with these values."""
    file = folder / "config.json"
    file.write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return str(file)
