"""Cost functions of fused launches on this device, fitted to the measurements of `lancet tune`.

`measured_cost` looks up the points (`kernels.cost_entry`) and fits a function (`kernels.fit_cost`). Points of
another device, another number of ranks, another configuration than the currently tuned one, or from the
interpreter, are never used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lancet_kernels.kernels.cost_entry import CostEntry, LayerKind
from lancet_kernels.kernels.fused_cost import FusedCost, LaunchWork
from lancet_kernels.kernels.tuned_entry import MEASURED, config_fields
from lancet_kernels.kernels.tuning import PACKAGE_TABLE, TunedCache, default_cache, device_name, tuned


@dataclass(frozen=True)
class MeasuredCost:
    """The cost functions of a kind of layer, and the entry that they are fitted to."""

    functions: dict[str, FusedCost]
    entry: CostEntry

    def work(self, direction: str, rows: int, itemsize: int) -> LaunchWork:
        """The work of a pass of `rows` rows, with the programs of the configuration."""
        kind, config = self.entry.kind, self.entry.config
        grid = {name: config[name] for name in ("programs", "comm_programs")}
        sizes = kind.width, kind.hidden, kind.activation, itemsize, kind.ranks
        return LaunchWork.of_pass(direction, rows, *sizes, **grid)

    def __str__(self) -> str:
        """Source and quality of the functions. Example: measured 2026-11-21 on NVIDIA H100 80GB HBM3, 2
        ranks, 63
        launches: efficiency 0.91 forward, 0.87 backward, off by 3 % and 5 %."""
        entry = self.entry
        of = {d: (f, [p for p in entry.points if p.direction == d]) for d, f in self.functions.items()}
        efficiencies = ", ".join(f"{f.efficiency:.2f} {direction}" for direction, (f, _) in of.items())
        errors = " and ".join(f"{100 * f.error(points):.0f} %" for f, points in of.values())
        where = f"on {entry.device}, {entry.kind.ranks} ranks, {len(entry.points)} launches"
        return f"measured {entry.date} {where}: efficiency {efficiencies}, off by {errors}"


def measured_cost(kind: LayerKind, device: torch.device) -> tuple[MeasuredCost | None, str]:
    """The measured cost functions for a device, or None; and a text with their source, or the reason for
    None.

    The package's table has priority over the user's cache, as for configurations.
    """
    if device.type != "cuda":
        return None, "nothing is measured on a CPU"
    name, _ = device_name(device)
    key = kind.key(name)
    entries = [TunedCache(path).costs().get(key) for path in (PACKAGE_TABLE, default_cache())]
    entry = next((entry for entry in entries if entry is not None and entry.how == MEASURED), None)
    if entry is None:
        return None, f"nothing is measured for {key}"
    config = tuned("overlap", kind.shape, getattr(torch, kind.dtype), device)
    if config is None or config_fields(config) != entry.config:
        return None, f"the measurements for {key} are of another configuration than the tuned one"
    try:
        cost = MeasuredCost(entry.fit(), entry)
    except ValueError as error:
        return None, f"no function fits the measurements for {key}: {error}"
    return cost, str(cost)
