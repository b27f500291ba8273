"""For `optimize(backend="fused")`: which layers of a captured step are fused."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import fx

from lancet_kernels.captured_step import CapturedStep, CostedGraph
from lancet_kernels.errors import UserError
from lancet_kernels.graph.clusters import Cluster
from lancet_kernels.graph.costs import Cost
from lancet_kernels.graph.program import Program
from lancet_kernels.kernels.cost_entry import LayerKind
from lancet_kernels.kernels.measured_cost import MeasuredCost, measured_cost
from lancet_kernels.rank_agreement import capture_alike, fused_groups_of_first_rank
from lancet_kernels.schedules.fused import CHOICES, choose_groups
from lancet_kernels.schedules.plan import FusedGroup, Plan
from lancet_kernels.schedules.realize import GraphCutter
from lancet_kernels.schedules.strategies import AUTO, Planner, PlanningOptions

# Those that decide for themselves what hides what; the others are there for comparison, as they are.
FUSED_STRATEGIES = (AUTO, "lancet", "lancet-dw")


@dataclass
class FusedChoice:
    """How the layers to fuse are chosen.

    stored: a plan file whose choice is taken over, if it has one. device: where the model is.
    here: are the costs to plan with those of this machine? Else nothing that was measured on it is taken.
    Raises UserError for a strategy or a device that knows no fused launches.
    """

    strategy: str
    options: PlanningOptions | None
    lowering: str
    stored: str | Path | None
    device: torch.device
    here: bool = True
    _streams_ms: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        # Only here: the kernels need Triton, which not every machine has.
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
        """Do kernels run in the interpreter? It proves, and times of it say nothing."""
        from lancet_kernels.kernels.runtime import INTERPRETED

        return INTERPRETED

    def groups(self, module: fx.GraphModule, program: Program, cost: Cost) -> tuple[FusedGroup, ...]:
        """The decision for every MoE layer: that of the stored plan, or the one predicted faster."""
        if self.stored is not None:
            found = _stored_groups(self.stored, program)
            if found:
                return found
        lowering = "fused" if self.lowering == "auto" and self.interpreted else self.lowering
        planner = Planner(program, cost, self.options, GraphCutter(module, program, cost))
        # A layer is fused as a whole: what it replaces is looked up where no copies of the step are.
        timeline = planner.timeline(planner.plan("lancet" if self.strategy == AUTO else self.strategy))
        if lowering == "auto":
            self._streams_ms = planner.plan(self.strategy).predicted.iteration_ms
        return choose_groups(
            module, program, cost, timeline, lowering=lowering, measured_of=self._measured_of
        )

    def confirmed(self, groups: tuple[FusedGroup, ...], fused: CostedGraph) -> tuple[FusedGroup, ...]:
        """The same, or all on streams if the step is predicted slower with fused layers than without any.

        Layers are chosen one by one, but an all-to-all that is gone leaves computation nothing to hide.

        Args: fused: the step with its fused layers. After `groups`.
        """
        if self._streams_ms == math.inf:
            return groups  # nobody asked which is faster
        fused_ms = fused.planner(self.options).plan(self.strategy).predicted.iteration_ms
        if fused_ms <= self._streams_ms:
            return groups
        reason = f"{self._streams_ms:.3f} ms, {fused_ms:.3f} ms with fused layers"
        why = f"streams: the whole step is predicted faster ({reason})"
        return tuple(
            replace(group, fused=False, fillers=(), why=f"{why}; alone {group.why}") if group.fused else group
            for group in groups
        )

    def _measured_of(self, kind: LayerKind) -> tuple[MeasuredCost | None, str]:
        if not self.here:
            return None, "the plan is for another machine"
        return measured_cost(kind, self.device)


def _stored_groups(file: str | Path, program: Program) -> tuple[FusedGroup, ...]:
    """The decisions of a plan file; none if it has none for this program."""
    try:
        groups = Plan.load(file).fused
    except UserError:
        return ()  # whoever reads the plan itself says what is wrong with it
    names = {name for group in groups for name in (group.layer, *group.fillers)}
    return groups if names <= set(program.index) else ()


def fuse_layers(
    step: CapturedStep, choice: FusedChoice, cluster: str | Path | Cluster | None, graph: CostedGraph
) -> CostedGraph:
    """The step with those layers fused that rank 0 chooses; as it was given, if it chooses none.

    Collective over all ranks. Args: cluster: as in `CapturedStep.costed`.
    """
    world = step.groups.world
    step.fused = fused_groups_of_first_rank(
        world, lambda: choice.groups(graph.module, graph.program, graph.cost)
    )
    if not any(group.fused for group in step.fused):
        return graph
    fused = step.costed(*capture_alike(step), cluster)
    step.fused = fused_groups_of_first_rank(world, lambda: choice.confirmed(step.fused, fused))
    if not any(group.fused for group in step.fused):
        step.forget_fused_layers()
        return graph
    return fused
