"""The layer on one rank against the MoE blocks of transformers, with the same weights: forward, and gradients
of the input, the router and the experts."""

import pytest
import torch
from torch import Tensor, nn

from lancet_kernels import MoELayer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

D, F, E, K = 32, 24, 8, 3
SIZES = {"hidden_size": D, "num_experts_per_tok": K}


def mixtral() -> tuple[nn.Module, str]:
    from transformers.models.mixtral import modeling_mixtral as modeling

    config = transformers.MixtralConfig(intermediate_size=F, num_local_experts=E, **SIZES)
    return modeling.MixtralSparseMoeBlock(config), "topk(renormalize=True)"


def qwen3_moe() -> tuple[nn.Module, str]:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

    config = transformers.Qwen3MoeConfig(moe_intermediate_size=F, num_experts=E, norm_topk_prob=True, **SIZES)
    return modeling.Qwen3MoeSparseMoeBlock(config), "topk(renormalize=True)"


def olmoe() -> tuple[nn.Module, str]:
    from transformers.models.olmoe import modeling_olmoe as modeling

    config = transformers.OlmoeConfig(intermediate_size=F, num_experts=E, norm_topk_prob=False, **SIZES)
    return modeling.OlmoeSparseMoeBlock(config), "topk"


def deepseek_v3() -> tuple[nn.Module, str]:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    config = transformers.DeepseekV3Config(
        moe_intermediate_size=F, n_routed_experts=E, n_shared_experts=2, n_group=4, topk_group=2,
        norm_topk_prob=True, routed_scaling_factor=2.5, **SIZES,
    )  # fmt: skip
    return modeling.DeepseekV3MoE(config), "sigmoid(groups=4,top_groups=2,scale=2.5)"


def layer_like(block: nn.Module, gate: str) -> MoELayer:
    """Our layer with the block's weights; theirs are transposed."""
    shared = getattr(block, "shared_experts", None)
    layer = MoELayer(
        D, F, E, top_k=K, gate=gate, capacity_factor=None, activation="swiglu",
        shared_expert_d_ff=None if shared is None else shared.intermediate_size,
    )  # fmt: skip
    with torch.no_grad():
        layer.router.copy_(block.gate.weight)
        layer.w1.copy_(block.experts.gate_up_proj.transpose(1, 2))
        layer.w2.copy_(block.experts.down_proj.transpose(1, 2))
        if shared is not None:
            layer.shared_up.weight.copy_(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]))
            layer.shared_down.weight.copy_(shared.down_proj.weight)
            layer.correction_bias.copy_(block.gate.e_score_correction_bias)
    return layer


def gradients(module: nn.Module, x: Tensor, dy: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    y = module(x)
    return y, *torch.autograd.grad(y, (x, *parameters), dy)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("make", [mixtral, qwen3_moe, olmoe, deepseek_v3])
def test_block(make, implementation: str) -> None:
    torch.manual_seed(0)
    block, gate = make()
    block.experts.config._experts_implementation = implementation
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.normal_(0, 0.3)
    layer = layer_like(block, gate)
    x, dy = torch.randn(2, 17, D), torch.randn(2, 17, D)
    theirs = gradients(block, x, dy, block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj)
    ours = gradients(layer, x, dy, layer.router, layer.w1, layer.w2)
    for name, own, other in zip(("y", "dx", "drouter", "dw1", "dw2"), ours, theirs, strict=True):
        other = other.transpose(1, 2) if name.startswith("dw") else other
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(
            own / scale, other / scale, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
