"""Measured times of fused launches of one shape on one device, as stored in the cache.

The points themselves are stored, so that the cost function (`kernels.fit_cost`) can be improved later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lancet_kernels.kernels.fit_cost import fit_cost
from lancet_kernels.kernels.fused_cost import DIRECTIONS, CostPoint, FusedCost, LaunchWork
from lancet_kernels.kernels.tuned_entry import MEASURED, key_of

# The method, and the "device", of points from the interpreter, which are no measurements.
INTERPRETER = "interpreter"


@dataclass(frozen=True)
class LayerKind:
    """The properties of a layer that its cost function depends on, without the amount of work.

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
class CostEntry:
    """All measured points of one kind of layer.

    Attributes:
        device: the GPU's name. how: "measured"; or "interpreter" for both, which is not a measurement.
        config: the fields of the configuration; the numbers of programs are those of each point.
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
        kind = LayerKind(**raw["kind"])
        points = tuple(CostPoint(**{**p, "work": LaunchWork(**p["work"])}) for p in raw["points"])
        entry = cls(**{**raw, "kind": kind, "points": points})
        if entry.how not in (MEASURED, INTERPRETER) or (entry.how == INTERPRETER) != (
            entry.device == INTERPRETER
        ):
            raise ValueError(f"{entry.how!r} on {entry.device!r}")
        return entry

    def fit(self) -> dict[str, FusedCost]:
        """The cost function of each direction. Raises: ValueError with the reason if none fits."""
        functions = {}
        for direction in DIRECTIONS:
            try:
                functions[direction] = fit_cost([p for p in self.points if p.direction == direction])
            except ValueError as error:
                raise ValueError(f"{direction}: {error}") from error
        return functions
