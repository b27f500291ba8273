"""A training loop of torchtitan's shape: a job configuration, a device mesh, FSDP2 beside expert parallelism,
a Trainer with one method per concern, a distributed checkpoint.

    torchrun --nproc-per-node 2 examples/torchtitan_style.py          # as FSDP2 runs it
    torchrun --nproc-per-node 2 examples/torchtitan_style.py --plan   # the same with a plan

torchtitan itself is not imported.
"""

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lancet_kernels import MoELayer, clip_gradients, fsdp, optimize


@dataclass
class JobConfig:
    steps: int = 20
    batch: int = 8
    sequence: int = 16
    vocabulary: int = 64
    width: int = 32
    experts: int = 8
    layers: int = 2
    lr: float = 1e-2
    max_norm: float = 1.0
    plan: bool = False
    checkpoint: str | None = None


class Block(nn.Module):
    def __init__(self, config: JobConfig, mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width)
        self.moe = MoELayer(
            config.width, 2 * config.width, config.experts, top_k=2, gate="topk", capacity_factor=None,
            activation="swiglu", groups=mesh,
        )  # fmt: skip
        self.mix = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.moe(self.norm(x)))


class Transformer(nn.Module):
    """ids[B, S], labels[B, S] -> loss. Without attention, for brevity."""

    def __init__(self, config: JobConfig, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config, mesh) for _ in range(config.layers))
        self.output = nn.Linear(config.width, config.vocabulary)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.output(x).flatten(0, 1), labels.flatten())


class Trainer:
    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        self.data = torch.Generator().manual_seed(dist.get_rank())
        # torchtitan builds on the meta device and initializes after sharding; on CPU ranks all shards
        # of a DTensor would then get the same random numbers.
        torch.manual_seed(0)
        self.model = Transformer(config, self.mesh)
        fsdp(self.model, self.mesh)
        self.step: nn.Module = self.model
        if config.plan:
            self.step = optimize(self.model, self.next_batch())
            self.data.manual_seed(dist.get_rank())
        # DTensors of several meshes in one optimizer
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1, (step + 1) / 5)
        )

    def next_batch(self) -> tuple[Tensor, Tensor]:
        config = self.config
        first = torch.randint(0, config.vocabulary, (config.batch, 1), generator=self.data)
        ids = (first + torch.arange(config.sequence + 1)) % config.vocabulary
        return ids[:, :-1], ids[:, 1:]

    def forward_backward(self) -> Tensor:
        """-> the mean loss of all ranks, whose gradients these are."""
        loss = self.step(*self.next_batch())
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss / self.mesh.size()

    def train_step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.forward_backward()
        clip_gradients(self.model, self.config.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        return float(loss)

    def train(self) -> list[float]:
        losses = [self.train_step() for _ in range(self.config.steps)]
        if self.config.checkpoint:
            # Experts are saved under their global ids: any number of ranks can load them.
            dcp.save({"model": self.model.state_dict()}, checkpoint_id=self.config.checkpoint)
        return losses


def main(config: JobConfig) -> list[float]:
    dist.init_process_group("gloo")
    losses = Trainer(config).train()
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--checkpoint")
    main(JobConfig(**vars(parser.parse_args())))
