"""FSDP2 (`fully_shard`) beside expert parallelism, with a plan.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from torch import nn

from lancet_kernels import MoELayer, fsdp, optimize

STEPS = 20


class Block(nn.Module):
    """x[B, S, 32] -> [B, S, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.experts = MoELayer(32, 64, num_experts=8, top_k=2, gate="topk", capacity_factor=None)
        self.mix = nn.Linear(32, 32)

    def forward(self, x):
        x = x + self.experts(self.norm(x))
        return x + self.mix(x)


class Step(nn.Module):
    """x[B, S, 32] -> loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return (self.blocks(x) - x.roll(1, dims=-1)).square().mean()


def main() -> list[float]:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = fsdp(Step())  # fully_shard of each block; experts over the ranks that hold the same ones
    step = optimize(model, (torch.randn(8, 16, 32),))
    # DTensors of several meshes in one optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(8, 16, 32, generator=generator)
        loss = step(x)
        loss.backward()  # gradients are those of the mean loss of all ranks
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
    if rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
