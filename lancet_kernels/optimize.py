"""`optimize`: a module that trains with a plan in which all-to-alls hide behind computation.

    capture -> Program -> costs (measured here, or of a cluster) -> Plan of rank 0 -> the same on every
    rank -> run

The mathematics is that of the module: the same routing, the same drops, the same gradients but for the
rounding of sums that parts add up.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture import Captured, capture, input_name, is_fake
from lancet_kernels.graph.clusters import Cluster, load_cluster
from lancet_kernels.graph.costs import Cost, CostModel
from lancet_kernels.graph.profiler import Profiler
from lancet_kernels.graph.program import Kind, Phase, Program
from lancet_kernels.graph.program_json import fingerprint
from lancet_kernels.graph.run import Recorder
from lancet_kernels.layer import expert_parameters, moe_layers
from lancet_kernels.ops.groups import group_name, group_of, group_rank, group_size
from lancet_kernels.ops.link import link
from lancet_kernels.schedules.apply import reorder
from lancet_kernels.schedules.buckets import insert_all_reduces
from lancet_kernels.schedules.plan import Plan, Prediction
from lancet_kernels.schedules.realize import node_name, realize, split_as_planned
from lancet_kernels.schedules.simulate import COMPUTE, LINK, Event, Timeline, simulate
from lancet_kernels.schedules.sink import sink_statistics
from lancet_kernels.schedules.strategies import STRATEGIES, Planner, PlanningOptions


class OptimizedModule(nn.Module):
    """A module with its plan. Call it like the module; `module` is the original, which shares the parameters.

    With gradients enabled and inputs of the planned shapes it runs the plan; otherwise (validation, an
    odd last batch) it runs the original module. plan: what was decided. timeline: the simulated iteration.
    """

    def __init__(
        self,
        module: nn.Module,
        run: Callable[..., object],
        plan: Plan,
        timeline: Timeline,
        inputs: Sequence[object],
        recorder: Recorder,
    ) -> None:
        super().__init__()
        self.module = module
        self.plan, self.timeline = plan, timeline
        self._run, self._recorder = run, recorder
        self._expected = _shapes(inputs)

    def forward(self, *inputs: object) -> object:
        if torch.is_grad_enabled() and _shapes(inputs) == self._expected:
            return self._run(*inputs)
        return self.module(*inputs)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[Event]]:
        """Inside the block, iterations are recorded on this rank; the events are there when it ends (CPU
        ranks).

        Clocks beside every instruction cost time: look at the order and the overlap, not at the total.
        """
        events: list[Event] = []
        self._recorder.on, self._recorder.computed, link.log = True, [], []
        try:
            yield events
        finally:
            computed, moved = self._recorder.computed, link.log
            self._recorder.on, link.log = False, None
        begin = min((start for _, _, start, _ in computed), default=0.0)
        for name, phase, start, end in computed:
            events.append(
                Event(name, COMPUTE, (start - begin) * 1e3, (end - begin) * 1e3, Kind.COMPUTE, phase)
            )
        for start, end in moved:
            times = (start - begin) * 1e3, (end - begin) * 1e3
            events.append(Event("all-to-all", LINK, *times, Kind.ALL_TO_ALL, Phase.FORWARD))


def optimize(
    model: nn.Module,
    example_inputs: Sequence[object],
    *,
    strategy: str = "lancet",
    cluster: str | Path | Cluster | None = None,
    cache: str | Path | None = None,
    times: str | Path | None = None,
    options: PlanningOptions | None = None,
    reduce_gradients: bool = True,
) -> OptimizedModule:
    """Plan a training step of `model` and return a module that trains with the plan.

    Collective: every rank calls it with the same model and shapes. Rank 0 plans; ranks compare what they
    have before the first step and refuse to start on a mismatch.

    Args:
        example_inputs: real inputs of one step; they are run a few times to measure the ops.
        strategy: one of `STRATEGIES` ("none" blocks, "tutel", "lancet-dw", "lancet-partition", "lancet").
        cluster: plan for a cluster (a name, a TOML file) instead of measuring this machine.
        cache: a plan file; read if it fits this model, else written. None: plan anew.
        times: file of measured op times (default: in the user's cache folder); they are not measured again.
        options: the paper's hyper-parameters, a memory limit.
        reduce_gradients: sum the gradients of replicated parameters over the ranks, as part of the plan.
            Divide the loss by the number of ranks for an average; use no DistributedDataParallel around it.
    Raises: CaptureError (no single graph, with torch's reason), UserError (strategy, ranks that disagree).
    """
    if strategy not in STRATEGIES:
        raise UserError(
            "strategy", got=repr(strategy), expected=f"one of {', '.join(STRATEGIES)}", do="check the name"
        )
    step = _Step(model, tuple(example_inputs), reduce_gradients, times)
    with step.graph() as captured:
        module, inputs = captured.joint, step.graph_inputs(captured)
    inputs = [_ones_like(value) if is_fake(value) else value for value in inputs]
    program, cost = step.costs(module, inputs, cluster)
    plans = _agree(step.group, program, lambda: _plans(program, cost, strategy, options, cache))
    if cluster is None:
        timelines = [step.measured_timeline(inputs, program, plan, cost) for plan in plans]
    else:
        timelines = [plan.simulate(program, cost) for plan in plans]
    timeline, plan = min(zip(timelines, plans, strict=True), key=lambda pair: pair[0].iteration_ms)
    plan = replace(plan, predicted=Prediction.of(timeline))
    if cache is not None and group_rank(step.group) == 0:
        plan.save(cache)
    recorder = Recorder()
    with step.graph() as captured:
        realize(captured.joint, program, plan)
        run = captured.compile(lambda joint, outputs: split_as_planned(joint, outputs, plan), recorder)
    return OptimizedModule(model, run, plan, timeline, example_inputs, recorder)


class _Step:
    """One training step of a model on this rank: how to capture it, and what its ops cost."""

    def __init__(
        self, model: nn.Module, inputs: tuple, reduce_gradients: bool, times: str | Path | None
    ) -> None:
        self.model, self.inputs = model, inputs
        layers = moe_layers(model)
        self.group = layers[0]._group if layers else group_name(None)
        self.profiler = Profiler(self.group, next(model.parameters()).device, times)
        self.reduce_group = ""
        if reduce_gradients and self.group:
            # A communicator of its own, so that an all-reduce never stands before an all-to-all in a queue.
            self.reduce_group = group_name(dist.new_group())
        experts = {id(parameter) for parameter in expert_parameters(model)}
        self.experts = {name for name, parameter in model.named_parameters() if id(parameter) in experts}

    @contextlib.contextmanager
    def graph(self) -> Iterator[Captured]:
        """The captured step with its all-reduces, statistics out of the way."""
        with capture(self.model, self.inputs) as captured:
            if self.reduce_group:
                insert_all_reduces(
                    captured.joint, captured.parameter_of_gradient(), self.experts, self.reduce_group
                )
            reorder(captured.joint.graph, sink_statistics(Program.from_fx(captured.joint)))
            yield captured

    def graph_inputs(self, captured: Captured) -> list[object]:
        """A value for each placeholder of the joint graph: parameters, buffers, the inputs, ones as
        tangents."""
        state = dict(captured.module.named_parameters()) | dict(captured.module.named_buffers())
        flat = pytree.tree_leaves(self.inputs)
        values = []
        for node in captured.joint.graph.nodes:
            if node.op != "placeholder":
                continue
            name = input_name(node)
            if name is None:
                values.append(node.meta["val"])  # a tangent; still fake here
            elif name.startswith("input."):
                values.append(flat[int(name.removeprefix("input."))])
            else:
                values.append(state[name].detach())
        return values

    def costs(
        self, module: fx.GraphModule, inputs: list[object], cluster: str | Path | Cluster | None
    ) -> tuple[Program, Cost]:
        """The step's Program and what its instructions cost: measured here, or estimated for a cluster."""
        if cluster is not None:
            cluster = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
            return Program.from_fx(module), CostModel.for_cluster(cluster, group_size(self.group))
        program = self.profiler.program(module, inputs)
        layers = moe_layers(self.model)
        communication = self.profiler.communication(program, layers[0].d_model if layers else 1)
        return program, CostModel(load_cluster("local"), communication)

    def measured_timeline(self, inputs: list[object], program: Program, plan: Plan, cost: Cost) -> Timeline:
        """The planned step, simulated with the measured times of its very instructions, parts included."""
        with self.graph() as captured:
            realize(captured.joint, program, plan)
        blocking = {node_name(name) for name in plan.blocking}
        return simulate(self.profiler.program(captured.joint, inputs), cost, blocking=blocking)


def _plans(
    program: Program, cost: Cost, strategy: str, options: PlanningOptions | None, cache: str | Path | None
) -> list[Plan]:
    """The plan in `cache` if it is for this program and strategy; else what to choose from, best guess
    first."""
    if cache is not None and Path(cache).exists():
        try:
            plan = Plan.load(cache, program)
            if plan.strategy == strategy:
                return [plan]
        except UserError as error:
            print(f"lancet: planning anew: {error}", file=sys.stderr)
    return Planner(program, cost, options).candidates(strategy)


def _agree(group: str, program: Program, make: Callable[[], list[Plan]]) -> list[Plan]:
    """The plan of rank 0 on every rank, which all have the same program. Raises: UserError naming who
    has not."""
    if not group:
        return make()
    process_group, rank = group_of(group), group_rank(group)
    found: list = [None] * group_size(group)
    dist.all_gather_object(found, fingerprint(program), group=process_group)
    others = [peer for peer, other in enumerate(found) if other != found[0]]
    if others:
        raise UserError(
            "model across ranks",
            got=f"another training step on rank(s) {', '.join(map(str, others))} than on rank 0",
            expected="the same on every rank",
            do="give every rank the same model and the same input shapes",
        )
    made = [[plan.to_json() for plan in make()] if rank == 0 else None]
    dist.broadcast_object_list(made, src=dist.get_global_rank(process_group, 0), group=process_group)
    plans = [Plan.from_json(data) for data in made[0]]
    dist.all_gather_object(found, [plan.fingerprint for plan in plans], group=process_group)
    if any(other != found[0] for other in found):
        raise UserError(
            "plan across ranks", got=found, expected="one plan", do="start all ranks with one version"
        )
    return plans


def _ones_like(fake: Tensor) -> Tensor:
    return torch.ones(fake.shape, dtype=fake.dtype, device=fake.device)


def _shapes(inputs: Sequence[object]) -> list[object]:
    return [
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
        for leaf in pytree.tree_leaves(inputs)
    ]
