"""`optimize`: a module that trains with a plan, in which all-to-alls overlap computation.

    capture -> Program -> costs (measured here, or of a cluster) -> Plans, the same on all ranks -> a few real
    steps of the best ones -> run

`schedules.rewrite.walk` lists the passes over the graph in order.

The result is mathematically the same: the same routing, the same drops, and the same gradients up to the
rounding of sums over parts.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lancet_kernels.errors import UserError, check_name, check_type
from lancet_kernels.graph.capture.captured_graph import garbage_collection
from lancet_kernels.graph.capture.fsdp_parameters import set_divisor
from lancet_kernels.graph.capture.run import check_compiler
from lancet_kernels.graph.costs.clusters import Cluster
from lancet_kernels.kernels.config import check_activation
from lancet_kernels.layer.data_parallel import fsdp, refuse_averages
from lancet_kernels.layer.expert_layer import BACKENDS
from lancet_kernels.layer.gradients import broadcast_replicated
from lancet_kernels.layer.model_layers import groups_of, moe_layers, name_layers
from lancet_kernels.ops.comm.groups import AnyGroups, Groups, group_rank, group_size
from lancet_kernels.optimization.guards import Arguments, check_model, example_arguments
from lancet_kernels.optimization.optimized_module import OptimizedModule
from lancet_kernels.optimization.planning import FusedChoice, fuse_layers, on_device, plans_of
from lancet_kernels.optimization.rank_agreement import check_settings
from lancet_kernels.optimization.step import ModelStep, capture_step
from lancet_kernels.optimization.trial import fastest
from lancet_kernels.schedules import MICROBATCHES
from lancet_kernels.schedules.plan import FusedGroup, Plan
from lancet_kernels.schedules.strategies import AUTO, STRATEGY_NAMES, PlanningOptions
from lancet_kernels.schedules.time.simulate import Timeline

_log = logging.getLogger(__name__)
_STAGES = ("capturing the step", "measuring ops", "planning", "applying the plan")


@torch.inference_mode(False)
@torch.enable_grad()
@garbage_collection(on=False)
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
    backend: str | None = None,
    lowering: str = "auto",
    inner_compile: str = "",
    compare_every: int = 1000,
    trials: int = 5,
    verbose: bool = False,
) -> OptimizedModule:
    """Plan a training step of `model` and return a module that trains with the plan.

    Collective: every rank calls it with the same model and shapes. Ranks share the planning. Before the first
    step, they compare their graphs and plans, and raise an error if these differ.

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
            `no_sync`): the plan divides the time of the sums by it. `example_inputs` are one microbatch.
        backend: "torch" runs collectives beside kernels; "fused" may run MoE layers as persistent launches in
            which puts and GEMM tiles overlap. None: the backend of the model's MoE layers.
        lowering: for backend "fused": "auto" fuses all layers that can be fused if the step is then predicted
            faster, which is measured where `cluster` is not given; "fused" does in any case, "streams" fuses
            none. In the interpreter (CPU), times mean nothing, so "auto" means "fused".
        inner_compile: a backend of torch.compile ("inductor") for the computation between communications,
            compiled in the first step; the order of the plan is kept. "": run the ops uncompiled.
        compare_every: with `reduce_gradients`, digests of the parameters that several ranks hold are compared
            in one of so many calls, while the step runs; if ranks have updated one differently, the next call
            names it in an error. 0: never. As often, rows of experts are counted (`OptimizedModule.stale`).
        trials: with strategy "auto", measured here: so many real steps of the best plans, of the blocking one
            and of the module as it is, whose gradients are summed while backward runs, in turn on all ranks;
            the fastest is kept. With `accumulate`, also that many microbatches in pairs and one by one.
            Gradients, buffers and random generators stay as they are. 0: the plan that is predicted fastest.
        verbose: show progress and times on standard error of the first rank. (The logger
            `lancet_kernels.optimization.optimize` has the same at level INFO.)
    Raises: CaptureError (the model is not a single graph; with torch's reason), UserError (an unknown
    strategy, ranks that disagree, a plan for another model).
    """
    checked: dict[str, Any] = {
        "strategy": strategy,
        "reduce_gradients": reduce_gradients,
        "accumulate": accumulate,
        "backend": backend,
        "inner_compile": inner_compile,
        "compare_every": compare_every,
        "trials": trials,
    }
    _check_types(example_inputs, options, plan=plan, cache=cache, times=times)
    _check_choices(**checked)
    _prepare(model, backend, shard, groups)
    arguments = example_arguments(model, example_inputs)
    progress = Progress(_STAGES, verbose)
    progress.begin("capturing the step")
    own_groups = groups_of(model, groups)
    given = {"plan": plan is not None, "measured": cluster is None, "lowering": lowering}
    check_settings(own_groups.world, {**checked, **given})
    step = _captured(model, arguments, reduce_gradients, times, own_groups, accumulate)
    progress.begin("measuring ops")
    options = on_device(options, step.device, own_groups.world)
    return _planned(
        step.costed(cluster),
        strategy,
        options,
        progress,
        cluster=cluster,
        plan=plan,
        cache=cache,
        backend=backend,
        lowering=lowering,
        inner_compile=inner_compile,
        compare_every=compare_every,
        trials=trials,
    )


@garbage_collection(on=False)
def optimize_each(
    model: nn.Module,
    example_inputs: Sequence[object] | Mapping[str, object],
    strategies: Iterable[str],
    *,
    times: str | Path | None = None,
    options: PlanningOptions | None = None,
    accumulate: int = 1,
) -> dict[str, OptimizedModule]:
    """As `optimize` once per strategy, without those that are impossible for the step; it is captured and
    measured once. Collective. The modules share their sums of microbatches: use `no_sync` of one at a time.
    """
    names = list(strategies)
    _check_types(example_inputs, options, times=times)
    for name in names:
        _check_choices(name, accumulate)
    _prepare(model, None, None, None)
    arguments, groups = example_arguments(model, example_inputs), groups_of(model)

    def costed() -> ModelStep:
        return _captured(model, arguments, "mean", times, groups, accumulate).costed(None)

    # Plans of one step share the exchanges of its fused layers, which each strategy chooses for itself.
    fused = any(layer.backend == "fused" for layer in moe_layers(model))
    step, optimized = costed(), dict[str, OptimizedModule]()
    options = on_device(options, step.device, groups.world)
    # `auto` first, because its plan lists the impossible strategies.
    for name in sorted(names, key=lambda name: name != AUTO):
        if not any(name in module.plan.report.impossible for module in optimized.values()):
            own = costed() if fused and optimized else step
            optimized[name] = _planned(own, name, options, Progress(_STAGES, False))
    return {name: optimized[name] for name in names if name in optimized}


def _captured(
    model: nn.Module,
    arguments: Arguments,
    reduce_gradients: str | Literal[False],
    times: str | Path | None,
    groups: Groups,
    accumulate: int,
) -> ModelStep:
    """The step, the same on all ranks, with replicated parameters broadcast. Collective."""
    if reduce_gradients:
        refuse_averages(model)
        # FSDP's divisor; the plan reads it, and FSDP itself scatters where the plan does not run.
        set_divisor(model, group_size(groups.data) if reduce_gradients == "mean" else 1)
    step = capture_step(model, arguments, reduce_gradients or "", times, groups, accumulate)
    if step.reduces_gradients:  # as DistributedDataParallel does
        broadcast_replicated(model, step.groups)
    return step


def _planned(
    step: ModelStep,
    strategy: str,
    options: PlanningOptions,
    progress: Progress,
    *,
    cluster: str | Path | Cluster | None = None,
    plan: str | Path | None = None,
    cache: str | Path | None = None,
    backend: str | None = None,
    lowering: str = "auto",
    inner_compile: str = "",
    compare_every: int = 1000,
    trials: int = 5,
) -> OptimizedModule:
    """The module with its plan, after trials if there are any. Collective. Args: as of `optimize`."""
    measured, fused = cluster is None, tuple[FusedGroup, ...]()
    if backend == "fused" or (backend is None and any(x.backend == "fused" for x in moe_layers(step.model))):
        stored = next((file for file in (plan, cache) if file is not None and Path(file).exists()), None)
        choice = FusedChoice(strategy, options, lowering, stored, step.device, measured)
        step, fused = fuse_layers(step, choice, cluster)
        measured = measured and not choice.interpreted
    progress.begin("planning")
    planned, fresh = plans_of(step, fused, strategy, options, plan, cache, measured)
    tries = bool(trials) and fresh and measured and strategy == AUTO
    progress.begin("trying the plans" if tries else "applying the plan")

    def build(plan: Plan, timeline: Timeline) -> OptimizedModule:
        return OptimizedModule(step, plan, timeline, inner_compile, compare_every, planned)

    optimized = fastest(step, build, planned, trials) if tries else build(*planned[0])
    optimized.report(**step.figures(optimized.timeline))
    if cache is not None and group_rank(step.groups.world) == 0:
        optimized.plan.save(cache)
    report = optimized.plan.report
    progress.end(report.choice(optimized.plan.plain) if report.measured else "")
    return optimized


def _prepare(
    model: nn.Module, backend: str | None, shard: DeviceMesh | None, groups: AnyGroups | None
) -> None:
    """Refuse a model that cannot be planned, shard it if `shard` says so, and name its layers."""
    check_model(model)
    if backend == "fused":
        for layer in moe_layers(model):
            check_activation(layer.activation, "activation of a layer to be fused")
    if any(isinstance(module, OptimizedModule) for module in model.modules()):
        raise UserError(
            "model",
            got="a module that optimize() gave",
            expected="one without a plan",
            do="give optimize() its .module again",
        )
    if shard is not None:
        fsdp(model, shard, groups)
    name_layers(model)


def _check_types(example_inputs: object, options: object, **files: object) -> None:
    """Raise UserError for what is of no type that `optimize` takes."""
    expected = "a tuple by position, or a dict by name"
    check_type("inputs of a step", example_inputs, Iterable, expected)
    check_type("options", options, (PlanningOptions, type(None)), "PlanningOptions")
    for name, file in files.items():
        check_type(name, file, (str, os.PathLike, type(None)), "the path of a file")


def _check_choices(
    strategy: str,
    accumulate: object,
    backend: str | None = None,
    inner_compile: str = "",
    reduce_gradients: object = "mean",
    compare_every: object = 0,
    trials: object = 0,
) -> None:
    """Raise UserError for an unknown strategy, backend, compiler or reduction, or an invalid number."""
    if reduce_gradients not in ("mean", "sum", False) or reduce_gradients is True:
        raise UserError(
            "reduce_gradients",
            got=repr(reduce_gradients),
            expected='"mean", "sum" or False',
            do='use "mean", and do not divide the loss by the number of ranks',
        )
    check_name("strategy", strategy, (*STRATEGY_NAMES, MICROBATCHES))
    if strategy == MICROBATCHES and accumulate == 1:
        raise UserError(
            "strategy",
            got="microbatches for one microbatch",
            expected="accumulate=2 or more",
            do="set accumulate to the number of microbatches that share the sums of gradients",
        )
    if backend is not None:
        check_name("backend", backend, BACKENDS)
    if inner_compile:
        check_compiler(inner_compile)
    for name, number, counted, least in (
        ("compare_every", compare_every, "calls", 0),
        ("trials", trials, "steps", 0),
        ("accumulate", accumulate, "microbatches", 1),
    ):
        if type(number) is not int or number < least:
            expected = f"a number of {counted}, {least} or more"
            raise UserError(name, got=repr(number), expected=expected, do="use a whole number")


class Progress:
    """The stages of a long call, one after the other.

    Each is logged (level INFO) with its seconds when it ends. On the first rank, `shown` also writes to
    standard error: a bar on a terminal, else a line per stage.

    Args: names: in order.
    """

    def __init__(self, names: tuple[str, ...], shown: bool) -> None:
        first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        self._shown, self._current, self._start = shown and first, "", 0.0
        self._bar = None
        if self._shown and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=len(names), unit="stage", leave=False, bar_format="{l_bar}{bar}| {elapsed}"
            )

    def begin(self, name: str) -> None:
        """End the current stage, and start this one."""
        self._finish()
        self._current, self._start = name, time.perf_counter()
        if self._bar is not None:
            self._bar.set_description(f"{name} ({self._bar.n + 1} of {self._bar.total})")

    def end(self, conclusion: str = "") -> None:
        """End the last stage. Args: conclusion: a line about the result; "": none."""
        self._finish()
        if conclusion:
            self._say(conclusion)
        if self._bar is not None:
            self._bar.close()

    def _finish(self) -> None:
        if not self._current:
            return
        self._say(f"{self._current}: {time.perf_counter() - self._start:.1f} s")
        if self._bar is not None:
            self._bar.update()
        self._current = ""

    def _say(self, line: str) -> None:
        _log.info(line)
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        elif self._shown:
            print(line, file=sys.stderr, flush=True)
