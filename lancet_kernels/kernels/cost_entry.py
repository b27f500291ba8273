"""What fused launches of one shape took on one device: the measured points, as the cache keeps them.

The points themselves, so that a better function can be fitted to them one day (`kernels.fit_cost`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lancet_kernels.kernels.fit_cost import fit_cost
from lancet_kernels.kernels.fused_cost import DIRECTIONS, CostPoint, FusedCost, LaunchWork
from lancet_kernels.kernels.tuned_entry import MEASURED, key_of

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
class CostEntry:
    """Everything that was timed for one kind of layer.

    Attributes:
        device: the GPU's name. how: "measured", or "interpreter" (device and how), which proves only.
        config: the fields of the configuration; a point may have other programs (its own say how many).
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
        kind = LayerKind(**raw["kind"])
        points = tuple(CostPoint(**{**p, "work": LaunchWork(**p["work"])}) for p in raw["points"])
        entry = cls(**{**raw, "kind": kind, "points": points})
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
