"""A transformer written for one device, trained by two or more ranks: `parallelize` shards it.

    torchrun --nproc-per-node 2 examples/shard_model.py
    torchrun --nproc-per-node 2 examples/shard_model.py "data parallel"

Every rank gets the whole batch in every step, and computes its part of it.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from lancet_kernels import ParallelModule, parallelize

STEPS = 20
VOCABULARY, WIDTH, HEADS, LAYERS, SEQUENCE, BATCH = 64, 32, 4, 2, 16, 8


class Layer(nn.Module):
    """Causal attention and a gated feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """tokens[B, S] -> loss of the next token. The embedding is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens):
        x = self.norm(self.layers(self.embedding(tokens)))
        logits = functional.linear(x[:, :-1], self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main(strategy: str = "hidup", cluster: str | None = None) -> list[float]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tokens = torch.arange(SEQUENCE) + torch.randint(VOCABULARY, (BATCH, 1))
    step = parallelize(Model(), (tokens % VOCABULARY,), strategy=strategy, cluster=cluster)
    optimizer = torch.optim.AdamW(step.parameters(), lr=3e-3)
    if dist.get_rank() == 0 and isinstance(step, ParallelModule):
        print(step.explain())
    losses = []
    for _ in range(STEPS):
        tokens = (torch.arange(SEQUENCE) + torch.randint(VOCABULARY, (BATCH, 1))) % VOCABULARY
        loss = step(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
