"""Builds the module that trains with a plan, and finds the plan whose real steps are fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

from torch import Tensor, fx

from lancet_kernels.graph.capture.capture import Captured
from lancet_kernels.graph.capture.host_waits import host_waits
from lancet_kernels.graph.capture.run import Recorder
from lancet_kernels.layer.outside_gradients import GradientWatch
from lancet_kernels.layer.summed_gradients import PlannedSums
from lancet_kernels.optimization.captured_step import CapturedStep
from lancet_kernels.optimization.guards import Guards
from lancet_kernels.optimization.optimized_module import OptimizedModule
from lancet_kernels.optimization.paired import PairedMicrobatches, with_pair
from lancet_kernels.optimization.planned_shapes import PlannedShapes, PlannedStep
from lancet_kernels.optimization.trial import milliseconds_of, milliseconds_per_step
from lancet_kernels.schedules.explanation import IN_PAIRS, ONE_BY_ONE, PLAIN, WORTH
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.rewrite.buckets import buckets_in_order
from lancet_kernels.schedules.rewrite.walk import PLANNED, RUNNING, Step, walk
from lancet_kernels.schedules.time.simulate import Timeline

MOST_TRIED = 2
"""Plans that are predicted fastest, of which real steps are measured, beside the blocking one."""


@dataclass
class Builder:
    """Builds modules that train with a plan of a costed step, several of one step."""

    captured: CapturedStep
    step: Step
    inner_compile: str
    compare_every: int

    def __call__(self, plan: Plan, timeline: Timeline) -> OptimizedModule:
        """The module that trains with the plan; if it is a plan for nothing, the module as it is."""
        if plan.plain and (plain := self.plain(plan, timeline)) is not None:
            return plain
        captured, recorder = self.captured, Recorder()
        planned = walk(self.step, plan, PLANNED)
        sums, watch = self._sums(planned.module)
        give = None if watch is None else watch.give

        def compiled(own: Captured, planned: Step, plan: Plan) -> Callable[..., object]:
            def halves(joint: fx.GraphModule, outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
                to_run = replace(planned, module=joint, forward_outputs=outputs, number_of=self._number_of)
                forward, backward = walk(to_run, plan, RUNNING).halves
                return forward, backward

            return own.with_graph(planned.module).compile(halves, recorder, self.inner_compile, give)

        @cache
        def paired() -> PairedMicrobatches:
            return PairedMicrobatches(captured, replace(self.step, number_of=self._number_of), plan)

        first = PlannedStep(compiled(captured.captured, planned, plan), self._guards())
        return OptimizedModule(
            captured,
            plan,
            timeline,
            first.guards,
            sums,
            self.compare_every,
            PlannedShapes(captured, self.step.program, plan, first, compiled),
            recorder,
            host_waits(planned.module.graph),
            paired if plan.pair else None,
        )

    def plain(self, plan: Plan, timeline: Timeline) -> OptimizedModule | None:
        """The module as it is; None where it trains what only a plan can sum."""
        captured, sums = self.captured, None
        if captured.reduction:
            if captured.captured.plain.trained:
                return None
            sums = self._planned_sums(captured.captured.joint, early=True)
        return OptimizedModule(captured, plan, timeline, self._guards(), sums, self.compare_every)

    def _sums(self, module: fx.GraphModule) -> tuple[PlannedSums | None, GradientWatch | None]:
        """The sums of calls without the plan, and what watches the gradients that the plan sums."""
        captured, plain = self.captured, self.captured.captured.plain
        if not captured.reduction:
            return None, None
        if not plain.trained:
            sums = self._planned_sums(module)
            return sums, sums.watch
        # Where tensors are trained that are no parameters, nothing runs without the plan.
        summed = {name for _, names in buckets_in_order(module) for name in names}
        return None, GradientWatch(
            {n: p for n, p in captured.model.named_parameters(remove_duplicate=False) if n in summed},
            lambda: [plain.values()[name] for name in plain.trained],
        )

    def _planned_sums(self, module: fx.GraphModule, early: bool = False) -> PlannedSums:
        own, buckets = self.captured, buckets_in_order(module)
        return PlannedSums(own.model, own.groups, buckets, own.divide_by, own.accumulation, early=early)

    @cached_property
    def _trained(self) -> dict[object, Tensor]:
        """Parameters and plain tensors by name."""
        named = self.captured.model.named_parameters(remove_duplicate=False)
        return dict([*self.captured.captured.plain.values().items(), *named])

    def _number_of(self, key: tuple[object, ...]) -> int:
        own = [self._trained[name] for name in key if name in self._trained]
        return self.captured.accumulation.number_of(key, own)

    def _guards(self) -> Guards:
        own = self.captured
        return Guards(own.model, own.captured.assumptions(), own.arguments, own.reduces_gradients)


def fastest(build: Builder, planned: Sequence[tuple[Plan, Timeline]], trials: int) -> OptimizedModule:
    """The module with the plan that is fastest in `trials` real steps; as it is if no plan is worth it. Its
    microbatches run in pairs if that is faster. Collective.

    Args: planned: with their timelines; first the plan that is predicted fastest.
    """
    (best, timeline), captured = planned[0], build.captured
    fits = [
        (replace(plan, fused=best.fused, compared=best.compared, pair=best.pair, pair_ms=best.pair_ms), line)
        for plan, line in planned
        if best.memory_limit_gb is None or plan.predicted.peak_memory_gb <= best.memory_limit_gb
    ]
    others = sorted(
        (p for p in fits if p[0].chosen != best.chosen), key=lambda p: p[0].predicted.iteration_ms
    )
    blocking = [pair for pair in others[MOST_TRIED - 1 :] if pair[0].chosen == "none"]
    modules = {
        p.chosen: build(p, line) for p, line in [(best, timeline), *others[: MOST_TRIED - 1], *blocking]
    }
    ways = {name: module.bare_step(captured.arguments) for name, module in modules.items()}
    plain = build.plain(best, timeline)
    if plain is not None:
        ways[PLAIN] = plain.bare_step(captured.arguments)
    measured = milliseconds_per_step(captured, ways, trials)
    winner = min(modules, key=measured.__getitem__)
    chosen, kept = modules[winner], replace(modules[winner].plan, measured=measured)
    if plain is not None and measured[winner] > (1 - WORTH) * measured[PLAIN]:
        chosen, kept = plain, replace(kept, plain=True)
    chosen.plan, chosen.timeline = kept, modules[winner].timeline
    return _in_pairs_if_faster(build, chosen, trials) if captured.accumulate > 1 else chosen


def _in_pairs_if_faster(build: Builder, optimized: OptimizedModule, trials: int) -> OptimizedModule:
    """A module whose microbatches run in pairs, if real ones are then faster. Collective."""
    captured = build.captured
    plan = with_pair(captured, build.step, replace(optimized.plan, plain=False), must=False)
    if not plan.pair or plan.pair_ms >= plan.predicted.iteration_ms:
        return optimized
    paired = build(plan, optimized.timeline)
    modules = {ONE_BY_ONE: optimized, IN_PAIRS: paired}
    several = [captured.arguments] * captured.accumulate
    runs = {name: partial(module.run_microbatches, several) for name, module in modules.items()}
    total = milliseconds_of(captured, runs, trials)
    measured = {name: ms / len(several) for name, ms in total.items()}
    faster = measured[IN_PAIRS] < (1 - WORTH) * measured[ONE_BY_ONE]
    paired.plan = plan
    chosen = paired if faster else optimized
    chosen.plan = replace(chosen.plan, measured_microbatches=measured)
    return chosen
