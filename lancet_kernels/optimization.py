"""`optimize`: a module that trains with a plan in which all-to-alls hide behind computation.

    capture -> Program -> costs (measured here, or of a cluster) -> Plan of rank 0 -> the same on every
    rank -> run

The mathematics is that of the module: the same routing, the same drops, the same gradients but for the
rounding of sums that parts add up.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import fx, nn

from lancet_kernels.errors import UserError
from lancet_kernels.fused_step import FusedChoice, exchange_of
from lancet_kernels.graph.capture import (
    Captured,
    capture,
    copy_of,
    input_position,
    is_tangent,
    state_name,
)
from lancet_kernels.graph.clusters import Cluster, load_cluster
from lancet_kernels.graph.costs import Cost, CostModel, source_of
from lancet_kernels.graph.host_waits import host_waits
from lancet_kernels.graph.pieces import check_compiler
from lancet_kernels.graph.profiler import Profiler
from lancet_kernels.graph.program import Program
from lancet_kernels.graph.program_json import fingerprint
from lancet_kernels.graph.run import Recorder
from lancet_kernels.guards import Guards, bind, refuse_sharded, to_trace
from lancet_kernels.layer import moe_layers, name_layers
from lancet_kernels.ops.fused_graph import register_layer
from lancet_kernels.ops.groups import Groups, group_of, group_rank, group_size
from lancet_kernels.ops.waiting import waiting
from lancet_kernels.optimized_module import OptimizedModule
from lancet_kernels.schedules.apply import reorder
from lancet_kernels.schedules.buckets import insert_all_reduces
from lancet_kernels.schedules.fused import lower
from lancet_kernels.schedules.fused_layers import MatchedLayer
from lancet_kernels.schedules.plan import FusedGroup, Plan, Prediction
from lancet_kernels.schedules.realize import node_name, realize, split_as_planned
from lancet_kernels.schedules.simulate import Timeline, simulate
from lancet_kernels.schedules.sink import sink_statistics
from lancet_kernels.schedules.strategies import STRATEGIES, Planner, PlanningOptions
from lancet_kernels.training.gradients import broadcast_replicated, gradient_groups, groups_of


def optimize(
    model: nn.Module,
    example_inputs: Sequence[object] | Mapping[str, object],
    *,
    strategy: str = "lancet",
    cluster: str | Path | Cluster | None = None,
    cache: str | Path | None = None,
    times: str | Path | None = None,
    options: PlanningOptions | None = None,
    plan: str | Path | None = None,
    reduce_gradients: bool = True,
    groups: Groups | None = None,
    backend: str | None = None,
    lowering: str = "auto",
    inner_compile: str = "",
) -> OptimizedModule:
    """Plan a training step of `model` and return a module that trains with the plan.

    Collective: every rank calls it with the same model and shapes. Rank 0 plans; ranks compare what they
    have before the first step and refuse to start on a mismatch.

    Args:
        example_inputs: real inputs of one step, a tuple by position or a dict by name; they are run a few
            times to measure the ops.
        strategy: one of `STRATEGIES` ("none" blocks, "tutel", "lancet-dw", "lancet-partition", "lancet").
        cluster: plan for a cluster (a name, a TOML file) instead of measuring this machine.
        cache: a plan file; read if it is for this model, strategy and options, and was planned with costs
            from the same source (cluster, or device, torch, ranks and link); else written. None: plan anew.
        times: file of measured op times (default: in the user's cache folder); they are not measured again.
            What a plan adds to a step is measured once per device model and kept beside it, in
            device_costs.json.
        options: a memory limit, hyper-parameters (default: LANCET_RHO, LANCET_GAMMA, LANCET_IOTA).
        plan: a file that `Plan.save` wrote, to be used instead of planning; of this model and strategy.
        reduce_gradients: sum gradients over the ranks that hold the same parameters, as part of the plan;
            before that, give all of them the parameters and buffers of the first. Divide the loss by the
            number of ranks for an average; use no DistributedDataParallel around it.
        groups: which ranks share experts, and which sum which gradients (default: what the MoE layers were
            given, else all ranks of the job see different tokens).
        backend: "torch" runs collectives beside kernels; "fused" may run MoE layers as persistent launches in
            which puts and GEMM tiles overlap. None: "fused" if the model's MoE layers are.
        lowering: with "fused", "auto" fuses the layers where that is predicted faster, "fused" all that can
            be, "streams" none. In the interpreter (CPU), where nothing is fast, "auto" means "fused".
        inner_compile: a backend of torch.compile ("inductor") for the computation between communications,
            compiled in the first step; the plan's order stays. "": run the ops as they are.
    Raises: CaptureError (no single graph, with torch's reason), UserError (strategy, ranks that disagree, a
    plan that is for something else).
    """
    if strategy not in STRATEGIES:
        raise UserError(
            "strategy", got=repr(strategy), expected=f"one of {', '.join(STRATEGIES)}", do="check the name"
        )
    if inner_compile:
        check_compiler(inner_compile)
    refuse_sharded(model)
    name_layers(model)
    by_name = example_inputs if isinstance(example_inputs, Mapping) else {}
    by_position = () if by_name else example_inputs
    signature, name = inspect.signature(model.forward), type(model).__name__
    arguments = to_trace(bind(signature, name, by_position, by_name))
    step = _Step(model, *arguments, reduce_gradients, times, groups)
    measured = cluster is None
    module, inputs = _captured_alike(step)
    if step.reduces_gradients:
        # As DistributedDataParallel does, whose work this is here: what is alike then stays alike.
        broadcast_replicated(model, step.groups)
    program, cost = step.costs(module, inputs, cluster)
    if backend == "fused" or (backend is None and any(x.backend == "fused" for x in moe_layers(model))):
        stored = next((file for file in (plan, cache) if file is not None and Path(file).exists()), None)
        choose = FusedChoice(strategy, options, lowering, stored, next(model.parameters()).device, measured)
        module, inputs, program, cost = _with_fused_layers(
            step, choose, cluster, (module, inputs, program, cost)
        )
        measured = measured and not choose.interpreted
    elif backend not in (None, "torch"):
        raise UserError("backend", got=repr(backend), expected="torch or fused", do="check the name")
    if plan is None:
        # What cannot be measured need not be compared.
        most = 4 if measured else 1
        plans = _plans_of_first(
            step.groups.world, lambda: _plans(program, cost, strategy, options, cache, most)
        )
    else:
        plans = _plans_of_first(step.groups.world, lambda: [_given_plan(plan, program, strategy)])
    if measured:
        timelines = [step.measured_timeline(module, inputs, program, found, cost) for found in plans]
        timeline, chosen = min(zip(timelines, plans, strict=True), key=lambda pair: pair[0].iteration_ms)
    else:
        chosen = plans[0]
        timeline = chosen.simulate(program, cost)
    chosen = replace(chosen, predicted=Prediction.of(timeline), fused=step.fused)
    if cache is not None and group_rank(step.groups.world) == 0:
        chosen.save(cache)
    recorder, captured = Recorder(), step.captured
    captured.joint.graph = module.graph
    realize(captured.joint, program, chosen)
    waits = host_waits(captured.joint.graph)
    run = captured.compile(
        lambda joint, outputs: split_as_planned(joint, outputs, chosen), recorder, inner_compile
    )
    guards = Guards(model, captured.assumptions(), arguments, step.reduces_gradients)
    return OptimizedModule(
        model,
        run,
        chosen,
        timeline,
        guards,
        recorder,
        step.groups if step.reduces_gradients else None,
        waits,
        step.layer_numbers,
    )


class _Step:
    """One training step of a model on this rank: how to capture it, and what its ops cost."""

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple,
        by_name: Mapping[str, object],
        reduce_gradients: bool,
        times: str | Path | None,
        groups: Groups | None = None,
    ) -> None:
        self.model, self.inputs, self.by_name = model, inputs, by_name
        self.groups = groups_of(model, groups)
        self.profiler = Profiler(self.groups, next(model.parameters()).device, times)
        self.fused: tuple[FusedGroup, ...] = ()
        self._numbers: dict[str, int] = {}
        over = gradient_groups(model, self.groups)
        named = model.named_parameters(remove_duplicate=False)
        self.gradient_groups = {name: over[parameter] for name, parameter in named}
        self.reduces_gradients = reduce_gradients and any(over.values())

    @cached_property
    def captured(self) -> Captured:
        """The captured step with its all-reduces, statistics out of the way."""
        captured = capture(self.model, self.inputs, self.by_name)
        if self.reduces_gradients:
            replica = self.groups.replica if self.groups.replica != self.groups.data else ""
            insert_all_reduces(
                captured.joint, captured.parameter_of_gradient(), self.gradient_groups, replica
            )
        reorder(captured.joint.graph, sink_statistics(Program.from_fx(captured.joint)))
        return captured

    def graph(self) -> fx.GraphModule:
        """The joint graph, its chosen layers fused."""
        joint = self.captured.joint
        if any(group.fused for group in self.fused):
            joint = copy_of(joint)
            lower(joint, self.fused, self._register)
        return joint

    def _register(self, layer: MatchedLayer) -> int:
        """The number of a fused layer's exchange, the same however often the layer is fused."""
        if layer.name not in self._numbers:
            self._numbers[layer.name] = register_layer(exchange_of(layer))
        return self._numbers[layer.name]

    @property
    def layer_numbers(self) -> list[int]:
        """Of the fused layers."""
        return list(self._numbers.values())

    def forget_fused_layers(self) -> None:
        """Of layers that are not fused after all."""
        self._numbers.clear()

    def graph_inputs(self) -> list[object]:
        """A value for each placeholder of the joint graph: parameters, buffers, the inputs, ones as
        tangents."""
        traced = self.captured.module
        state = dict(traced.named_parameters()) | dict(traced.named_buffers())
        flat = pytree.tree_leaves((self.inputs, self.by_name))
        values = []
        for node in self.captured.joint.graph.nodes:
            if node.op != "placeholder":
                continue
            if is_tangent(node):
                tangent = node.meta["val"]
                values.append(torch.ones(tangent.shape, dtype=tangent.dtype, device=tangent.device))
            elif (position := input_position(node)) is not None:
                values.append(flat[position])
            else:
                values.append(state[state_name(node)].detach())
        return values

    def costs(
        self, module: fx.GraphModule, inputs: list[object], cluster: str | Path | Cluster | None
    ) -> tuple[Program, Cost]:
        """The step's Program and what its instructions cost: measured here, or estimated for a cluster."""
        if cluster is not None:
            cluster = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
            ranks, expert_ranks = group_size(self.groups.data), group_size(self.groups.expert)
            cost = CostModel.for_cluster(cluster, ranks, expert_ranks=expert_ranks)
            return Program.from_fx(module), cost
        program = self.profiler.program(module, inputs)
        layers = moe_layers(self.model)
        return program, self.profiler.costs(module, inputs, program, layers[0].d_model if layers else 1)

    def measured_timeline(
        self, module: fx.GraphModule, inputs: list[object], program: Program, plan: Plan, cost: Cost
    ) -> Timeline:
        """The planned step, simulated with the measured times of its very instructions, parts included.

        Args: module: the captured step, which stays as it is.
        """
        planned = copy_of(module)
        realize(planned, program, plan)
        blocking = {node_name(name) for name in plan.blocking}
        return simulate(self.profiler.program(planned, inputs), cost, blocking=blocking)


def _plans(
    program: Program,
    cost: Cost,
    strategy: str,
    options: PlanningOptions | None,
    cache: str | Path | None,
    most: int,
) -> list[Plan]:
    """The plan in `cache` if it is for this program, strategy and options, and made with costs from the same
    source; else at most so many to choose from, best guess first."""
    options = options or PlanningOptions.from_environment()
    if cache is not None and not Path(cache).parent.is_dir():
        raise UserError(
            "plan file", got=f"{cache} in a folder that is missing", expected="a folder", do="make the folder"
        )
    if cache is not None and Path(cache).exists():
        try:
            plan = Plan.load(cache, program)
            plan.apply(program)
            if (plan.strategy, plan.options) == (strategy, asdict(options)):
                if plan.costs == source_of(cost):
                    return [plan]
                old, new = plan.costs or "of an older version", source_of(cost)
                print(f"lancet: planning anew: plan file: got costs {old}, expected {new}", file=sys.stderr)
        except UserError as error:
            print(f"lancet: planning anew: {error}", file=sys.stderr)
    plans = Planner(program, cost, options).candidates(strategy, most)
    return [replace(plan, costs=source_of(cost)) for plan in plans]


def _given_plan(path: str | Path, program: Program, strategy: str) -> Plan:
    """The plan in a file. Raises: UserError unless it is a plan of this strategy for this program."""
    plan = Plan.load(path, program)
    plan.apply(program)
    if plan.strategy != strategy:
        raise UserError(
            "plan file",
            got=f"{path} of strategy {plan.strategy}",
            expected=f"a plan of strategy {strategy}",
            do="name the plan's strategy, or another plan",
        )
    return plan


def _captured_alike(step: _Step) -> tuple[fx.GraphModule, list[object]]:
    """The joint graph and a value for each of its inputs. All ranks have the same before anything runs.

    Raises: CaptureError (this rank's), UserError naming the ranks that have another graph, or none.
    """
    found, refusal, module, inputs = "", None, None, []
    try:
        module, inputs = step.graph(), step.graph_inputs()
        tensors = [*step.model.named_parameters(), *step.model.named_buffers()]
        state = [(name, list(t.shape), str(t.dtype)) for name, t in tensors]
        # Each rank gets this of every rank, so a digest of it.
        found = fingerprint(Program.from_fx(module)) + hashlib.sha256(repr(state).encode()).hexdigest()
    except UserError as error:
        refusal = error
    fingerprints = _all_gather(step.groups.world, found)
    if refusal is not None:
        raise refusal
    for others, what in (
        ([peer for peer, other in enumerate(fingerprints) if not other], "no graph"),
        ([peer for peer, other in enumerate(fingerprints) if other != fingerprints[0]], "another one"),
    ):
        if others:
            raise UserError(
                "training step across ranks",
                got=f"{what} on rank(s) {', '.join(map(str, others))}",
                expected=f"the graph of rank 0 on all {len(fingerprints)} ranks",
                do="give every rank the same model and the same input shapes",
            )
    return module, inputs


_Costed = tuple[fx.GraphModule, list[object], Program, Cost]
"""A captured step: its graph, a value for each input, its Program and what its instructions cost."""


def _with_fused_layers(
    step: _Step, choose: FusedChoice, cluster: str | Path | Cluster | None, captured: _Costed
) -> _Costed:
    """The step with those layers fused that are to be; as it was given, if none is."""
    module, inputs, program, cost = captured
    step.fused = _groups_of_first(step.groups.world, lambda: choose.groups(module, program, cost))
    if not any(group.fused for group in step.fused):
        return captured
    module, inputs = _captured_alike(step)
    program, cost = step.costs(module, inputs, cluster)
    step.fused = _groups_of_first(step.groups.world, lambda: choose.confirmed(step.fused, program, cost))
    if not any(group.fused for group in step.fused):
        step.forget_fused_layers()
        return captured
    return module, inputs, program, cost


def _groups_of_first(group: str, choose: Callable[[], tuple[FusedGroup, ...]]) -> tuple[FusedGroup, ...]:
    """What rank 0 decided on every rank."""
    found = _from_first(group, lambda: [asdict(group) for group in choose()])
    return tuple(FusedGroup(**{**data, "fillers": tuple(data["fillers"])}) for data in found)


def _plans_of_first(group: str, make: Callable[[], list[Plan]]) -> list[Plan]:
    """The plans of rank 0 on every rank. Raises: UserError on all ranks if rank 0 has none."""
    plans = [Plan.from_json(data) for data in _from_first(group, lambda: [p.to_json() for p in make()])]
    if len(set(_all_gather(group, tuple(plan.fingerprint for plan in plans)))) != 1:
        raise UserError(
            "plan across ranks",
            got="different ones",
            expected="one plan",
            do="start all ranks with one version",
        )
    return plans


def _from_first(group: str, make: Callable[[], list]) -> list:
    """What rank 0 makes, on every rank. Raises: rank 0's error there, UserError with it on the others."""
    if not group:
        return make()
    process_group, box, failure = group_of(group), [None], None
    if group_rank(group) == 0:
        try:
            box = [make()]
        except Exception as error:
            failure, box = error, [f"{type(error).__name__}: {error}"]
    # Also when it failed: the others wait for it.
    with waiting("broadcast of what rank 0 planned", process_group):
        dist.broadcast_object_list(box, src=dist.get_global_rank(process_group, 0), group=process_group)
    if failure is not None:
        raise failure
    if isinstance(box[0], str):
        raise UserError("plan of rank 0", got=box[0], expected="a plan", do="see what rank 0 says")
    return box[0]


def _all_gather(group: str, value: object) -> list:
    """The value of every rank of the group; of this process alone where there is no group."""
    if not group:
        return [value]
    found: list = [None] * group_size(group)
    process_group = group_of(group)
    with waiting("comparison of the ranks' graphs and plans", process_group):
        dist.all_gather_object(found, value, group=process_group)
    return found
