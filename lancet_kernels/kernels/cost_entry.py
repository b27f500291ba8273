"""What did fused launches of one kind of layer take on one device? Measured points, and lines between them.

A point is a launch that `lancet tune` timed: direction, rows that this rank puts, FLOPs of riders (weight
gradients of other layers that ride along), milliseconds. Between points:

    in rider FLOPs   at each measured number of rows, a line from point to point. What goes beyond the most
                     rider FLOPs measured is not known here: `most_rider_flops` says where that begins.
    in rows          a line between the two neighbouring numbers of rows. Fewer rows than measured take as
                     long as the fewest. More: the line through the last two goes on, but never falls.

Example, measured ms of a backward:

    rows     0 FLOPs   2e9 FLOPs
    1,000      1.0        1.2
    3,000      2.0        2.0

2,000 rows with 1e9 rider FLOPs: at 1,000 rows 1.1, at 3,000 rows 2.0, so 1.55 ms. 500 rows without riders:
1.0 ms. 4,000 rows without riders: 2.0 + (2.0 - 1.0) / 2 = 2.5 ms.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lancet_kernels.kernels.tuned_entry import MEASURED, key_of

DIRECTIONS = ("forward", "backward")
# Numbers of rows that a line needs.
FEWEST_SIZES = 2
# Points, and the "device", of runs that prove and do not measure.
INTERPRETER = "interpreter"


@dataclass(frozen=True)
class LayerKind:
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
class CostPoint:
    """A launch that was timed: `ms` milliseconds for `rows` rows and `rider_flops` FLOPs of riders.

    Raises ValueError for another direction than "forward" or "backward", and numbers that are none, negative,
    or no time at all.
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
    """Everything that was timed for one kind of layer.

    Attributes:
        device: the GPU's name. how: "measured", or "interpreter" (device and how), which proves only.
        config: the fields of the configuration that was launched.
        workload: what was run. points: of both directions. triton: its version. date: ISO.
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
        """Raises ValueError, KeyError, TypeError or AttributeError for what `asdict` did not make."""
        points = tuple(CostPoint(**point) for point in raw["points"])
        entry = cls(**{**raw, "kind": LayerKind(**raw["kind"]), "points": points})
        if entry.how not in (MEASURED, INTERPRETER) or (entry.how == INTERPRETER) != (
            entry.device == INTERPRETER
        ):
            raise ValueError(f"{entry.how!r} on {entry.device!r}")
        return entry

    def check_enough(self) -> None:
        """Raise ValueError, saying what is missing, if there are too few points for a line."""
        for direction in DIRECTIONS:
            if (sizes := len(self._by_rows(direction))) < FEWEST_SIZES:
                raise ValueError(
                    f"{direction} launches with {sizes} numbers of rows, at least {FEWEST_SIZES} are needed"
                )

    def milliseconds(self, direction: str, rows: float, rider_flops: float = 0.0) -> float:
        """A launch of `rows` rows with these riders, by the lines described above. After `check_enough`."""
        at_rows = [(n, _on_line(line, rider_flops)) for n, line in self._by_rows(direction)]
        if rows <= at_rows[-1][0]:
            return _on_line(at_rows, rows)
        (before, ms_before), (last, ms_last) = at_rows[-2:]
        return ms_last + max(0.0, ms_last - ms_before) * (rows - last) / (last - before)

    def most_rider_flops(self, direction: str) -> float:
        """The most FLOPs of riders that were measured with every number of rows."""
        return min(line[-1][0] for _, line in self._by_rows(direction))

    def _by_rows(self, direction: str) -> list[tuple[float, list[tuple[float, float]]]]:
        """(rows, its points as (rider FLOPs, ms)), both ascending."""
        lines: dict[int, dict[float, float]] = {}
        for point in self.points:
            if point.direction == direction:
                lines.setdefault(point.rows, {})[point.rider_flops] = point.ms
        return [(rows, sorted(lines[rows].items())) for rows in sorted(lines)]

    def __str__(self) -> str:
        """Which numbers these are. Example: measured 2026-11-21 on NVIDIA H100 80GB HBM3, 2 ranks, 12
        launches: 24576 rows take 1.230 ms forward, 2.410 ms backward."""
        longest = {d: max((p for p in self.points if p.direction == d), key=_size) for d in DIRECTIONS}
        times = ", ".join(f"{point.ms:.3f} ms {direction}" for direction, point in longest.items())
        where = f"on {self.device}, {self.kind.ranks} ranks, {len(self.points)} launches"
        return f"{self.how} {self.date} {where}: {longest['forward'].rows} rows take {times}"


def _size(point: CostPoint) -> tuple[int, float]:
    """The most rows, and of these the launch without riders, compare as the largest."""
    return point.rows, -point.rider_flops


def _on_line(points: Sequence[tuple[float, float]], x: float) -> float:
    """y at x on the line from point to point; before the first and after the last one, theirs."""
    i = bisect_left(points, (x,))
    if i == 0 or i == len(points):
        return points[min(i, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
