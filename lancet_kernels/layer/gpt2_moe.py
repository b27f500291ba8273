"""GPT-2 with Mixture-of-Experts layers, as in the Lancet paper (section 7), and a training step of it.

B  sequences on this rank      S  sequence length      V  vocabulary      W  ranks
D  model width                 T = B * S tokens

Every other block's feed-forward is a mixture. The step is a module, too, with the loss and the router losses
in it, because `optimize` plans exactly the module that it is given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.layer.model_layers import Dropout, moe_losses
from lancet_kernels.layer.moe_layer import MoELayer
from lancet_kernels.ops.comm.groups import AnyGroups, Groups, without_mesh
from lancet_kernels.ops.moe.router import RoutingSums


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a GPT-2 MoE model."""

    name: str
    layers: int
    width: int
    heads: int
    sequence: int
    vocab: int = 50257
    num_experts: int = 2
    top_k: int = 1
    gate: str = "switch"
    capacity_factor: float | None = 1.25
    activation: str = "gelu"
    dropout: float = 0.0
    """Probability, for the embedding and the outputs of attention and feed-forward. Attention probabilities
    have none: they never leave the fused attention, whose own dropout cannot be cut into parts."""
    dropout_seed: int = 0


BENCH_MODEL = "gpt2-bench-moe"
BENCH_VOCAB = 4096
"""Words of the benchmark's model on any data: with fewer its output projection would take no time."""
MODELS = {
    config.name: config
    for config in (
        ModelConfig("gpt2-tiny-moe", layers=4, width=128, heads=4, sequence=128),
        # For measuring on CPU ranks: large enough that products take most of the time, as they do on GPUs.
        ModelConfig(BENCH_MODEL, layers=6, width=384, heads=6, sequence=128, vocab=BENCH_VOCAB),
        ModelConfig("gpt2-s-moe", layers=12, width=768, heads=12, sequence=512),
        ModelConfig("gpt2-l-moe", layers=24, width=1024, heads=16, sequence=512),
    )
}


def model_config(name: str, **changes: Any) -> ModelConfig:
    """A configuration of MODELS, with some fields replaced. Raises: UserError for an unknown name."""
    check_name("model", name, MODELS)
    return replace(MODELS[name], **changes)


class Attention(nn.Module):
    """Causal multi-head self-attention. [B, S, D] -> [B, S, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        batch, sequence, width = x_BSD.shape
        # Split, not indexed: the gradients of the three are then put together in one pass.
        query, key, value = (
            part.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x_BSD).split(width, dim=-1)
        )
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, width))


class FeedForward(nn.Module):
    """The dense feed-forward of a block, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    """Attention, then a dense or an MoE feed-forward, each behind a layer norm and with a residual."""

    def __init__(
        self,
        config: ModelConfig,
        moe: bool,
        groups: AnyGroups | None,
        number: int = 0,
        layer: type[MoELayer] = MoELayer,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config.width, config.heads)
        self.moe = moe
        if moe:
            self.feed_forward: MoELayer | FeedForward = layer(
                config.width,
                4 * config.width,
                config.num_experts,
                top_k=config.top_k,
                gate=config.gate,
                capacity_factor=config.capacity_factor,
                activation=config.activation,
                groups=groups,
            )
        else:
            self.feed_forward = FeedForward(config.width)
        self.attention_dropout = _dropout(config, 2 * number + 1, groups)
        self.feed_forward_dropout = _dropout(config, 2 * number + 2, groups)

    def forward(self, x_BSD: Tensor, token_BS: Tensor) -> tuple[Tensor, RoutingSums | None]:
        x_BSD = x_BSD + self.attention_dropout(self.attention(self.norm1(x_BSD)))
        h_BSD = self.norm2(x_BSD)
        if not self.moe:
            return x_BSD + self.feed_forward_dropout(self.feed_forward(h_BSD)), None
        y_BSD, sums = self.feed_forward(h_BSD, token_ids=token_BS, return_sums=True)
        return x_BSD + self.feed_forward_dropout(y_BSD), sums


class GPT2MoE(nn.Module):
    """Tokens [B, S] -> logits [B, S, V] and the RoutingSums of each MoE layer.

    Blocks 1, 3, 5, ... (counted from 0) have the experts. The output projection shares the embedding's
    weight. layer: the class of the MoE layers.
    """

    def __init__(
        self, config: ModelConfig, groups: AnyGroups | None = None, layer: type[MoELayer] = MoELayer
    ) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab, config.width)
        self.position_embedding = nn.Embedding(config.sequence, config.width)
        self.dropout = _dropout(config, 0, groups)
        self.blocks = nn.ModuleList(Block(config, i % 2 == 1, groups, i, layer) for i in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.apply(_initialize)

    def forward(self, token_BS: Tensor) -> tuple[Tensor, list[RoutingSums]]:
        sequence = token_BS.shape[1]
        if sequence > self.config.sequence:
            raise UserError(
                "sequence length",
                got=sequence,
                expected=f"at most {self.config.sequence} for {self.config.name}",
                do="shorten the input",
            )
        position_S = torch.arange(sequence, device=token_BS.device)
        x_BSD = self.dropout(self.token_embedding(token_BS) + self.position_embedding(position_S))
        sums = []
        for block in self.blocks:
            x_BSD, layer_sums = block(x_BSD, token_BS)
            if layer_sums is not None:
                sums.append(layer_sums)
        return nn.functional.linear(self.norm(x_BSD), self.token_embedding.weight), sums


def _dropout(config: ModelConfig, site: int, groups: AnyGroups | None) -> Dropout:
    # An expert group alone does not say which ranks have tokens of their own: then all have.
    groups = without_mesh(groups)
    return Dropout(
        config.dropout,
        site,
        seed=config.dropout_seed,
        groups=groups if isinstance(groups, Groups) else None,
    )


def _initialize(module: nn.Module) -> None:
    """GPT-2's initialization: normal(0, 0.02), zero biases. MoE layers initialize themselves."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, 0.0, 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class StepResult(NamedTuple):
    """Losses and counts of one step."""

    objective: Tensor
    """To differentiate: the weighted sum of all losses, divided by W, so that gradients summed over the ranks
    are averages."""
    loss: Tensor
    """Mean cross-entropy per token; no gradient."""
    balance: Tensor
    """Mean load-balance loss of the MoE layers; no gradient."""
    dropped: Tensor
    """Share of assignments without a slot, over layers and ranks."""
    assigned: Tensor
    """[layers, E] int64: assignments of each expert, over all ranks."""


class TrainingStep(nn.Module):
    """(tokens[B, S], targets[B, S]) -> StepResult.

    Args:
        model: tokens -> (logits[B, S, V], RoutingSums of each layer).
        ranks: W. balance_weight, z_weight: of the router losses. autocast: the dtype to compute in on CUDA.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: int,
        balance_weight: float = 0.01,
        z_weight: float = 0.0,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model, self.ranks = model, ranks
        self.balance_weight, self.z_weight, self.autocast = balance_weight, z_weight, autocast

    def forward(self, token_BS: Tensor, target_BS: Tensor) -> StepResult:
        with torch.autocast(token_BS.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            logits_BSV, sums = self.model(token_BS)
        if logits_BSV.dtype in (torch.bfloat16, torch.float16):
            logits_BSV = logits_BSV.float()
        loss = nn.functional.cross_entropy(logits_BSV.flatten(0, 1), target_BS.flatten())
        moe = moe_losses(sums)
        objective = loss + self.balance_weight * moe.balance.mean() + self.z_weight * moe.z.mean()
        return StepResult(
            objective / self.ranks,
            loss.detach(),
            moe.balance.detach().mean(),
            moe.dropped.mean(),
            moe.assigned,
        )
