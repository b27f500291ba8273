"""The four models of HiDup's table 1: 8 layers of BERT-Base's size, every other feed-forward an MoE layer.

The MoE layer is GShard's in dense form: who goes where is a tensor [B, S, E, C], and dispatch and combine are
products with it. Experts are a dimension like any other, so all of it can be sharded. Capacity is per
sequence, so sequences do not depend on each other.

B  sequences      S  sequence length      M  model width      V  vocabulary
E  experts        C  most tokens of a sequence for one expert      H  width of an expert
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from lancet_kernels.errors import check_name


@dataclass(frozen=True)
class HiDupConfig:
    """One model. `is_image`: patches in, one of `vocab` classes out; otherwise tokens in and out."""

    name: str
    top_k: int
    experts_per_gpu: int
    is_image: bool
    sequence: int
    vocab: int
    layers: int = 8
    width: int = 768
    heads: int = 12
    hidden: int = 3072
    experts: int = 1
    capacity_factor: float = 1.25
    patch: int = 4 * 4 * 3

    @property
    def capacity(self) -> int:
        return max(1, math.ceil(self.capacity_factor * self.top_k * self.sequence / self.experts))


HIDUP_MODELS = {
    config.name: config
    for config in (
        # 33278 words, in and out, and 8 layers of which 4 have experts: 89 M + 19 M per GPU (table 1).
        HiDupConfig("bert-sgmoe", 2, 1, False, 128, 33278),
        HiDupConfig("bert-switch", 1, 1, False, 128, 33278),
        # Cifar-10 in patches of 4 x 4.
        HiDupConfig("vit-sgmoe", 2, 2, True, 64, 10),
        HiDupConfig("vit-switch", 1, 2, True, 64, 10),
    )
}


def hidup_config(name: str, gpus: int = 1, layers: int | None = None) -> HiDupConfig:
    """The configuration for a number of GPUs: experts grow with them. Raises: UserError: unknown name."""
    check_name("model", name, HIDUP_MODELS)
    config = HIDUP_MODELS[name]
    return replace(config, experts=config.experts_per_gpu * gpus, layers=layers or config.layers)


class DenseMoE(nn.Module):
    """x[B, S, M] -> y[B, S, M]. Top-k gating with a softmax; tokens beyond a capacity are dropped."""

    def __init__(self, config: HiDupConfig) -> None:
        super().__init__()
        E, M, H = config.experts, config.width, config.hidden
        self.top_k, self.experts, self.capacity = config.top_k, E, config.capacity
        self.gate = nn.Parameter(torch.randn(M, E) * 0.02)
        self.up_EMH = nn.Parameter(torch.randn(E, M, H) * 0.02)
        self.down_EHM = nn.Parameter(torch.randn(E, H, M) * 0.02)

    def forward(self, x_BSM: Tensor) -> Tensor:
        combine_BSEC = self.route(torch.einsum("bsm,me->bse", x_BSM, self.gate))
        dispatch_BSEC = (combine_BSEC > 0).to(x_BSM.dtype)
        rows_EBCM = torch.einsum("bsec,bsm->ebcm", dispatch_BSEC, x_BSM)
        hidden_EBCH = functional.gelu(torch.einsum("ebcm,emh->ebch", rows_EBCM, self.up_EMH))
        rows_EBCM = torch.einsum("ebch,ehm->ebcm", hidden_EBCH, self.down_EHM)
        return torch.einsum("bsec,ebcm->bsm", combine_BSEC, rows_EBCM)

    def route(self, logits_BSE: Tensor) -> Tensor:
        """-> combine[B, S, E, C]: the gate's weight where a token has a slot, else zero."""
        score_BSE = logits_BSE.float().softmax(-1)
        expert_E = torch.arange(self.experts, device=score_BSE.device)
        slot_C = torch.arange(self.capacity, device=score_BSE.device)
        used_B1E: Tensor | float = 0.0
        left_BSE, combine_BSEC = score_BSE, None
        for _ in range(self.top_k):
            chosen_BSE = (left_BSE.argmax(-1, keepdim=True) == expert_E).to(score_BSE.dtype)
            slot_BSE = chosen_BSE.cumsum(1) - 1 + used_B1E
            used_B1E = used_B1E + chosen_BSE.sum(1, keepdim=True)
            weight_BSE = score_BSE * chosen_BSE
            placed_BSEC = weight_BSE.unsqueeze(-1) * (slot_BSE.unsqueeze(-1) == slot_C)
            combine_BSEC = placed_BSEC if combine_BSEC is None else combine_BSEC + placed_BSEC
            left_BSE = left_BSE * (1 - chosen_BSE)
        assert combine_BSEC is not None
        return combine_BSEC.to(logits_BSE.dtype)


class Layer(nn.Module):
    """Attention and a feed-forward (or MoE), each behind a norm, added to what came in."""

    def __init__(self, config: HiDupConfig, has_experts: bool) -> None:
        super().__init__()
        M = config.width
        self.heads = config.heads
        self.norm_attention, self.norm_forward = nn.LayerNorm(M), nn.LayerNorm(M)
        self.query, self.key, self.value, self.output = (nn.Linear(M, M) for _ in range(4))
        self.feed_forward = (
            DenseMoE(config)
            if has_experts
            else nn.Sequential(nn.Linear(M, config.hidden), nn.GELU(), nn.Linear(config.hidden, M))
        )

    def forward(self, x_BSM: Tensor) -> Tensor:
        x_BSM = x_BSM + self.attention(self.norm_attention(x_BSM))
        return x_BSM + self.feed_forward(self.norm_forward(x_BSM))

    def attention(self, x_BSM: Tensor) -> Tensor:
        query, key, value = (
            of(x_BSM).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for of in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.output(mixed.transpose(1, 2).flatten(2))


class HiDupModel(nn.Module):
    """(tokens[B, S] or patches[B, S, P], targets) -> the mean loss; targets [B, S], of images [B]."""

    def __init__(self, config: HiDupConfig) -> None:
        super().__init__()
        M = config.width
        self.is_image = config.is_image
        self.embed = nn.Linear(config.patch, M) if config.is_image else nn.Embedding(config.vocab, M)
        self.position_SM = nn.Parameter(torch.randn(config.sequence, M) * 0.02)
        self.layers = nn.ModuleList(Layer(config, n % 2 == 1) for n in range(config.layers))
        self.norm = nn.LayerNorm(M)
        self.head = nn.Linear(M, config.vocab, bias=False)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        x_BSM = self.embed(inputs) + self.position_SM
        for layer in self.layers:
            x_BSM = layer(x_BSM)
        x_BSM = self.norm(x_BSM)
        logits = self.head(x_BSM.mean(1) if self.is_image else x_BSM)
        return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def example_batch(config: HiDupConfig, sequences: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of zeros, of the right shapes."""
    if config.is_image:
        inputs = torch.zeros(sequences, config.sequence, config.patch)
        return inputs, torch.zeros(sequences, dtype=torch.int64)
    tokens = torch.zeros(sequences, config.sequence, dtype=torch.int64)
    return tokens, tokens
