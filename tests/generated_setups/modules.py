"""The model of a set-up.

B  sequences   S  sequence length   D, F  widths   V  vocabulary   E  experts   R  rank of adapters
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lancet_kernels import Dropout, Groups, MoELayer, expert_parameters, moe_losses
from tests.generated_setups.describe import GATES, Block, Setup

S, D, F, V, E, R = 3, 8, 8, 13, 4, 2
LAID_ASIDE: dict[int, Tensor] = {}
"""Plain tensors that are no attribute of a module, by the number of the module that reads them."""


def build(setup: Setup, groups: Groups | None = None) -> GeneratedModel:
    """The same one every time; of the experts those of this rank. Args: groups: of its layers."""
    torch.manual_seed(0)
    model = GeneratedModel(setup, groups).double()
    experts = {id(p) for p in expert_parameters(model)}
    with torch.no_grad():
        for parameter in model.parameters():
            # Experts start small; gradients are to be of order one.
            parameter.mul_(20 if id(parameter) in experts else 2)
    if setup.adapters_only:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name.endswith(("low_rank_a", "low_rank_b")))
    return model


class GeneratedModel(nn.Module):
    """x[B, S, D] or token ids[B, S], target[B, S] -> loss, or {"loss", "logits"}."""

    def __init__(self, setup: Setup, groups: Groups | None) -> None:
        super().__init__()
        self.tokens, self.returns = setup.tokens, setup.returns
        # The mean of no tokens is none.
        self.mean = setup.loop.uneven != "none"
        self.input = nn.Embedding(V, D) if setup.tokens else nn.Linear(D, D)
        self.input.requires_grad_(not setup.frozen_input)
        self.blocks = nn.ModuleList()
        for number, block in enumerate(setup.blocks):
            self.blocks.append(_block(block, number, self.blocks, groups))
            inner(self.blocks[-1]).padded = setup.padded
        self.head = nn.Linear(D, V, bias=not setup.tied)
        if setup.tied:
            self.head.weight = self.input.weight

    def forward(self, x: Tensor, target: Tensor, times: int = 1) -> Tensor | dict[str, Tensor]:
        h, extra = self.input(x), 0.0
        ids = x if self.tokens else target
        for block in self.blocks:
            if inner(block).skipped:
                continue
            h = block(h, ids)
            if isinstance(h, tuple):
                h, balance = h
                extra = extra + 0.1 * balance
        logits = self.head(torch.tanh(h))
        reduction = "mean" if self.mean else "sum"
        entropy = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction)
        loss = times * entropy / (1 if self.mean else 4 * S) + extra
        return loss if self.returns == "loss" else {"loss": loss, "logits": logits}


def _block(block: Block, number: int, earlier: nn.ModuleList, groups: Groups | None) -> nn.Module:
    if block.shared == "module":
        return earlier[block.same_as]
    own = (groups,) if block.kind == "moe" else ()
    module = BLOCKS[block.kind](block, number, *own)
    module.skipped = False
    if block.same_as >= 0:
        module.share(inner(earlier[block.same_as]))
    if block.frozen:
        for parameter in list(module.parameters())[: 1 if block.frozen == "first" else None]:
            parameter.requires_grad_(False)
    return Checkpointed(module, block.checkpoint) if block.checkpoint else module


def inner(module: nn.Module) -> nn.Module:
    """A block without its checkpoint."""
    return module.block if isinstance(module, Checkpointed) else module


class Checkpointed(nn.Module):
    """A block that is recomputed in the backward."""

    def __init__(self, block: nn.Module, kind: str) -> None:
        super().__init__()
        self.block, self.options = block, {"use_reentrant": kind == "reentrant"}
        if kind == "selective":
            kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
            self.options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)

    def forward(self, h: Tensor, ids: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return checkpoint(self.block, h, ids, **self.options)


class Linear(nn.Module):
    def __init__(self, _block: Block, _number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def share(self, other: Linear) -> None:
        self.linear.weight = other.linear.weight

    def forward(self, h: Tensor, _ids: Tensor) -> Tensor:
        return h + torch.tanh(self.linear(h))


class LowRank(nn.Module):
    """w[.., O, I] -> w + a b."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.low_rank_a, self.low_rank_b = nn.Parameter(a), nn.Parameter(b)

    def forward(self, w: Tensor) -> Tensor:
        return w + self.low_rank_a @ self.low_rank_b


class AdaptedLinear(nn.Module):
    """A frozen layer with an adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.low_rank_a = nn.Parameter(0.3 * torch.randn(R, base.in_features))
        self.low_rank_b = nn.Parameter(0.3 * torch.randn(base.out_features, R))

    def forward(self, h: Tensor) -> Tensor:
        return self.base(h) + h @ self.low_rank_a.T @ self.low_rank_b.T


class Attention(nn.Module):
    """Causal, two heads."""

    def __init__(self, block: Block, _number: int) -> None:
        super().__init__()
        self.qkv, self.out, self.fused = nn.Linear(D, 3 * D), nn.Linear(D, D), block.variant == "fused"
        if block.adapter:
            self.qkv, self.out = AdaptedLinear(self.qkv), AdaptedLinear(self.out)

    def forward(self, h: Tensor, _ids: Tensor) -> Tensor:
        query, key, value = self.qkv(h).view(*h.shape[:2], 3, 2, D // 2).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-2, -1) / (D // 2) ** 0.5
            later = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).triu(1)
            y = scores.masked_fill(later, float("-inf")).softmax(-1) @ value
        return h + self.out(y.transpose(1, 2).flatten(2))


class Norm(nn.Module):
    def __init__(self, block: Block, _number: int) -> None:
        super().__init__()
        self.norm = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "batch": nn.BatchNorm1d}[block.variant](D)
        self.over_batch = block.variant == "batch"

    def forward(self, h: Tensor, _ids: Tensor) -> Tensor:
        return self.norm(h.transpose(1, 2)).transpose(1, 2) if self.over_batch else self.norm(h)


class Drop(nn.Module):
    def __init__(self, block: Block, number: int) -> None:
        super().__init__()
        by_token = block.variant == "by token"
        self.drop = Dropout(0.3, site=number) if by_token else nn.Dropout(0.3 * (block.variant == "torch"))

    def forward(self, h: Tensor, _ids: Tensor) -> Tensor:
        return self.drop(h)


class Experts(nn.Module):
    def __init__(self, block: Block, number: int, groups: Groups | None) -> None:
        super().__init__()
        self.balance, self.groups = block.balance, groups
        self.layer = MoELayer(
            D, F, E, gate=block.gate, top_k=GATES[block.gate], capacity_factor=block.capacity,
            activation=block.activation, bias=block.bias,
            shared_expert_d_ff=F if block.shared_expert else None, groups=groups,
        )  # fmt: skip
        experts = {"w1", "w2", "b1", "b2"}
        trains = {"w1": {"w1"}, "w2": {"w2"}, "experts": experts, "router": {"router"}, "none": set()}
        if block.trains:
            for name, parameter in self.layer.named_parameters():
                parameter.requires_grad_(name in trains[block.trains])
        if block.adapter:
            whole, own = torch.Generator().manual_seed(number), self.layer.expert_ids()
            for name in ("w1", "w2"):
                w = getattr(self.layer, name).requires_grad_(False)
                a, b = (
                    0.1 * torch.randn(E, *shape, generator=whole)[own.start : own.stop]
                    for shape in ((w.shape[1], R), (R, w.shape[2]))
                )
                register_parametrization(self.layer, name, LowRank(a, b))

    def share(self, other: Experts) -> None:
        self.layer.w1 = other.layer.w1

    def forward(self, h: Tensor, ids: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        mask = ids > V // 4 if self.padded else None
        ids = ids if str(self.layer.gate).startswith("hash") else None
        if not self.balance:
            return h + self.layer(torch.tanh(h), mask=mask, token_ids=ids)
        y, sums = self.layer(torch.tanh(h), mask=mask, token_ids=ids, return_sums=True)
        return h + y, moe_losses([sums], self.groups).balance.mean()


class Buffer(nn.Module):
    """h, times what a buffer says."""

    def __init__(self, block: Block, _number: int) -> None:
        super().__init__()
        self.variant = block.variant
        self.register_buffer("scale", torch.rand(D) + 0.5)

    def forward(self, h: Tensor, _ids: Tensor) -> Tensor:
        if self.training and self.variant == "counted":
            self.scale.add_(0.1)
        if self.training and self.variant == "averaged":
            with torch.no_grad():
                self.scale.mul_(0.9).add_(0.1 * (1 + h.detach().mean((0, 1)).abs()))
        return h * self.scale.to(h.dtype)


class Plain(nn.Module):
    """h, times a tensor that is neither parameter nor buffer."""

    def __init__(self, block: Block, _number: int) -> None:
        super().__init__()
        self.where, self.number = block.variant, len(LAID_ASIDE)
        self.scale: Tensor | None = None
        self.scales: list[Tensor] = []
        self.named: dict[str, Tensor] = {}
        scale = torch.rand(D, dtype=torch.float64) + 0.5
        self.place(scale.requires_grad_(block.requires_grad))

    def place(self, scale: Tensor) -> None:
        """Lay it where the forward reads it."""
        if self.where == "attribute":
            self.scale = scale
        elif self.where == "list":
            self.scales[:] = [scale]
        elif self.where == "dict":
            self.named["scale"] = scale
        else:
            LAID_ASIDE[self.number] = scale

    def placed(self) -> Tensor:
        if self.where == "attribute":
            return self.scale
        if self.where == "list":
            return self.scales[0]
        return self.named["scale"] if self.where == "dict" else LAID_ASIDE[self.number]

    def forward(self, h: Tensor, _ids: Tensor) -> Tensor:
        return h * self.placed().to(h.dtype)


BLOCKS = {
    "linear": Linear, "attention": Attention, "norm": Norm, "dropout": Drop, "moe": Experts, "buffer": Buffer,
    "plain": Plain,
}  # fmt: skip
