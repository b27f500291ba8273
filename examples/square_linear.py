"""An MLP with a quarter of its weights on each of 4 ranks, beside the same MLP of `nn.Linear`.

    torchrun --nproc-per-node 4 examples/square_linear.py

All ranks see the same batch; each takes its tile of it, and tiles of weights and activations are sent from
rank to rank during the GEMMs. Collectives only gather the output and sum gradients of biases.
"""

import torch
import torch.distributed as dist
from torch import nn

from lancet_kernels import SquareLinear

STEPS, ROWS, WIDTH = 20, 64, 32


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = SquareLinear(WIDTH, 4 * WIDTH, takes="skewed")
        self.fc2 = SquareLinear(4 * WIDTH, WIDTH, gives="skewed")

    def forward(self, x):
        tile = self.fc1.scatter(x)
        tile = self.fc2(nn.functional.gelu(self.fc1(tile)))
        return self.fc2.gather(tile, x.shape[:-1])


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, gradients and Adam's moments on this rank."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [t for p in parameters for t in (p, p.grad, *optimizer.state[p].values())]
    return sum(t.nbytes for t in tensors if t.dim())


def train(model: nn.Module) -> tuple[list[float], int]:
    """-> the loss of each step, and bytes held at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=generator)
        loss = (model(x) - x.roll(1, dims=-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, held_bytes(optimizer)


def main() -> list[float]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    losses, held = train(Mlp())
    whole = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    _, held_whole = train(whole)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, {held} bytes a rank, with nn.Linear {held_whole}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
