"""MoE layers to compare with: of torch's ops alone, and of transformers, if installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lancet_kernels import MoELayer
from lancet_kernels.kernels.overlap import Experts, Routing
from lancet_kernels.measure.fused_pass import Workload
from lancet_kernels.ops.moe.expert_ops import activate


def by_torch(x: Tensor, dy: Tensor, routing: Routing, experts: Experts) -> list[Tensor]:
    """The experts of a layer by torch's ops, as torchtitan has them. -> y, dx, dweight, dw1, dw2."""
    choice = routing.choice[: int(routing.count.sum())].long()
    token = choice // routing.expert.shape[1]
    tensors = x, routing.weight, experts.w1, experts.w2
    x, weight, w1, w2 = (t.detach().clone().requires_grad_() for t in tensors)

    def product(rows: Tensor, weights: Tensor) -> Tensor:
        if rows.is_cuda:
            return torch.nn.functional.grouped_mm(rows, weights, offs=routing.count.cumsum(0).int())
        parts = rows.split(routing.count.tolist())
        return torch.cat([part @ each for part, each in zip(parts, weights, strict=True)])

    # index_select and index_add are each other's backward; the backward of x[token] would sort.
    hidden = activate(product(x.index_select(0, token), w1), experts.activation)
    y = product(hidden, w2) * weight.reshape(-1)[choice, None].to(x.dtype)
    out = torch.zeros_like(x).index_add(0, token, y)
    return [out.detach(), *torch.autograd.grad(out, (x, weight, w1, w2), dy)]


class _Called(nn.Module):
    """A function of x as a module with these submodules."""

    def __init__(self, function: Callable[[Tensor], Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.modules_used = function, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Dense(nn.Module):
    """A SwiGLU layer with the FLOPs of K experts per token."""

    def __init__(self, w: Workload, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        make: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.up = nn.Linear(w.width, w.choices * w.wide, **make)
        self.down = nn.Linear(w.choices * w.hidden, w.width, **make)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(activate(self.up(x), "swiglu"))


def _mixtral(w: Workload, implementation: str) -> nn.Module:
    """The MoE block of transformers' Mixtral, which takes [batch, sequence, width]."""
    # Imported here, because `by_torch` must work without transformers.
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=w.width, intermediate_size=w.hidden, num_local_experts=w.experts,
        num_experts_per_tok=w.choices,
    )  # fmt: skip
    config._experts_implementation = implementation
    return MixtralSparseMoeBlock(config)


SAME_WEIGHTS = (
    "ours, dropless", "ours, capacity 1.25", "transformers grouped_mm", "transformers eager", "dense",
)  # fmt: skip


def same_weights(w: Workload, dtype: torch.dtype, device: torch.device) -> dict[str, nn.Module]:
    """Layers [T, D] -> [T, D] by name; dropless ones are checked to be equal."""
    router = 0.05 * torch.randn(w.experts, w.width, dtype=dtype, device=device)
    w1 = 0.05 * torch.randn(w.experts, w.width, w.wide, dtype=dtype, device=device)
    w2 = 0.05 * torch.randn(w.experts, w.hidden, w.width, dtype=dtype, device=device)

    @torch.no_grad()
    def make(name: str) -> nn.Module:
        if name == "dense":
            return Dense(w, dtype, device)
        if name.startswith("ours"):
            layer = MoELayer(
                w.width, w.hidden, w.experts, top_k=w.choices, gate="topk(renormalize=True)",
                capacity_factor=1.25 if "1.25" in name else None, activation="swiglu",
                device=device, dtype=dtype,
            )  # fmt: skip
            for name, value in (("router", router), ("w1", w1), ("w2", w2)):
                layer.get_parameter(name).copy_(value)
            return layer
        block = _mixtral(w, name.removeprefix("transformers ")).to(device, dtype)
        block.get_parameter("gate.weight").copy_(router)
        for name, value in (("experts.gate_up_proj", w1), ("experts.down_proj", w2)):
            block.get_parameter(name).copy_(value.transpose(1, 2))
        return _Called(lambda x: block(x[None])[0], block)

    layers = {name: make(name) for name in SAME_WEIGHTS}
    alike = [layer for name, layer in layers.items() if name.startswith(("ours, dropless", "transformers"))]
    x = torch.randn(64, w.width, dtype=dtype, device=device)
    with torch.no_grad():
        for layer in alike[1:]:
            torch.testing.assert_close(layer(x), alike[0](x), rtol=1e-3, atol=1e-4)
    return layers
