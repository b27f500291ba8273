"""Tiny causal language models of transformers with the properties that differ: routers, shared experts,
biases, layouts. `transformers_families` has all families."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from lancet_kernels import export_state_dict

BOUND = 1e-10
"""Largest difference in float64: only sums are in another order."""

VOCABULARY, D, F, E, K = 64, 16, 12, 8, 3
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts_per_tok": K, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "moe_intermediate_size": F, "intermediate_size": 20, "n_routed_experts": E, "n_shared_experts": 2,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
}  # fmt: skip
"""What both DeepSeeks have."""


def causal_lm(classes: str, **sizes: object) -> nn.Module:
    """A model of transformers by what the names of its classes begin with."""
    import transformers

    config = getattr(transformers, f"{classes}Config")(**COMMON, **sizes)
    return getattr(transformers, f"{classes}ForCausalLM")(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "Mixtral": partial(
        causal_lm, "Mixtral", intermediate_size=F, num_local_experts=E, head_dim=8, output_router_logits=True
    ),
    "OLMoE": partial(
        causal_lm, "Olmoe", intermediate_size=F, num_experts=E, norm_topk_prob=False,
        output_router_logits=True,
    ),
    "Qwen3-MoE": partial(
        causal_lm, "Qwen3Moe", moe_intermediate_size=F, intermediate_size=20, num_experts=E,
        norm_topk_prob=True, head_dim=8, mlp_only_layers=[0], output_router_logits=True,
    ),
    "Qwen2-MoE": partial(
        causal_lm, "Qwen2Moe", moe_intermediate_size=F, shared_expert_intermediate_size=20, num_experts=E,
        intermediate_size=20, norm_topk_prob=False, output_router_logits=True,
    ),
    "DeepSeek-V3": partial(causal_lm, "DeepseekV3", norm_topk_prob=True, **LATENT),
    "DeepSeek-V2": partial(causal_lm, "DeepseekV2", topk_method="group_limited_greedy", **LATENT),
    "GPT-OSS": partial(
        causal_lm, "GptOss", intermediate_size=F, num_local_experts=E, head_dim=8, output_router_logits=True,
        layer_types=["full_attention"] * 2,
    ),
    "DBRX": partial(
        causal_lm, "Dbrx", d_model=D, n_heads=2, n_layers=2, max_seq_len=64, output_router_logits=True,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        ffn_config={"hidden_size": D, "ffn_hidden_size": F, "moe_num_experts": E, "moe_top_k": K},
    ),
}  # fmt: skip


EXPERT_PARALLEL = ("Mixtral", "Qwen3-MoE", "OLMoE", "DeepSeek-V3", "GPT-OSS")
"""Families that are tested with transformers' expert parallelism."""
PLANNED = (
    ("Mixtral", 2, {"fsdp_size": 2, "ep_size": 2}),
    ("OLMoE", 2, {"fsdp_size": 2, "ep_size": 2}),
    ("Qwen3-MoE", 4, {"fsdp_size": 4, "ep_size": 2}),
    ("DeepSeek-V3", 4, {"fsdp_size": 4, "ep_size": 4}),
    ("GPT-OSS", 2, {"fsdp_size": 2, "ep_size": 2}),
    ("GPT-OSS", 4, {"fsdp_size": 4, "ep_size": 2}),
)
"""The same under a plan: family, ranks, sizes of the meshes."""


LORA: dict[str, dict[str, list[str]]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "experts": {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}
LORA["both"] = LORA["experts"] | LORA["attention"]
"""What PEFT's adapters are put on in tests."""
LORA_WAYS = {"optimize": "`optimize`", "ddp": "`ddp`", "fsdp": "`fsdp` and `optimize`"}
"""How such a model is trained on two ranks."""


def tiny_model(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model with random parameters and buffers, the same at every call, that routes unevenly."""
    torch.manual_seed(0)
    return with_random_values(FAMILIES[family]().to(dtype))


def with_random_values(model: nn.Module) -> nn.Module:
    """Parameters and correction biases so large that routing is uneven."""
    # Its default, torch's grouped matrix product, takes no float64.
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    return model


def tiny_batch(rank: int = 0) -> dict[str, Tensor]:
    """Token ids and labels [2, 7], another batch for each rank; transformers shifts the labels itself."""
    ids = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}


def quantized_gpt_oss(folder: Path) -> dict[str, Tensor]:
    """Write a tiny GPT-OSS as it is published, with experts in MXFP4. -> the weights that it stands for."""
    import transformers
    from safetensors.torch import save_file

    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": E, "head_dim": 8}
    config = transformers.GptOssConfig(**COMMON | sizes, layer_types=["full_attention"] * 2)
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).to(torch.bfloat16)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values, written = torch.cat((magnitudes, -magnitudes)), {}
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in whole.items():
        if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
            written[name] = value
            continue
        experts, width, outputs = value.shape
        # Two numbers a byte, the first one in its low half; 32 numbers have one scale, a power of 2.
        codes = torch.randint(0, 16, (experts, outputs, width // 32, 32))
        scales = torch.randint(120, 130, (experts, outputs, width // 32))
        written[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        written[f"{name}_scales"] = scales.to(torch.uint8)
        numbers = values[codes] * 2.0 ** (scales - 127).unsqueeze(-1)
        whole[name] = numbers.flatten(2).transpose(1, 2).to(torch.bfloat16)
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.save_pretrained(folder)
    return whole


def distance(own: Tensor, other: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    own, other = own.detach(), other.detach()
    return float((own - other).abs().max() / other.abs().max().clamp(min=1e-30))


check_equal = partial(torch.testing.assert_close, rtol=0, atol=0)
"""Two tensors, or two dicts of tensors: the same names, the same bits."""


def zero_(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.zeros_(parameter)


def check_gradients(model: nn.Module, original: nn.Module, bound: float) -> None:
    """All gradients of a converted model are those of the original. Changes the model."""
    gradients = exported_gradients(model)
    for name, parameter in original.named_parameters():
        assert parameter.grad is not None, name
        assert distance(gradients[name], parameter.grad) < bound, name


def exported_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of all experts, under the names of the original."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return export_state_dict(model)
