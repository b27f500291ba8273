"""What do fused launches of this shape take on this device? Functions fitted to what `lancet tune` measured.

`measured_cost` looks up the points (`kernels.cost_entry`) and fits (`kernels.fit_cost`). Points of another
device, another number of ranks (another link), another configuration than launches take today, or from the
interpreter, are never taken.
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
    """The cost functions of a kind of layer, and the entry that they were fitted to."""

    functions: dict[str, FusedCost]
    entry: CostEntry

    def work(self, direction: str, rows: int, itemsize: int) -> LaunchWork:
        """A pass of `rows` rows with the programs of the configuration."""
        kind, config = self.entry.kind, self.entry.config
        grid = {name: config[name] for name in ("programs", "comm_programs")}
        sizes = kind.width, kind.hidden, kind.activation, itemsize, kind.ranks
        return LaunchWork.of_pass(direction, rows, *sizes, **grid)

    def __str__(self) -> str:
        """Which numbers these are. Example: measured 2026-11-21 on NVIDIA H100 80GB HBM3, 2 ranks, 63
        launches: efficiency 0.91 forward, 0.87 backward, off by 3 % and 5 %."""
        entry = self.entry
        of = {d: (f, [p for p in entry.points if p.direction == d]) for d, f in self.functions.items()}
        efficiencies = ", ".join(f"{f.efficiency:.2f} {direction}" for direction, (f, _) in of.items())
        errors = " and ".join(f"{100 * f.error(points):.0f} %" for f, points in of.values())
        where = f"on {entry.device}, {entry.kind.ranks} ranks, {len(entry.points)} launches"
        return f"measured {entry.date} {where}: efficiency {efficiencies}, off by {errors}"


def measured_cost(kind: LayerKind, device: torch.device) -> tuple[MeasuredCost | None, str]:
    """The measured cost functions for a device, or None; with words for people: what they are, or why none.

    The package's table goes before the user's cache, as for configurations.
    """
    if device.type != "cuda":
        return None, "nothing is measured on a CPU"
    name, _ = device_name(device)
    key = kind.key(name)
    found = [TunedCache(path).costs().get(key) for path in (PACKAGE_TABLE, default_cache())]
    entry = next((entry for entry in found if entry is not None and entry.how == MEASURED), None)
    if entry is None:
        return None, f"nothing is measured for {key}"
    config = tuned("overlap", kind.shape, getattr(torch, kind.dtype), device)
    if config is None or config_fields(config) != entry.config:
        return None, f"what is measured for {key} is of another configuration than the one tuned last"
    try:
        cost = MeasuredCost(entry.fit(), entry)
    except ValueError as error:
        return None, f"no function fits what is measured for {key}: {error}"
    return cost, str(cost)
