"""Predicted times of the fused launches of a layer: from measured launches, or without these by a formula.

measured    interpolated between the launches that `lancet tune` timed on this device (`graph.cost_entry`).
            Riders with more FLOPs than were measured take their time on a stream for the excess.
formula     max(communication, GEMMs) / EFFICIENCY + LAUNCH_MS, from the times of the ops on streams; with
            keep="tokens" the backward's communication has the all-to-all of x besides (measured launches
            are of layers that keep rows)

Example of the formula: all-to-alls of 2.0 ms and GEMMs of 1.5 ms take 2.0 / 0.85 + 0.02 = 2.37 ms, and 3.5 ms
on streams if nothing overlaps. A rider of 0.4 ms adds nothing; one of 0.8 ms (GEMMs 2.3 ms) adds 0.35 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lancet_kernels.graph.cost_entry import CostEntry, LayerKind
from lancet_kernels.ops.groups import group_size
from lancet_kernels.schedules.fused_layers import MatchedLayer

# Conservative: fused kernels of others reach 0.87 to 0.94 (MI355X, eight GPUs); ours are not measured.
EFFICIENCY = 0.85
LAUNCH_MS = 0.02

MeasuredOf = Callable[[LayerKind], tuple[CostEntry | None, str]]
"""The measurements for a kind of layer, or None; and a text: their source, or why there are none."""


@dataclass(frozen=True)
class Rider:
    """A weight gradient of another layer that a launch may compute as filler: its ms on a stream, its
    FLOPs."""

    name: str
    ms: float
    flops: float


class Launch(Protocol):
    """One direction of a layer as a fused launch."""

    def milliseconds(self, riders: Sequence[Rider] = ()) -> float:
        """The time of the launch with these fillers in it."""


@dataclass(frozen=True)
class FormulaLaunch:
    """By the formula, from the times of its all-to-alls and of its computations as separate ops."""

    communication_ms: float
    gemm_ms: float

    def milliseconds(self, riders: Sequence[Rider] = ()) -> float:
        gemm_ms = self.gemm_ms + sum(rider.ms for rider in riders)
        return max(self.communication_ms, gemm_ms) / EFFICIENCY + LAUNCH_MS


@dataclass(frozen=True)
class MeasuredLaunch:
    """A launch of `rows` rows, from the measured launches of its direction."""

    measured: CostEntry
    direction: str
    rows: int

    def milliseconds(self, riders: Sequence[Rider] = ()) -> float:
        flops, ms = float(sum(rider.flops for rider in riders)), sum(rider.ms for rider in riders)
        measured = min(flops, self.measured.most_rider_flops(self.direction))
        on_a_stream = ms * (1 - measured / flops) if flops else ms
        return self.measured.milliseconds(self.direction, self.rows, measured) + on_a_stream


def kind_of(layer: MatchedLayer) -> LayerKind:
    """The properties of a layer that select its measurements."""
    _, hidden, width = layer.w2.meta["val"].shape
    dtype = str(layer.dispatch.meta["val"].dtype).removeprefix("torch.")
    return LayerKind(width, hidden, layer.activation, dtype, group_size(layer.group))


def measured_launch(layer: MatchedLayer, measured: CostEntry, direction: str) -> MeasuredLaunch:
    """The launch of a step with the most rows: no choice is dropped while its expert has a free slot."""
    return MeasuredLaunch(measured, direction, layer.dispatch.meta["val"].shape[0])


def with_more_riders(
    launch: Launch, riders: Sequence[Rider], flops_per_ms: float
) -> tuple[tuple[float, float], ...]:
    """(ms of more riders on a stream, ms of the launch with them and `riders`), from no more riders to twice
    the time of the launch.

    Args: flops_per_ms: of the additional riders.
    """
    alone = launch.milliseconds(riders)
    points = []
    for share in (0.0, 0.25, 0.5, 1.0, 2.0):
        more = Rider("more", share * alone, share * alone * flops_per_ms)
        points.append((more.ms, launch.milliseconds([*riders, more])))
    return tuple(points)


def nothing_measured(kind: LayerKind) -> tuple[None, str]:
    """For planning without any measurement of fused launches."""
    return None, "no measurements are at hand"
