"""Checkpoints by torch.distributed.checkpoint, loadable with another number of ranks.

One checkpoint is a folder `step-00000040/`. Its index is written last: a folder without one was left by a
save that was killed, and counts as absent. Experts are stored one by one under global ids, in the model's
state (see `MoELayer`) and in the optimizer's, so what 2 ranks saved can be loaded by 1 or 4. With several
machines the folder must be on a file system that all of them share.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels.layer.moe_layer import MoELayer
from lancet_kernels.ops.comm.groups import from_first_rank, group_name
from lancet_kernels.ops.comm.waiting import waiting


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that training changes, as a flat dict of tensors that share memory with the originals.

    `model.<name>` and `optimizer.<parameter>.<state>`; experts one by one under their global ids.
    """
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for owner_name, owner in model.named_modules():
        prefix = f"optimizer.{owner_name}." if owner_name else "optimizer."
        for name, parameter in owner.named_parameters(recurse=False):
            of_experts = isinstance(owner, MoELayer) and name in owner.expert_names()
            for key, value in optimizer.state.get(parameter, {}).items():
                if of_experts and value.shape == parameter.shape:
                    ids = owner.expert_ids()
                    state |= {f"{prefix}experts.{e}.{name}.{key}": value[i] for i, e in enumerate(ids)}
                else:
                    state[f"{prefix}{name}.{key}"] = value
    return state


def save_checkpoint(
    folder: str | Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int = 2
) -> Path:
    """Write `folder/step-<step>` and delete all but the `keep` newest. Collective over all ranks."""
    # Imported here and below, because it takes half a second, and most runs keep no checkpoints.
    import torch.distributed.checkpoint as dcp

    path = Path(folder, f"step-{step:08d}")
    with _one_rank_is_enough(), waiting("saving of a checkpoint"):
        dcp.save(training_state(model, optimizer), checkpoint_id=path)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for old in _complete(folder)[:-keep]:
            shutil.rmtree(old)
    return path


def find_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in `folder`; None if there is none.

    Decided on rank 0 for all ranks (collective).
    """
    complete = _complete(folder)
    return from_first_rank(complete[-1] if complete else None, group_name(None), "the choice of a checkpoint")


def load_checkpoint(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load `path` (from `find_checkpoint`) into model and optimizer, in place. Collective over all ranks.

    Returns: the step after which it was saved.
    """
    import torch.distributed.checkpoint as dcp

    # A step makes the optimizer allocate its state: loading needs tensors to load into.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    state = training_state(model, optimizer)
    with _one_rank_is_enough(), waiting("loading of a checkpoint"):
        dcp.load(state, checkpoint_id=path)
    # Parameters were loaded in place through the views; this also takes what a module copies on loading.
    model.load_state_dict({k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")})
    return int(Path(path).name.removeprefix("step-"))


def _complete(folder: str | Path) -> list[Path]:
    """The complete checkpoints in a folder, by their steps."""
    return sorted(index.parent for index in Path(folder).glob("step-*/.metadata"))


@contextlib.contextmanager
def _one_rank_is_enough() -> Iterator[None]:
    """Suppress the warning that torch.distributed is not initialized, which is normal for a single rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
