"""Checkpoints by torch.distributed.checkpoint, loadable with another number of ranks.

One checkpoint is a folder `step-00000040/`. Its index is written last: a folder without one was left by a
save that was killed, and counts as absent. What 2 ranks saved can be loaded by 1 or 4, experts included
(`layer.expert_states`). With several machines the folder must be on a file system that all of them share.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.groups import from_first_rank, group_name
from lancet_kernels.ops.comm.waiting import waiting


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that training changes, in tensors that share memory with the originals."""
    # Imported here and below, because it takes half a second, and most runs keep no checkpoints.
    from torch.distributed.checkpoint.state_dict import get_state_dict

    of_model, of_optimizer = get_state_dict(model, optimizer)
    # Without its hyper-parameters, which a resumed run may change.
    return {"model": of_model, "optimizer": of_optimizer["state"]}


def save_checkpoint(
    folder: str | Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int = 2
) -> Path:
    """Write `folder/step-<step>` and delete all but the `keep` newest. Collective over all ranks."""
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

    Returns: the step after which it was saved. Raises: UserError for one of another model or optimizer.
    """
    import torch.distributed.checkpoint as dcp

    state = training_state(model, optimizer)
    try:
        with _one_rank_is_enough(), waiting("loading of a checkpoint"):
            dcp.load(state, checkpoint_id=path)
    except dcp.CheckpointException as error:
        reason, _ = next(iter(error.failures.values()))
        raise UserError(
            "checkpoint",
            got=f"{path} ({str(reason).rstrip('.')})",
            expected="one of this model and optimizer, saved by this version",
            do="train anew, or resume with what saved it",
        ) from error
    # Tensors were loaded in place; this also takes what a module copies on loading.
    model.load_state_dict(state["model"])
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
