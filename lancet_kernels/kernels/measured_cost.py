"""What did fused launches of this shape take on this device? Measured points, kept by `lancet tune`.

One `CostEntry` is what was timed for one shape of the experts, on so many ranks, with one configuration: the
points themselves, so that a better function can be fitted to them one day. `measured_cost` looks an entry up
and fits (`kernels.fit_cost`). Points of another device, another number of ranks (another link), another
configuration than launches take today, or from the interpreter, are never taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lancet_kernels.kernels.fit_cost import fit_cost
from lancet_kernels.kernels.fused_cost import DIRECTIONS, CostPoint, FusedCost, LaunchWork
from lancet_kernels.kernels.tuning import (
    MEASURED,
    PACKAGE_TABLE,
    TunedCache,
    config_fields,
    default_cache,
    device_name,
    key_of,
    tuned,
)

# Points, and the "device", of runs that prove and do not measure.
INTERPRETER = "interpreter"


@dataclass(frozen=True)
class LayerSort:
    """What the cost of a layer's launches depends on, but for how much there is to move and to compute.

    Attributes: width, hidden: D and F of the experts. dtype: of the rows ("bfloat16"). ranks: in its group.
    """

    width: int
    hidden: int
    activation: str
    dtype: str
    ranks: int

    @property
    def shape(self) -> tuple[int | str, ...]:
        """As `kernels.tuning` has it for the kind "overlap"."""
        return self.width, self.hidden, self.activation, 1

    def key(self, device: str) -> str:
        """Example: `overlap width=768 hidden=3072 activation=gelu pes_here=1 bfloat16 on ..., 8 ranks`."""
        return f"{key_of('overlap', self.shape, self.dtype, device)}, {self.ranks} ranks"


@dataclass(frozen=True)
class CostEntry:
    """Everything that was timed for one sort of layer.

    Attributes:
        device: the GPU's name. how: "measured", or "interpreter" (device and how), which proves only.
        config: the fields of the configuration; a point may have other programs (its own say how many).
        workload: what was run. points: of both directions. triton: its version. date: ISO.
    """

    sort: LayerSort
    device: str
    how: str
    config: dict[str, Any]
    workload: str
    points: tuple[CostPoint, ...]
    triton: str
    date: str

    @property
    def key(self) -> str:
        return self.sort.key(self.device)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> CostEntry:
        """Raises ValueError, KeyError, TypeError or AttributeError for what `asdict` did not make."""
        sort = LayerSort(**raw["sort"])
        points = tuple(CostPoint(**{**p, "work": LaunchWork(**p["work"])}) for p in raw["points"])
        entry = cls(**{**raw, "sort": sort, "points": points})
        if entry.how not in (MEASURED, INTERPRETER) or (entry.how == INTERPRETER) != (
            entry.device == INTERPRETER
        ):
            raise ValueError(f"{entry.how!r} on {entry.device!r}")
        return entry

    def fit(self) -> dict[str, FusedCost]:
        """The cost function of each direction. Raises ValueError, saying why there is none."""
        found = {}
        for direction in DIRECTIONS:
            try:
                found[direction] = fit_cost([p for p in self.points if p.direction == direction])
            except ValueError as error:
                raise ValueError(f"{direction}: {error}") from error
        return found


@dataclass(frozen=True)
class MeasuredCost:
    """The cost functions of a sort of layer, and the entry that they were fitted to."""

    functions: dict[str, FusedCost]
    entry: CostEntry

    def work(self, direction: str, rows: int, itemsize: int) -> LaunchWork:
        """A pass of so many rows with the programs of the configuration."""
        sort, config = self.entry.sort, self.entry.config
        grid = {name: config[name] for name in ("programs", "comm_programs")}
        sizes = sort.width, sort.hidden, sort.activation, itemsize, sort.ranks
        return LaunchWork.of_pass(direction, rows, *sizes, **grid)

    def __str__(self) -> str:
        """Which numbers these are. Example: measured 2026-11-21 on NVIDIA H100 80GB HBM3, 2 ranks, 63
        launches: efficiency 0.91 forward, 0.87 backward, off by 3 % and 5 %."""
        entry = self.entry
        of = {d: (f, [p for p in entry.points if p.direction == d]) for d, f in self.functions.items()}
        efficiencies = ", ".join(f"{f.efficiency:.2f} {direction}" for direction, (f, _) in of.items())
        errors = " and ".join(f"{100 * f.error(points):.0f} %" for f, points in of.values())
        where = f"on {entry.device}, {entry.sort.ranks} ranks, {len(entry.points)} launches"
        return f"measured {entry.date} {where}: efficiency {efficiencies}, off by {errors}"


def measured_cost(sort: LayerSort, device: torch.device) -> tuple[MeasuredCost | None, str]:
    """The measured cost functions for a device, or None; with words for people: what they are, or why none.

    The package's table goes before the user's cache, as for configurations.
    """
    if device.type != "cuda":
        return None, "nothing is measured on a CPU"
    name, _ = device_name(device)
    key = sort.key(name)
    found = [TunedCache(path).costs().get(key) for path in (PACKAGE_TABLE, default_cache())]
    entry = next((entry for entry in found if entry is not None and entry.how == MEASURED), None)
    if entry is None:
        return None, f"nothing is measured for {key}"
    config = tuned("overlap", sort.shape, getattr(torch, sort.dtype), device)
    if config is None or config_fields(config) != entry.config:
        return None, f"what is measured for {key} is of another configuration than the one tuned last"
    try:
        cost = MeasuredCost(entry.fit(), entry)
    except ValueError as error:
        return None, f"no function fits what is measured for {key}: {error}"
    return cost, str(cost)
