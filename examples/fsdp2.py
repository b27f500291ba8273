"""FSDP2 (`fully_shard`) for everything but the experts, which are spread over the ranks already.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Nothing is planned: `optimize` refuses sharded parameters.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lancet_kernels import MoELayer, expert_parameters

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


def main() -> list[float]:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    experts = set(expert_parameters(model))
    for module in (*model, model):
        fully_shard(module, ignored_params=experts)
    for parameter in experts:
        # FSDP averages over the ranks. The backward all-to-all has summed the gradient of an expert over all
        # tokens already. (Where replicas hold the same experts, all-reduce it over them, too.)
        parameter.register_hook(lambda gradient: gradient / ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)  # DTensors and plain tensors
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(8, 16, 32, generator=generator)
        loss = (model(x) - x.roll(1, dims=-1)).square().mean()
        loss.backward()
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
