"""Language models for tests: BERT style and Llama style, and GPT-2, each small, with a loss and an MoE
layer in every other block. Attention is written both ways.

B  sequences      S  sequence length      V  vocabulary      D  model width
H  heads          G  heads of keys and values (Llama)        A  width of a head
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lancet_kernels.layer.gpt2_moe import GPT2MoE, ModelConfig
from lancet_kernels.layer.moe_layer import MoELayer
from lancet_kernels.ops.moe.router import moe_losses


@dataclass(frozen=True)
class Size:
    """The shape of a test model, and what its MoE layers are like."""

    batch: int = 4
    sequence: int = 6
    width: int = 16
    heads: int = 4
    vocab: int = 37
    layers: int = 4
    num_experts: int = 4
    top_k: int = 1
    gate: str = "switch"
    capacity_factor: float | None = 1.25

    def moe(self, activation: str = "gelu", bias: bool = False) -> MoELayer:
        return MoELayer(
            self.width,
            2 * self.width,
            self.num_experts,
            top_k=self.top_k,
            gate=self.gate,
            capacity_factor=self.capacity_factor,
            activation=activation,
            bias=bias,
        )


def written_out_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """[B, H, S, A] x 3, allowed bool (broadcast to [B, H, S, S]) -> [B, H, S, A]."""
    scores = torch.matmul(query, key.transpose(-2, -1)) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return torch.matmul(torch.softmax(scores, dim=-1), value)


def language_loss(logits_BSV: Tensor, target_BS: Tensor, sums: list) -> Tensor:
    """Cross entropy, and the routers' losses."""
    loss = nn.functional.cross_entropy(logits_BSV.flatten(0, 1), target_BS.flatten())
    routing = moe_losses(sums, "")
    return loss + 0.01 * routing.balance.mean() + 0.001 * routing.z.mean()


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class BertAttention(nn.Module):
    """Every position looks at every one that is no padding. Projections of their own."""

    def __init__(self, size: Size, written_out: bool) -> None:
        super().__init__()
        self.heads, self.written_out = size.heads, written_out
        self.query, self.key, self.value, self.out = (nn.Linear(size.width, size.width) for _ in range(4))

    def _split(self, x_BSD: Tensor) -> Tensor:
        batch, sequence, width = x_BSD.shape
        return x_BSD.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)

    def forward(self, x_BSD: Tensor, allowed_B11S: Tensor) -> Tensor:
        query, key, value = (self._split(linear(x_BSD)) for linear in (self.query, self.key, self.value))
        if self.written_out:
            y = written_out_attention(query, key, value, allowed_B11S)
        else:
            y = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed_B11S)
        return self.out(y.transpose(1, 2).flatten(2))


class BertBlock(nn.Module):
    """Attention, feed-forward or experts; each with a layer norm behind its residual."""

    def __init__(self, size: Size, moe: bool, written_out: bool) -> None:
        super().__init__()
        self.attention = BertAttention(size, written_out)
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.feed_forward = size.moe(bias=True) if moe else FeedForward(size.width)
        self.moe = moe

    def forward(self, x_BSD: Tensor, allowed: Tensor, token_BS: Tensor, sums: list) -> Tensor:
        x_BSD = self.norm1(x_BSD + self.attention(x_BSD, allowed))
        if not self.moe:
            return self.norm2(x_BSD + self.feed_forward(x_BSD))
        y_BSD, layer_sums = self.feed_forward(x_BSD, token_ids=token_BS, return_sums=True)
        sums.append(layer_sums)
        return self.norm2(x_BSD + y_BSD)


class BertMoE(nn.Module):
    """Masked-language-model style: bidirectional, post-norm, token types. -> loss."""

    def __init__(self, size: Size, written_out: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.positions = nn.Embedding(size.sequence, size.width)
        self.types = nn.Embedding(2, size.width)
        self.norm = nn.LayerNorm(size.width)
        self.blocks = nn.ModuleList(BertBlock(size, i % 2 == 1, written_out) for i in range(size.layers))
        self.head, self.head_norm = nn.Linear(size.width, size.width), nn.LayerNorm(size.width)

    def forward(self, token_BS: Tensor, type_BS: Tensor, real_BS: Tensor, target_BS: Tensor) -> Tensor:
        position_S = torch.arange(token_BS.shape[1], device=token_BS.device)
        x_BSD = self.tokens(token_BS) + self.positions(position_S) + self.types(type_BS)
        x_BSD, sums = self.norm(x_BSD), []
        for block in self.blocks:
            x_BSD = block(x_BSD, real_BS[:, None, None, :], token_BS, sums)
        x_BSD = self.head_norm(nn.functional.gelu(self.head(x_BSD), approximate="tanh"))
        return language_loss(nn.functional.linear(x_BSD, self.tokens.weight), target_BS, sums)


class RMSNorm(nn.Module):
    """Written out, computed in at least float32, as in the Llama code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def rotated(x_BHSA: Tensor, cos_SA: Tensor, sin_SA: Tensor) -> Tensor:
    """Rotary position embedding, halves rotated against each other."""
    first, second = x_BHSA.chunk(2, dim=-1)
    return x_BHSA * cos_SA + torch.cat((-second, first), dim=-1) * sin_SA


class LlamaAttention(nn.Module):
    """Causal, grouped queries: H heads of queries share G heads of keys and values. No biases."""

    def __init__(self, size: Size, written_out: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.written_out = size.heads, size.heads // 2, written_out
        self.head_width = size.width // size.heads
        narrow = self.groups * self.head_width
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, narrow, bias=False)
        self.value = nn.Linear(size.width, narrow, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def _split(self, x_BSD: Tensor) -> Tensor:
        return x_BSD.view(*x_BSD.shape[:2], -1, self.head_width).transpose(1, 2)

    def _repeated(self, x_BGSA: Tensor) -> Tensor:
        """Each head of keys once per head of queries; both common ways to write it."""
        times = self.heads // self.groups
        if self.written_out:
            batch, groups, sequence, width = x_BGSA.shape
            spread = x_BGSA[:, :, None].expand(batch, groups, times, sequence, width)
            return spread.reshape(batch, groups * times, sequence, width)
        return x_BGSA.repeat_interleave(times, dim=1)

    def forward(self, x_BSD: Tensor, cos_SA: Tensor, sin_SA: Tensor) -> Tensor:
        batch, sequence, width = x_BSD.shape
        query = rotated(self._split(self.query(x_BSD)), cos_SA, sin_SA)
        key = self._repeated(rotated(self._split(self.key(x_BSD)), cos_SA, sin_SA))
        value = self._repeated(self._split(self.value(x_BSD)))
        if self.written_out:
            allowed_SS = torch.ones(sequence, sequence, dtype=torch.bool, device=x_BSD.device).tril()
            y = written_out_attention(query, key, value, allowed_SS)
        else:
            y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, width))


class SwiGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    def __init__(self, size: Size, moe: bool, written_out: bool) -> None:
        super().__init__()
        self.attention = LlamaAttention(size, written_out)
        self.norm1, self.norm2 = RMSNorm(size.width), RMSNorm(size.width)
        self.feed_forward = size.moe("swiglu") if moe else SwiGLU(size.width)
        self.moe = moe

    def forward(self, x_BSD: Tensor, rotary: tuple[Tensor, Tensor], token_BS: Tensor, sums: list) -> Tensor:
        x_BSD = x_BSD + self.attention(self.norm1(x_BSD), *rotary)
        h_BSD = self.norm2(x_BSD)
        if not self.moe:
            return x_BSD + self.feed_forward(h_BSD)
        y_BSD, layer_sums = self.feed_forward(h_BSD, token_ids=token_BS, return_sums=True)
        sums.append(layer_sums)
        return x_BSD + y_BSD


class LlamaMoE(nn.Module):
    """Causal, pre-norm, rotary. -> loss."""

    def __init__(self, size: Size, written_out: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(LlamaBlock(size, i % 2 == 1, written_out) for i in range(size.layers))
        self.norm = RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)
        width = size.width // size.heads
        self.register_buffer("frequency", 10000.0 ** -(torch.arange(0, width, 2) / width))

    def forward(self, token_BS: Tensor, target_BS: Tensor) -> Tensor:
        position_S = torch.arange(token_BS.shape[1], device=token_BS.device, dtype=self.frequency.dtype)
        angle_SA = torch.outer(position_S, self.frequency).repeat(1, 2)
        rotary = angle_SA.cos(), angle_SA.sin()
        x_BSD, sums = self.tokens(token_BS), []
        for block in self.blocks:
            x_BSD = block(x_BSD, rotary, token_BS, sums)
        return language_loss(self.head(self.norm(x_BSD)), target_BS, sums)


class GPT2Loss(nn.Module):
    """The library's GPT-2 with a loss; attention as it is there, or written out."""

    def __init__(self, size: Size, written_out: bool) -> None:
        super().__init__()
        shape = {name: value for name, value in vars(size).items() if name != "batch"}
        self.model = GPT2MoE(ModelConfig("gpt2-test", **shape))
        if written_out:
            for block in self.model.blocks:
                block.attention.__class__ = WrittenOutGPT2Attention

    def forward(self, token_BS: Tensor, target_BS: Tensor) -> Tensor:
        logits_BSV, sums = self.model(token_BS)
        return language_loss(logits_BSV, target_BS, sums)


class WrittenOutGPT2Attention(nn.Module):
    """The parameters of `layer.gpt2_moe.Attention`; queries, keys and values by `split`."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        batch, sequence, width = x_BSD.shape
        query, key, value = (
            t.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(x_BSD).split(width, dim=-1)
        )
        allowed_SS = torch.ones(sequence, sequence, dtype=torch.bool, device=x_BSD.device).tril()
        y = written_out_attention(query, key, value, allowed_SS)
        return self.out(y.transpose(1, 2).contiguous().view(batch, sequence, width))


MODELS: dict[str, Callable[[Size], nn.Module]] = {
    "gpt2": lambda size: GPT2Loss(size, written_out=False),
    "gpt2-written-out": lambda size: GPT2Loss(size, written_out=True),
    "bert": lambda size: BertMoE(size, written_out=False),
    "bert-written-out": lambda size: BertMoE(size, written_out=True),
    "llama": lambda size: LlamaMoE(size, written_out=False),
    "llama-written-out": lambda size: LlamaMoE(size, written_out=True),
}


def make_model(
    name: str, size: Size | None = None, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model and the inputs of one step; the same ones every time.

    Weights are drawn larger than for training, so that routing is skewed and tokens are dropped. All tokens
    differ: equal ones would tie wherever tokens compete, and then the last bit of a product decides.
    """
    size = size or Size()
    torch.manual_seed(0)
    model = MODELS[name](size).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    generator = torch.Generator().manual_seed(1)
    shape = size.batch, size.sequence
    drawn = [torch.randperm(size.vocab, generator=generator) for _ in range(2)]
    token_BS, target_BS = (d[: size.batch * size.sequence].view(shape) for d in drawn)
    if not name.startswith("bert"):
        return model, (token_BS, target_BS)
    type_BS = torch.randint(2, shape, generator=generator)
    real_BS = torch.arange(size.sequence) < torch.randint(
        2, size.sequence + 1, (size.batch, 1), generator=generator
    )
    return model, (token_BS, type_BS, real_BS, target_BS)
