"""Chooses between fused launches and streams for a captured step: `optimize(backend="fused")`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.graph.costs.clusters import Cluster
from lancet_kernels.graph.program.program import Program
from lancet_kernels.optimization.captured_step import CapturedStep
from lancet_kernels.optimization.rank_agreement import capture_alike, fused_groups_of_first_rank
from lancet_kernels.schedules.fuse.fused import CHOICES, every_launch
from lancet_kernels.schedules.fuse.fused_prediction import EFFICIENCY
from lancet_kernels.schedules.plan import FusedGroup, Plan
from lancet_kernels.schedules.rewrite.walk import Step
from lancet_kernels.schedules.strategies import AUTO, DUPLEX, PlanningOptions

# Strategies that may use fused launches; the others reproduce other systems for comparison.
FUSED_STRATEGIES = (AUTO, "lancet", "lancet-dw", *DUPLEX)


@dataclass(frozen=True)
class FusedChoice:
    """Fused launches, or streams.

    stored: a plan file, whose choice is used if it has one for this program. device: of the model.
    here: is the step measured on this machine? Then its launches are, too, unless they are interpreted.
    Raises: UserError for a strategy or a device without fused launches.
    """

    strategy: str
    options: PlanningOptions
    lowering: str
    stored: str | Path | None
    device: torch.device
    here: bool = True

    def __post_init__(self) -> None:
        # Imported here, because the kernels need Triton, which is not installed everywhere.
        from lancet_kernels.kernels.runtime import check_runs_on

        check_runs_on("model with backend='fused'", self.device)
        instead = "use backend='torch' for it"
        check_name("strategy with backend='fused'", self.strategy, FUSED_STRATEGIES, do=instead)
        check_name("lowering", self.lowering, CHOICES)

    @property
    def interpreted(self) -> bool:
        """Do kernels run in the interpreter? Its times say nothing about a GPU."""
        from lancet_kernels.kernels.runtime import INTERPRETED

        return INTERPRETED

    def groups(self, step: Step) -> tuple[FusedGroup, ...]:
        """The layers to try as fused launches: those of the stored plan, or all that can be."""
        stored = self._stored_groups(step.program)
        groups = stored or every_launch(step.module, step.program, step.cost)
        why = f"{'fused' if self.lowering == 'auto' else self.lowering}: requested"
        measured = self.here and not self.interpreted
        return tuple(
            group if stored or not group.fused else replace(group, fused=self.lowering != "streams", why=why)
            for group in (replace(group, measured=measured) for group in groups)
        )

    def confirmed(self, groups: tuple[FusedGroup, ...], streams: Step, fused: Step) -> tuple[FusedGroup, ...]:
        """The same groups, or all on streams if the step is predicted faster so.

        Args: streams, fused: the step without and with these layers fused.
        """
        if self.lowering != "auto" or self.interpreted or self._stored_groups(streams.program):
            return groups
        streams_ms, fused_ms = (
            step.planner(self.options).plan(self.strategy).predicted.iteration_ms for step in (streams, fused)
        )
        is_faster = fused_ms <= streams_ms
        how = "measured here" if groups[0].measured else f"by formula at efficiency {EFFICIENCY:g}"
        why = (
            f"{'fused' if is_faster else 'streams'}: the step is predicted faster ({fused_ms:.3f} ms, "
            f"{streams_ms:.3f} ms on streams; launches {how})"
        )
        return tuple(replace(g, fused=is_faster, why=why) if g.fused else g for g in groups)

    def _stored_groups(self, program: Program) -> tuple[FusedGroup, ...]:
        """The decisions of the plan file; none if it has none for this program."""
        try:
            groups = () if self.stored is None else Plan.load(self.stored).fused
        except UserError:
            return ()  # the error is reported when the plan itself is loaded
        names = {name for group in groups for name in (group.layer, *group.fillers)}
        return groups if names <= set(program.index) else ()


def fuse_layers(
    captured: CapturedStep, choice: FusedChoice, cluster: str | Path | Cluster | None, step: Step
) -> Step:
    """The step with the layers fused that rank 0 chooses; `step` itself if it chooses none.

    Collective over all ranks. Args: cluster: as in `CapturedStep.costed`.
    """
    world = captured.groups.world
    captured.fused = fused_groups_of_first_rank(world, lambda: choice.groups(step))
    if not any(group.fused for group in captured.fused):
        return step
    fused = replace(captured.costed(capture_alike(captured), cluster), bucket_ms=step.bucket_ms)
    captured.fused = fused_groups_of_first_rank(world, lambda: choice.confirmed(captured.fused, step, fused))
    if not any(group.fused for group in captured.fused):
        captured.forget_fused_layers()
        return step
    return fused
