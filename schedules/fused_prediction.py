"""Predicted times of the fused launches of a layer: from measured cost functions, or from the times of its
ops.

measured    `kernels.fused_cost`, fitted to the tuner's times on this device: bytes, FLOPs, programs
modelled    max(communication, GEMMs) / MODELLED_EFFICIENCY + LAUNCH_MS, of the ops' times on streams
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lancet_kernels.kernels.cost_entry import LayerKind
from lancet_kernels.kernels.fused_cost import FusedCost, LaunchWork
from lancet_kernels.kernels.measured_cost import MeasuredCost
from lancet_kernels.ops.groups import group_size
from lancet_kernels.schedules.fused_layers import MatchedLayer

# Between the published 0.87 and 0.94 of fused kernels (MI355X, eight GPUs).
MODELLED_EFFICIENCY = 0.9
LAUNCH_MS = 0.02

MeasuredOf = Callable[[LayerKind], tuple[MeasuredCost | None, str]]
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
class ModelledLaunch:
    """Modelled from the milliseconds of its all-to-alls and of its computations as separate ops."""

    communication_ms: float
    gemm_ms: float

    def milliseconds(self, riders: Sequence[Rider] = ()) -> float:
        gemm_ms = self.gemm_ms + sum(rider.ms for rider in riders)
        return max(self.communication_ms, gemm_ms) / MODELLED_EFFICIENCY + LAUNCH_MS


@dataclass(frozen=True)
class MeasuredLaunch:
    """From its bytes and FLOPs, by the cost function fitted for its direction."""

    function: FusedCost
    work: LaunchWork

    def milliseconds(self, riders: Sequence[Rider] = ()) -> float:
        flops = float(sum(rider.flops for rider in riders))
        return self.function.milliseconds(replace(self.work, independent_flops=flops))


def kind_of(layer: MatchedLayer) -> LayerKind:
    """The properties of a layer that select its measurements."""
    _, hidden, width = layer.w2.meta["val"].shape
    dtype = str(layer.dispatch.meta["val"].dtype).removeprefix("torch.")
    return LayerKind(width, hidden, layer.activation, dtype, group_size(layer.group))


def measured_launch(layer: MatchedLayer, cost: MeasuredCost, direction: str) -> MeasuredLaunch:
    """The launch of a step with the most rows: no choice is dropped while its expert has a free slot."""
    rows = layer.dispatch.meta["val"]
    work = cost.work(direction, rows.shape[0], rows.element_size())
    return MeasuredLaunch(cost.functions[direction], work)


def nothing_measured(kind: LayerKind) -> tuple[None, str]:
    """For planning without any measurement of fused launches."""
    return None, "no measurements are at hand"
