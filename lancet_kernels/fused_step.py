"""Chooses the layers of a captured step that are fused, for `optimize(backend="fused")`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import fx

from lancet_kernels.captured_step import CapturedStep, CostedGraph
from lancet_kernels.errors import UserError
from lancet_kernels.graph.clusters import Cluster
from lancet_kernels.graph.cost_entry import CostEntry, LayerKind
from lancet_kernels.graph.costs import Cost
from lancet_kernels.graph.measured_launches import measured_launches
from lancet_kernels.graph.program import Program
from lancet_kernels.rank_agreement import capture_alike, fused_groups_of_first_rank
from lancet_kernels.schedules.fused import CHOICES, choose_groups
from lancet_kernels.schedules.fused_layers import MatchedLayer
from lancet_kernels.schedules.plan import FusedGroup, Plan
from lancet_kernels.schedules.realize import GraphCutter
from lancet_kernels.schedules.strategies import AUTO, DUPLEX, Planner, PlanningOptions

# Strategies that may use fused launches; the others reproduce other systems for comparison.
FUSED_STRATEGIES = (AUTO, "lancet", "lancet-dw", *DUPLEX)


@dataclass
class FusedChoice:
    """Chooses the layers to fuse.

    stored: a plan file, whose choice is used if it has one for this program. device: of the model.
    here: are the costs those of this machine? Otherwise its measurements of fused launches are not used.
    Raises: UserError for a strategy or a device without fused launches.
    """

    strategy: str
    options: PlanningOptions | None
    lowering: str
    stored: str | Path | None
    device: torch.device
    here: bool = True
    _streams_ms: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        # Imported here, because the kernels need Triton, which is not installed everywhere.
        from lancet_kernels.kernels.runtime import check_runs_on

        check_runs_on("model with backend='fused'", self.device)
        if self.strategy not in FUSED_STRATEGIES:
            raise UserError(
                "strategy with backend='fused'",
                got=self.strategy,
                expected=f"one of {', '.join(FUSED_STRATEGIES)}",
                do="use backend='torch' for it",
            )
        if self.lowering not in CHOICES:
            raise UserError("lowering", got=repr(self.lowering), expected=f"one of {CHOICES}", do="name one")

    @property
    def interpreted(self) -> bool:
        """Do kernels run in the interpreter? Its times say nothing about a GPU."""
        from lancet_kernels.kernels.runtime import INTERPRETED

        return INTERPRETED

    def groups(
        self,
        module: fx.GraphModule,
        program: Program,
        cost: Cost,
        keeps_tokens: Callable[[MatchedLayer], bool] = lambda layer: False,
    ) -> tuple[FusedGroup, ...]:
        """The decision for every MoE layer: from the stored plan, or the one that is predicted faster."""
        if self.stored is not None:
            stored_groups = _stored_groups(self.stored, program)
            if stored_groups:
                return stored_groups
        lowering = "fused" if self.lowering == "auto" and self.interpreted else self.lowering
        planner = Planner(program, cost, self.options, GraphCutter(module, program, cost))
        # Layers are fused whole, so the plan to compare with has no copies of the step (`auto` may have).
        timeline = planner.timeline(planner.plan("lancet" if self.strategy == AUTO else self.strategy))
        if lowering == "auto":
            self._streams_ms = planner.plan(self.strategy).predicted.iteration_ms
        return choose_groups(
            module, program, cost, timeline, lowering=lowering, measured_of=self._measured_of,
            keeps_tokens=keeps_tokens,
        )  # fmt: skip

    def confirmed(self, groups: tuple[FusedGroup, ...], fused: CostedGraph) -> tuple[FusedGroup, ...]:
        """The same decisions, or all on streams if the whole step is predicted slower with fused layers.

        `groups` decides layer by layer, without the effect on the rest of the step: a fused layer has no
        all-to-alls that other computation could overlap.

        Args: groups: from `groups`. fused: the step with these layers fused.
        """
        if self._streams_ms == math.inf:
            return groups  # lowering is not "auto"
        fused_ms = fused.planner(self.options).plan(self.strategy).predicted.iteration_ms
        if fused_ms <= self._streams_ms:
            return groups
        reason = f"{self._streams_ms:.3f} ms, {fused_ms:.3f} ms with fused layers"
        why = f"streams: the whole step is predicted faster ({reason})"
        return tuple(
            replace(group, fused=False, fillers=(), why=f"{why}; alone {group.why}") if group.fused else group
            for group in groups
        )

    def _measured_of(self, kind: LayerKind) -> tuple[CostEntry | None, str]:
        if not self.here:
            return None, "the plan is for another machine"
        return measured_launches(kind, self.device)


def _stored_groups(file: str | Path, program: Program) -> tuple[FusedGroup, ...]:
    """The decisions of a plan file; none if it has none for this program."""
    try:
        groups = Plan.load(file).fused
    except UserError:
        return ()  # the error is reported when the plan itself is loaded
    names = {name for group in groups for name in (group.layer, *group.fillers)}
    return groups if names <= set(program.index) else ()


def fuse_layers(
    step: CapturedStep, choice: FusedChoice, cluster: str | Path | Cluster | None, graph: CostedGraph
) -> CostedGraph:
    """The step with the layers fused that rank 0 chooses; `graph` itself if it chooses none.

    Collective over all ranks. Args: cluster: as in `CapturedStep.costed`.
    """
    world = step.groups.world
    step.fused = fused_groups_of_first_rank(
        world, lambda: choice.groups(graph.module, graph.program, graph.cost, step.keeps_tokens)
    )
    if not any(group.fused for group in step.fused):
        return graph
    fused = step.costed(*capture_alike(step), cluster)
    step.fused = fused_groups_of_first_rank(world, lambda: choice.confirmed(step.fused, fused))
    if not any(group.fused for group in step.fused):
        step.forget_fused_layers()
        return graph
    return fused
