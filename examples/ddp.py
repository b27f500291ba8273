"""A plain training loop with DistributedDataParallel around a model that contains an `MoELayer`.

    torchrun --nproc-per-node 2 examples/ddp.py

`lancet_kernels.ddp` is DistributedDataParallel that leaves each rank its own experts. Nothing is planned.
"""

import torch
import torch.distributed as dist
from torch import nn

from lancet_kernels import MoELayer, ddp, moe_losses

STEPS = 20


class Model(nn.Module):
    """x[B, S, 32] -> y[B, S, 32], and the routing sums of its MoE layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.experts = MoELayer(32, 64, num_experts=8, top_k=2, gate="topk", capacity_factor=None)
        self.head = nn.Linear(32, 32)

    def forward(self, x):
        y, sums = self.experts(self.norm(x), return_sums=True)
        return self.head(x + y), sums


def main() -> list[float]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = ddp(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(8, 16, 32, generator=generator)
        y, sums = model(x)
        loss = (y - x.roll(1, dims=-1)).square().mean()
        (loss + 0.01 * moe_losses([sums]).balance.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    if rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
