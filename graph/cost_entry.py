"""Measured times of fused launches of one kind of layer on one device, as stored in the cache, and linear
interpolation between them.

A point is a launch that `lancet tune` timed: direction, rows that this rank puts, FLOPs of the riders (weight
gradients of other layers in the same launch), milliseconds. The time of another launch is interpolated

    1. in rider FLOPs, for each measured number of rows; `most_rider_flops` is the end of the range
    2. in rows. Fewer rows than measured: the time of the fewest. More: the line through the last two points
       is extended; if it falls, the time of the last point.

Example, measured ms of a backward:

    rows     0 FLOPs   2e9 FLOPs
    1,000      1.0        1.2
    3,000      2.0        2.0

2,000 rows with 1e9 rider FLOPs: 1.1 ms at 1,000 rows and 2.0 ms at 3,000 rows, so (1.1 + 2.0) / 2 = 1.55 ms.
500 rows without riders: 1.0 ms. 4,000 rows without riders: 2.0 + (2.0 - 1.0) / 2 = 2.5 ms.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lancet_kernels.kernels.tuned_entry import MEASURED, key_of

DIRECTIONS = ("forward", "backward")
# The different numbers of rows that interpolation needs.
FEWEST_SIZES = 2
# The method, and the "device", of points from the interpreter, which are no measurements.
INTERPRETER = "interpreter"


@dataclass(frozen=True)
class LayerKind:
    """The properties of a layer that select its measurements: all but the amount of work.

    Attributes: width, hidden: D and F of the experts. dtype: of the rows ("bfloat16"). ranks: in its group.
    """

    width: int
    hidden: int
    activation: str
    dtype: str
    ranks: int

    @property
    def shape(self) -> tuple[int | str, ...]:
        """The shape for the kind "overlap" of `kernels.tuning`."""
        return self.width, self.hidden, self.activation, 1

    def key(self, device: str) -> str:
        """Example: `overlap width=768 hidden=3072 activation=gelu pes_here=1 bfloat16 on ..., 8 ranks`."""
        return f"{key_of('overlap', self.shape, self.dtype, device)}, {self.ranks} ranks"


@dataclass(frozen=True)
class CostPoint:
    """A launch that was timed: `ms` milliseconds for `rows` rows and `rider_flops` FLOPs of riders.

    Raises: ValueError for a direction that is neither "forward" nor "backward", numbers that are not finite
    or negative, and a time of 0.
    """

    direction: str
    rows: int
    rider_flops: float
    ms: float

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise ValueError(f"direction {self.direction!r}")
        for name, least in (("rows", 0), ("rider_flops", 0), ("ms", 1e-9)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < least:
                raise ValueError(f"{name} is {value!r}")


@dataclass(frozen=True)
class CostEntry:
    """All measured points of one kind of layer.

    Attributes:
        device: the GPU's name. how: "measured"; or "interpreter" for both, which is not a measurement.
        config: the fields of the configuration.
        workload: its text form. points: of both directions. triton: its version. date: ISO.
    """

    kind: LayerKind
    device: str
    how: str
    config: dict[str, Any]
    workload: str
    points: tuple[CostPoint, ...]
    triton: str
    date: str

    @property
    def key(self) -> str:
        return self.kind.key(self.device)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> CostEntry:
        """The entry from the values of `asdict`. Raises: ValueError, KeyError, TypeError or
        AttributeError."""
        points = tuple(CostPoint(**point) for point in raw["points"])
        entry = cls(**{**raw, "kind": LayerKind(**raw["kind"]), "points": points})
        if entry.how not in (MEASURED, INTERPRETER) or (entry.how == INTERPRETER) != (
            entry.device == INTERPRETER
        ):
            raise ValueError(f"{entry.how!r} on {entry.device!r}")
        return entry

    def check_enough(self) -> None:
        """Raise ValueError if there are too few points to interpolate."""
        for direction in DIRECTIONS:
            if (sizes := len(self._by_rows(direction))) < FEWEST_SIZES:
                raise ValueError(
                    f"{direction} launches with {sizes} numbers of rows, at least {FEWEST_SIZES} are needed"
                )

    def milliseconds(self, direction: str, rows: float, rider_flops: float = 0.0) -> float:
        """The interpolated time of a launch, for an entry that passes `check_enough`."""
        at_rows = [(n, _interpolate(line, rider_flops)) for n, line in self._by_rows(direction)]
        if rows <= at_rows[-1][0]:
            return _interpolate(at_rows, rows)
        (before, ms_before), (last, ms_last) = at_rows[-2:]
        return ms_last + max(0.0, ms_last - ms_before) * (rows - last) / (last - before)

    def most_rider_flops(self, direction: str) -> float:
        """The most FLOPs of riders that were measured at every number of rows."""
        return min(line[-1][0] for _, line in self._by_rows(direction))

    def _by_rows(self, direction: str) -> list[tuple[float, list[tuple[float, float]]]]:
        """For each number of rows its points as (rider FLOPs, ms); both sorted."""
        lines: dict[int, dict[float, float]] = {}
        for point in self.points:
            if point.direction == direction:
                lines.setdefault(point.rows, {})[point.rider_flops] = point.ms
        return [(rows, sorted(lines[rows].items())) for rows in sorted(lines)]

    def __str__(self) -> str:
        """Source and largest size of the points. Example: measured 2026-11-21 on NVIDIA H100 80GB HBM3, 2
        ranks, 12 launches: 24576 rows take 1.230 ms forward, 2.410 ms backward."""
        longest = {d: max((p for p in self.points if p.direction == d), key=_size) for d in DIRECTIONS}
        times = ", ".join(f"{point.ms:.3f} ms {direction}" for direction, point in longest.items())
        where = f"on {self.device}, {self.kind.ranks} ranks, {len(self.points)} launches"
        return f"{self.how} {self.date} {where}: {longest['forward'].rows} rows take {times}"


def _size(point: CostPoint) -> tuple[int, float]:
    """Sort key: more rows are larger, and of equal rows the launch with fewer riders."""
    return point.rows, -point.rider_flops


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """y at x, interpolated between sorted points (x, y); outside of them, y of the nearest one."""
    i = bisect_left(points, (x,))
    if i == 0 or i == len(points):
        return points[min(i, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
