"""The measured times of fused launches, which `lancet tune` stores beside the tuned configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lancet_kernels.graph.cost_entry import CostEntry, LayerKind
from lancet_kernels.kernels import tuning
from lancet_kernels.kernels.tuned_entry import MEASURED, config_fields, config_from


class MeasuredLaunches:
    """The section "costs" of a file of tuned configurations. Several processes may write it."""

    def __init__(self, path: str | Path) -> None:
        self._file = tuning.cache_file(path)

    def entries(self) -> dict[str, CostEntry]:
        """All valid ones by key, from the current file."""
        return self._file.records("costs", "measured cost", _from_json)

    def put(self, new: Iterable[CostEntry]) -> None:
        """Add or replace. Raises UserError if the file cannot be written."""
        with self._file.changed() as sections:
            entries = self.entries() | {entry.key: entry for entry in new}
            sections["costs"] = {key: dataclasses.asdict(entries[key]) for key in sorted(entries)}


def _from_json(raw: Any) -> CostEntry:
    entry = CostEntry.from_json(raw)
    config_from("overlap", entry.config)
    return entry


def measured_launches(kind: LayerKind, device: torch.device) -> tuple[CostEntry | None, str]:
    """The measured times of fused launches for a device, or None; and a text with their source, or the reason
    for None.

    The package's table has priority over the user's cache, as for configurations. Points of another device,
    another number of ranks (another link), another configuration than the tuned one, or from the interpreter
    are never used.
    """
    if device.type != "cuda":
        return None, "nothing is measured on a CPU"
    name, _ = tuning.device_name(device)
    key = kind.key(name)
    files = (tuning.PACKAGE_TABLE, tuning.default_cache())
    entries = [MeasuredLaunches(path).entries().get(key) for path in files]
    entry = next((entry for entry in entries if entry is not None and entry.how == MEASURED), None)
    if entry is None:
        return None, f"nothing is measured for {key}"
    config = tuning.tuned("overlap", kind.shape, getattr(torch, kind.dtype), device)
    if config is None or config_fields(config) != entry.config:
        return None, f"the measurements for {key} are of another configuration than the tuned one"
    try:
        entry.check_enough()
    except ValueError as error:
        return None, f"there are too few measurements for {key}: {error}"
    return entry, str(entry)
