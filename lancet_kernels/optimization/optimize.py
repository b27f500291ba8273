"""`optimize`: returns a module that trains with a plan, in which all-to-alls overlap computation.

    capture -> Program -> costs (measured here, or of a cluster) -> Plan of rank 0, sent to all ranks -> a few
    real steps of the best ones -> run

The result is mathematically the same: the same routing, the same drops, and the same gradients up to the
rounding of sums over parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from lancet_kernels.data_parallel.fsdp import fsdp
from lancet_kernels.data_parallel.gradients import broadcast_replicated
from lancet_kernels.data_parallel.outside_gradients import GradientWatch
from lancet_kernels.data_parallel.replicas import Replicas
from lancet_kernels.data_parallel.summed_gradients import PlannedSums
from lancet_kernels.errors import UserError, check_name
from lancet_kernels.graph.capture.capture import Captured
from lancet_kernels.graph.capture.host_waits import host_waits
from lancet_kernels.graph.capture.inner_compile import check_compiler
from lancet_kernels.graph.capture.run import Recorder
from lancet_kernels.graph.costs.clusters import Cluster
from lancet_kernels.graph.sharded.fsdp import set_divisor
from lancet_kernels.kernels.activation_names import check_activation
from lancet_kernels.layer.model_layers import moe_layers, name_layers
from lancet_kernels.layer.moe_layer import BACKENDS
from lancet_kernels.measuring.trial import milliseconds_of, milliseconds_per_step
from lancet_kernels.ops.comm.accumulated import Accumulation
from lancet_kernels.ops.comm.groups import AnyGroups, group_rank
from lancet_kernels.optimization.captured_step import CapturedStep
from lancet_kernels.optimization.fused_step import FusedChoice, fuse_layers
from lancet_kernels.optimization.guards import Arguments, Guards, example_arguments
from lancet_kernels.optimization.model_checks import check_model
from lancet_kernels.optimization.optimized_module import OptimizedModule
from lancet_kernels.optimization.paired import PairedMicrobatches, with_pair
from lancet_kernels.optimization.plain_step import PlainStep
from lancet_kernels.optimization.planned_shapes import PlannedShapes, PlannedStep
from lancet_kernels.optimization.planning import (
    buckets_of_file,
    on_device,
    plan_of_file,
    plans_for,
    predicted,
)
from lancet_kernels.optimization.rank_agreement import (
    capture_alike,
    plans_of_first_rank,
    result_of_first_rank,
)
from lancet_kernels.optimization.stages import Progress
from lancet_kernels.optimization.stepping import steps_of
from lancet_kernels.schedules import MICROBATCHES
from lancet_kernels.schedules.explanation import IN_PAIRS, ONE_BY_ONE, PLAIN, WORTH
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.rewrite.buckets import buckets_in_order
from lancet_kernels.schedules.rewrite.walk import PLANNED, RUNNING, Step, walk
from lancet_kernels.schedules.strategies import AUTO, STRATEGY_NAMES, PlanningOptions, fastest_that_fits
from lancet_kernels.schedules.time.simulate import Timeline

_STAGES = ("capturing the step", "measuring ops", "planning", "applying the plan")
MOST_TRIED = 2
"""Plans that are predicted fastest, of which real steps are measured, beside the blocking one."""


@torch.inference_mode(False)
@torch.enable_grad()
def optimize(
    model: nn.Module,
    example_inputs: Sequence[object] | Mapping[str, object],
    *,
    strategy: str = "auto",
    cluster: str | Path | Cluster | None = None,
    cache: str | Path | None = None,
    times: str | Path | None = None,
    options: PlanningOptions | None = None,
    plan: str | Path | None = None,
    reduce_gradients: str | Literal[False] = "mean",
    groups: AnyGroups | None = None,
    shard: DeviceMesh | None = None,
    accumulate: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    backend: str | None = None,
    lowering: str = "auto",
    inner_compile: str = "",
    compare_every: int = 1000,
    trials: int = 5,
    verbose: bool = False,
) -> OptimizedModule:
    """Plan a training step of `model` and return a module that trains with the plan.

    Collective: every rank calls it with the same model and shapes. Rank 0 plans. Before the first step, ranks
    compare their graphs and plans, and raise an error if these differ.

    Args:
        example_inputs: real inputs of one step, a tuple by position or a dict by name; the step runs on them
            a few times to measure the ops.
        strategy: "none" (all-to-alls block), "tutel", "lancet-dw", "lancet-partition", "lancet", "duplex",
            "lancet+duplex"; with `accumulate`, "microbatches" (the backward of each runs together with the
            forward of the next, in `OptimizedModule.microbatches`); or "auto", the fastest of these within
            the memory limit, and the module as it is where no plan is worth it ("microbatches" only where
            real steps are measured, see `trials`).
        cluster: plan for a cluster (a name, or a TOML file) instead of measuring this machine.
        cache: a plan file. It is used if it is for this model, strategy and options, and was planned with
            costs from the same source (cluster; or device, torch, ranks and link); otherwise it is
            overwritten with the new plan. None: always plan.
        times: file of measured op times, which are not measured again (default: in the user's cache folder).
            The costs of partitioning, measured once per device model, are in device_costs.json beside it.
        options: memory limit and hyper-parameters (default: LANCET_RHO, LANCET_GAMMA, LANCET_IOTA).
        plan: a file from `Plan.save` to use instead of planning; it must be for this model, and for this
            strategy unless that is "auto".
        reduce_gradients: "mean": gradients are those of the mean loss of all ranks, as with
            DistributedDataParallel and FSDP; "sum": of the sum of their losses. Ranks that hold the same
            parameters sum their gradients as part of the plan, and start with the parameters and buffers of
            the first of them; do not wrap the model in DistributedDataParallel. False: they are not summed,
            but for those of what FSDP shards.
        groups: the ranks that share experts, and the ranks over which gradients are summed (default: the
            groups of the MoE layers, or one group of all ranks).
        shard: a mesh over which `fsdp` shards the model, in place, before it is planned. A model that
            `fully_shard` has sharded already is planned as it is.
        accumulate: how many microbatches share the sums of gradients (`OptimizedModule.microbatches`,
            `no_sync`); a plan in which their time counts that much less. One of `example_inputs` is one
            microbatch.
        optimizer: its step becomes part of the plan: each bucket of parameters is stepped in the backward
            that sums the gradients, as soon as their sums have arrived and nothing reads the old values.
            Leave `optimizer.step()` out; state, learning rates and checkpoints of the optimizer stay its own.
            It must step each parameter by itself (SGD, Adam, AdamW). Not together with a GradScaler or
            clipping, which need all gradients before the first step. Trials leave the steps out.
        backend: "torch" runs collectives beside kernels; "fused" may run MoE layers as persistent launches in
            which puts and GEMM tiles overlap; each copy of the step (duplex) has its own, which may compute
            weight gradients of another copy. None: the backend of the model's MoE layers.
        lowering: for backend "fused": "auto" fuses all layers that can be fused if the step is then predicted
            faster, which is measured where `cluster` is not given; "fused" does in any case, "streams" fuses
            none. In the interpreter (CPU), times mean nothing, so "auto" means "fused".
        inner_compile: a backend of torch.compile ("inductor") for the computation between communications,
            compiled in the first step; the order of the plan is kept. "": run the ops uncompiled.
        compare_every: with `reduce_gradients`, parameters that several ranks hold are compared, bit by bit
            through a digest, in one of so many calls, while the step runs; if ranks have updated one
            differently, the next call names it in an error. 0: never.
        trials: with strategy "auto", measured here: real steps of the best plans, of the blocking one and of
            the module as it is, whose gradients are summed while backward runs, in turn on all ranks; the
            fastest is kept. With `accumulate`, also so many microbatches in pairs beside one by one.
            Gradients, buffers and random generators stay as they are. 0: the plan that is predicted fastest.
        verbose: show progress and times on standard error of the first rank. (The logger
            `lancet_kernels.optimization.stages` has the same at level INFO.)
    Raises: CaptureError (the model is not a single graph; with torch's reason), UserError (an unknown
    strategy, ranks that disagree, a plan for another model).
    """
    _check_choices(
        strategy,
        backend,
        inner_compile,
        {
            "compare_every": (compare_every, "calls", 0),
            "trials": (trials, "steps", 0),
            "accumulate": (accumulate, "microbatches", 1),
        },
        reduce_gradients,
    )
    if backend == "fused":
        for layer in moe_layers(model):
            check_activation(layer.activation, "activation of a layer to be fused")
    if shard is not None:
        fsdp(model, shard, groups)
    check_model(model)
    name_layers(model)
    arguments = example_arguments(model, example_inputs)
    progress = Progress(_STAGES, verbose)
    progress.begin("capturing the step")
    step = CapturedStep.of(model, *arguments, reduce_gradients or "", times, groups)
    step.accumulate = accumulate
    accumulation = Accumulation()
    if optimizer is not None:
        step.steps = steps_of(optimizer, step, accumulation)
    world, measured = step.groups.world, cluster is None
    captured = capture_alike(step)
    _warn_of_unregistered(model, step)
    if step.twin is not None and reduce_gradients:
        # For calls without the plan, in which FSDP itself scatters.
        set_divisor(model, step.divide_by)
    if step.reduces_gradients:
        # As DistributedDataParallel does, which this replaces: equal parameters then stay equal.
        broadcast_replicated(model, step.groups)
    options = on_device(options, step.device)
    progress.begin("measuring ops")
    graph = step.costed(captured, cluster)
    sizes = result_of_first_rank(
        world, lambda: step.bucket_sizes(graph) if plan is None else buckets_of_file(plan)
    )
    graph = step.with_buckets(graph, sizes, cluster)
    if backend == "fused" or (backend is None and any(x.backend == "fused" for x in moe_layers(model))):
        stored = next((file for file in (plan, cache) if file is not None and Path(file).exists()), None)
        choice = FusedChoice(strategy, options, lowering, stored, step.device, measured)
        graph = fuse_layers(step, choice, cluster, graph)
        measured = measured and not choice.interpreted
    progress.begin("planning")
    if plan is not None:
        plans = plans_of_first_rank(world, lambda: [plan_of_file(plan, graph, strategy)])
    else:
        # Several plans are only compared if they can be measured.
        most = 4 if measured else 1
        # A pair is a schedule of whole instructions.
        base = "lancet-dw" if strategy == MICROBATCHES else strategy
        plans = plans_of_first_rank(world, lambda: plans_for(graph, base, options, cache, most))
    # One that was stored has its order.
    fresh = not plans[0].order
    planned = predicted(step, graph, plans, measured)
    if step.steps is not None:
        step.steps.end_rehearsal()
    best, timeline = planned[fastest_that_fits([plan for plan, _ in planned])]
    if best.chosen:
        # The predictions of the compared plans, updated with measurements of their partitioned graphs.
        tried = {plan.chosen: plan.predicted for plan, _ in planned}
        best = replace(best, compared={**best.compared, **tried})
    best = replace(best, fused=step.fused)
    if strategy == MICROBATCHES and not best.pair:
        best = with_pair(step, graph, arguments, best, must=True)
    build = _Builder(step, graph, arguments, inner_compile, compare_every, accumulation)
    if trials and fresh and measured and strategy == AUTO:
        progress.begin("trying the plans")
        optimized = _fastest(build, best, timeline, planned, trials)
        if accumulate > 1:
            optimized = _in_pairs_if_faster(build, optimized, trials)
    else:
        progress.begin("applying the plan")
        optimized = build(best, timeline)
    optimized.plan = graph.described(optimized.plan, optimized.timeline)
    if cache is not None and group_rank(world) == 0:
        optimized.plan.save(cache)
    progress.end(optimized.plan.choice_text() if optimized.plan.measured else "")
    return optimized


def _fastest(
    build: _Builder,
    best: Plan,
    timeline: Timeline,
    planned: Sequence[tuple[Plan, Timeline]],
    trials: int,
) -> OptimizedModule:
    """The module with the plan that is fastest in `trials` real steps; as it is if no plan is worth it.
    Collective.

    Args: best: the plan that is predicted fastest; its timeline. planned: all that were considered.
    """
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
    ways = {name: module.bare_step(build.arguments) for name, module in modules.items()}
    plain = build.plain(best, timeline)
    if plain is not None:
        ways[PLAIN] = plain.bare_step(build.arguments)
    measured = milliseconds_per_step(build.step, ways, trials)
    winner = min(modules, key=measured.__getitem__)
    chosen, kept = modules[winner], replace(modules[winner].plan, measured=measured)
    if plain is not None and measured[winner] > (1 - WORTH) * measured[PLAIN]:
        chosen, kept = plain, replace(kept, plain=True)
    chosen.plan, chosen.timeline = kept, modules[winner].timeline
    return chosen


def _in_pairs_if_faster(build: _Builder, optimized: OptimizedModule, trials: int) -> OptimizedModule:
    """The module whose microbatches run in pairs, if real ones are then faster; else `optimized`.
    Collective."""
    one_by_one = replace(optimized.plan, plain=False)
    plan = with_pair(build.step, build.graph, build.arguments, one_by_one, must=False)
    if not plan.pair or plan.pair_ms >= plan.predicted.iteration_ms:
        return optimized
    paired = build(plan, optimized.timeline)
    modules = {ONE_BY_ONE: optimized, IN_PAIRS: paired}
    several = [build.arguments] * build.step.accumulate
    runs = {name: partial(module.run_microbatches, several) for name, module in modules.items()}
    total = milliseconds_of(build.step, runs, trials)
    measured = {name: ms / len(several) for name, ms in total.items()}
    faster = measured[IN_PAIRS] < (1 - WORTH) * measured[ONE_BY_ONE]
    paired.plan = plan
    chosen = paired if faster else optimized
    chosen.plan = replace(chosen.plan, measured_microbatches=measured)
    return chosen


def _check_choices(
    strategy: str,
    backend: str | None,
    inner_compile: str,
    numbers: Mapping[str, tuple[object, str, int]],
    reduce_gradients: object,
) -> None:
    """Raise UserError for an unknown strategy, backend, compiler or reduction, or a number that is none.

    Args: numbers: by name, with what they count, and the least.
    """
    if reduce_gradients not in ("mean", "sum", False) or reduce_gradients is True:
        raise UserError(
            "reduce_gradients",
            got=repr(reduce_gradients),
            expected='"mean", "sum" or False',
            do='use "mean", and do not divide the loss by the number of ranks',
        )
    check_name("strategy", strategy, (*STRATEGY_NAMES, MICROBATCHES))
    if strategy == MICROBATCHES and numbers["accumulate"][0] == 1:
        raise UserError(
            "strategy",
            got="microbatches for one microbatch",
            expected="accumulate=2 or more",
            do="say how many microbatches share the sums of gradients",
        )
    if backend is not None:
        check_name("backend", backend, BACKENDS)
    if inner_compile:
        check_compiler(inner_compile)
    for name, (number, counted, least) in numbers.items():
        if type(number) is not int or number < least:
            expected = f"a number of {counted}, {least} or more"
            raise UserError(name, got=repr(number), expected=expected, do="use a whole number")


def _warn_of_unregistered(model: nn.Module, step: CapturedStep) -> None:
    """Warn of tensors that are trained and that nothing else finds among the parameters."""
    paths = [step.captured.plain.paths[name] for name in step.captured.plain.trained]
    if paths:
        warnings.warn(
            f"{', '.join(paths)} of {type(model).__name__}: trained, but no registered parameter; backward "
            "gives its gradient, summed over the ranks, but parameters(), state_dict() and the clipping of "
            "gradients do not know it, and ranks may start with other values; register it (nn.Parameter as "
            "an attribute, nn.ParameterList)",
            stacklevel=5,  # of who called optimize()
        )


@dataclass
class _Builder:
    """Builds modules that train with a plan of the captured step, several of one step."""

    step: CapturedStep
    graph: Step
    arguments: Arguments
    inner_compile: str
    compare_every: int
    accumulation: Accumulation

    def __call__(self, plan: Plan, timeline: Timeline) -> OptimizedModule:
        """The module that trains with the plan; if it is a plan for nothing, the module as it is."""
        if plan.plain and (plain := self.plain(plan, timeline)) is not None:
            return plain
        step, accumulation = self.step, self.accumulation
        recorder = Recorder()
        captured = step.captured
        planned = walk(self.graph, plan, PLANNED)
        host_wait_names = host_waits(planned.module.graph)
        sums: PlannedSums | None = None
        watch: GradientWatch | None = None
        if step.reduction:
            buckets = buckets_in_order(planned.module)
            if captured.plain.trained:
                # Where tensors are trained that are no parameters, nothing runs without the plan.
                summed = {name for _, names in buckets for name in names}
                watch = GradientWatch(
                    {n: p for n, p in step.model.named_parameters() if n in summed},
                    lambda: [captured.plain.values()[name] for name in captured.plain.trained],
                )
            else:
                sums = PlannedSums(step.model, step.groups, buckets, step.divide_by, accumulation)
                watch = sums.watch

        trained = {**step.captured.plain.values(), **dict(step.model.named_parameters())}

        def number_of(key: tuple[object, ...]) -> int:
            return accumulation.number_of(key, [trained[name] for name in key if name in trained])

        def give(gradients: Iterable[tuple[str, Tensor | None]]) -> None:
            if watch is not None:
                watch.give(gradients)
            accumulation.finished()

        def compiled(captured: Captured, planned: Step, plan: Plan) -> Callable[..., object]:
            def halves(joint: fx.GraphModule, outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
                to_run = replace(planned, module=joint, forward_outputs=outputs, number_of=number_of)
                forward, backward = walk(to_run, plan, RUNNING).halves
                return forward, backward

            whole = captured.with_graph(planned.module)
            return whole.compile(halves, recorder, self.inner_compile, give)

        def paired() -> PairedMicrobatches:
            whole = replace(self.graph, number_of=number_of)
            return PairedMicrobatches(step.model, captured, whole, plan, accumulation)

        run = compiled(captured, planned, plan)
        first = PlannedStep(run, self._guards())
        shapes = PlannedShapes(step, self.graph.program, plan, first, compiled)
        pairs = paired if plan.pair else None
        return self._module(plan, timeline, shapes, recorder, sums, host_wait_names, pairs)

    def plain(self, plan: Plan, timeline: Timeline) -> OptimizedModule | None:
        """The module as it is; None where it trains what only a plan can sum."""
        captured, sums, accumulation = self.step.captured, None, self.accumulation
        if self.step.reduction:
            if captured.plain.trained:
                return None
            buckets = buckets_in_order(captured.joint)
            sums = PlannedSums(
                self.step.model, self.step.groups, buckets, self.step.divide_by, accumulation, early=True
            )
        runs = PlainStep(self.step.model, self._guards(), sums)
        return self._module(plan, timeline, runs, Recorder(), sums, ())

    def _guards(self) -> Guards:
        assumptions = self.step.captured.assumptions()
        return Guards(self.step.model, assumptions, self.arguments, self.step.reduces_gradients)

    def _module(
        self,
        plan: Plan,
        timeline: Timeline,
        runs: PlannedShapes | PlainStep,
        recorder: Recorder,
        sums: PlannedSums | None,
        host_wait_names: Sequence[str],
        paired: Callable[[], PairedMicrobatches] | None = None,
    ) -> OptimizedModule:
        step, replicas = self.step, None
        if step.reduces_gradients:
            replicas = Replicas(step.model, step.groups, self.compare_every)
        return OptimizedModule(
            step.model,
            plan,
            timeline,
            runs,
            recorder,
            sums,
            replicas,
            host_wait_names,
            step.layer_numbers,
            step.twin,
            self.accumulation,
            step.reduction != "sum",
            paired,
            step.steps,
        )
