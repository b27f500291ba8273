"""Checkpoints: complete or absent, and loadable with another number of ranks.

One checkpoint is a folder `step-00000040/` with the files of torch.distributed.checkpoint and
`checkpoint.json`: step, what was trained, and the size and CRC-32 of every file. It is written under a
temporary name and renamed when complete, so a folder with the final name is complete; one whose files
were damaged later fails its checksums and is skipped.

Experts are stored one by one under global ids, in the model's state (see `MoELayer`) and in the
optimizer's, so what 2 ranks saved can be loaded by 1 or 4. With several machines the folder must be on
a file system that all of them share.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels.atomic import sync_folder, write_json_atomically
from lancet_kernels.errors import UserError
from lancet_kernels.layer import MoELayer
from lancet_kernels.ops.groups import from_first_rank, group_name
from lancet_kernels.ops.waiting import waiting

_log = logging.getLogger(__name__)
_FACTS = "checkpoint.json"
_INDEX = ".metadata"
_STEP = re.compile(r"step-\d{8,}")


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that training changes, as a flat dict of tensors that share memory with the originals.

    `model.<name>` and `optimizer.<parameter>.<state>`; experts one by one under their global ids.
    """
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for owner_name, owner in model.named_modules():
        prefix = f"{owner_name}." if owner_name else ""
        for name, parameter in owner.named_parameters(recurse=False):
            for key, value in optimizer.state.get(parameter, {}).items():
                state |= _named_state(f"optimizer.{prefix}", name, key, value, owner, parameter)
    return state


def _named_state(
    prefix: str, name: str, key: str, value: Tensor, owner: nn.Module, parameter
) -> dict[str, Tensor]:
    if isinstance(owner, MoELayer) and name in owner.expert_names() and value.shape == parameter.shape:
        return {f"{prefix}experts.{e}.{name}.{key}": value[i] for i, e in enumerate(owner.expert_ids())}
    return {f"{prefix}{name}.{key}": value}


def _create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer allocate its state, changing no parameter: loading needs tensors to load into."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        # As a tensor where the optimizer keeps it so (capturable), a zero rate is still a zero rate.
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    about: Mapping[str, object],
    keep: int = 2,
) -> Path:
    """Write `folder/step-<step>` and delete all but the `keep` newest. Collective over all ranks.

    Args: about: what was trained (architecture and the like); `load_checkpoint` compares it.
    """
    final = folder / f"step-{step:08d}"
    temporary = folder / f".{final.name}.tmp"
    if _is_first():
        for leftover in folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover)
        shutil.rmtree(final, ignore_errors=True)
        temporary.mkdir(parents=True)
    _barrier()
    with _one_rank_is_enough(), waiting("saving of a checkpoint"):
        _dcp().save(training_state(model, optimizer), checkpoint_id=temporary)
    _barrier()
    if _is_first():
        facts = {"step": step, "about": dict(about), "files": _sums(temporary)}
        write_json_atomically(temporary / _FACTS, facts)
        temporary.rename(final)
        sync_folder(folder)
        for old in _folders(folder)[keep:]:
            shutil.rmtree(old)
    _barrier()
    return final


def find_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`; None if there is none. For each damaged one a warning is
    logged.

    Decided on rank 0 for all ranks (collective).
    """
    newest: Path | None = None
    if _is_first():
        for candidate in _folders(folder):
            damage = _damage(candidate)
            if damage is None:
                newest = candidate
                break
            _log.warning("passing over damaged checkpoint %s: %s", candidate, damage)
    return from_first_rank(newest, group_name(None), "the choice of a checkpoint")


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, about: Mapping[str, object]
) -> int:
    """Load `path` (from `find_checkpoint`) into model and optimizer, in place. Collective over all ranks.

    Returns: the step after which it was saved.
    Raises: UserError if the checkpoint is of another model or optimizer than `about`.
    """
    facts = json.loads((path / _FACTS).read_text(encoding="utf-8"))
    for key, value in about.items():
        saved = facts["about"].get(key)
        if saved != value:
            raise UserError(
                f"resume: {key}",
                got=f"{saved} in {path.parent.parent.name}/{path.name}",
                expected=f"{value}, which this run asks for",
                do=f"resume with the {key} that was saved, or start a new run",
            )
    _create_optimizer_state(optimizer)
    state = training_state(model, optimizer)
    with _one_rank_is_enough(), waiting("loading of a checkpoint"):
        _dcp().load(state, checkpoint_id=path)
    # Parameters were loaded in place through the views; this also takes what a module copies on loading.
    model.load_state_dict({k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")})
    return int(facts["step"])


def _folders(folder: Path) -> list[Path]:
    """The folders of checkpoints, newest step first; anything else in the folder is ignored."""
    folders = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=_step_of, reverse=True)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _sums(folder: Path) -> dict[str, list[int]]:
    """File name -> [size in bytes, CRC-32], of all files but the one that will hold this."""
    return {p.name: _sum(p) for p in sorted(folder.iterdir()) if p.is_file() and p.name != _FACTS}


def _sum(path: Path) -> list[int]:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            crc = zlib.crc32(piece, crc)
    return [path.stat().st_size, crc]


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is whole."""
    try:
        facts = json.loads((checkpoint / _FACTS).read_text(encoding="utf-8"))
        step, about, expected = facts["step"], facts["about"], facts["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{_FACTS} cannot be read ({type(error).__name__})"
    if step != _step_of(checkpoint) or not isinstance(about, dict) or not isinstance(expected, dict):
        return f"{_FACTS} is changed"
    actual = _sums(checkpoint)
    for name in sorted({_INDEX, *expected, *actual}):
        if name not in actual:
            return f"{name} is missing"
        if actual[name] != expected.get(name):
            return f"{name} is changed"
    return None


@contextlib.contextmanager
def _one_rank_is_enough() -> Iterator[None]:
    """Suppress the warning that torch.distributed is not initialized, which is normal for a single rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        with waiting("barrier of a checkpoint"):
            dist.barrier()


def _dcp():
    # Imported here, because it takes half a second, and most runs keep no checkpoints.
    import torch.distributed.checkpoint as dcp

    return dcp
