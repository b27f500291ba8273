"""A loop of your own with checkpoints: it saves every tenth step and when it must stop, and resumes.

    torchrun --nproc-per-node 2 examples/own_loop.py           # Ctrl-C, then the same again

Model and optimizer are saved by torch.distributed.checkpoint, on any number of ranks for any other.
"""

import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp import Model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from lancet_kernels import ddp, moe_losses

STEPS, SAVE_EVERY = 200, 10


def save(folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Collective. The file that names the step is written last: a save that was killed does not count."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    path = folder / f"step-{step}"
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    if dist.get_rank() == 0:
        (folder / "latest.tmp").write_text(str(step))
        (folder / "latest.tmp").replace(folder / "latest")  # in one step


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint. -> its step; 0: there is none. Collective."""
    newest = [int((folder / "latest").read_text()) if (folder / "latest").exists() else 0]
    dist.broadcast_object_list(newest)  # all ranks load what the first one sees
    if newest[0]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder / f"step-{newest[0]}")
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return newest[0]


def batch(step: int, rank: int) -> torch.Tensor:
    """Depends only on step and rank, so that a resumed run continues with the same data."""
    return torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))


def main(folder: str = "own-loop", steps: int = STEPS) -> dict[int, float]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model()
    wrapped = ddp(model)  # or optimize(...): both share the parameters of the model that is saved
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    Path(folder).mkdir(exist_ok=True)
    first = load(Path(folder), model, optimizer) + 1
    stop = torch.zeros(())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.fill_(1))
    losses = {}
    for step in range(first, steps + 1):
        y, sums = wrapped(batch(step, rank))
        loss = (y - batch(step, rank).roll(1, dims=-1)).square().mean()
        (loss + 0.01 * moe_losses([sums]).balance.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        # One sum for both: all ranks stop after the same step, whichever of them got the signal.
        total = torch.stack([loss.detach(), stop])
        dist.all_reduce(total)
        losses[step] = float(total[0]) / dist.get_world_size()
        if step % SAVE_EVERY == 0 or step == steps or total[1] > 0:
            save(Path(folder), step, model, optimizer)
        if total[1] > 0 and step < steps:
            break
    if rank == 0 and not losses:
        print(f"all {first - 1} steps are in {folder}")
    elif rank == 0:
        print(f"step {step}, loss {losses[step]:.3f}" + ("" if step == steps else "; start again to go on"))
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    folder, steps = [*sys.argv[1:], *("own-loop", str(STEPS))[len(sys.argv) - 1 :]]
    main(folder, int(steps))
