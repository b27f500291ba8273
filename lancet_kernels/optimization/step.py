"""The training step that `optimize` plans: captured on this rank, with costs, cut and ordered, and run.

    capture_step -> costed -> (fuse) -> Plan -> planned -> compiled

Each returns a new `ModelStep`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from lancet_kernels.graph.capture.capture import Captured, Give, capture
from lancet_kernels.graph.capture.captured_graph import (
    input_position,
    is_tangent,
    module_of,
    state_name,
)
from lancet_kernels.graph.capture.fsdp_parameters import ShardedParameter, Twin, twin_of
from lancet_kernels.graph.capture.run import Recorder
from lancet_kernels.graph.capture.trace import TwinAssumptions
from lancet_kernels.graph.costs.clusters import Cluster, load_cluster
from lancet_kernels.graph.costs.costs import Cost, CostModel, MeasuredCosts, durations, on_links
from lancet_kernels.graph.costs.profiler import Profiler, differ
from lancet_kernels.graph.meta import GRADIENTS_OF
from lancet_kernels.graph.ops import argument, argument_names
from lancet_kernels.graph.program import Kind, Program, fingerprint
from lancet_kernels.layer.gradients import gradient_groups
from lancet_kernels.layer.model_layers import groups_of, moe_layers
from lancet_kernels.ops.base import Context
from lancet_kernels.ops.comm.collectives import Accumulation
from lancet_kernels.ops.comm.groups import AnyGroups, Groups, group_size
from lancet_kernels.optimization.guards import Arguments, Guards, check_shards
from lancet_kernels.optimization.rank_agreement import alike
from lancet_kernels.schedules.plan import FusedGroup, Plan
from lancet_kernels.schedules.rewrite.fused import MatchedLayer
from lancet_kernels.schedules.rewrite.gathers import Shards
from lancet_kernels.schedules.rewrite.walk import (
    CAPTURED,
    PLANNED,
    RUNNING,
    UNPLANNED,
    GradientSums,
    Step,
    fuse,
    unpriced,
    walk,
)
from lancet_kernels.schedules.time.simulate import simulate

if TYPE_CHECKING:  # the kernels need Triton, which not every machine has
    from lancet_kernels.ops.moe.fused_experts import LayerExchange


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelStep(Step):
    """A training step of a model on this rank.

    model: the trained one. arguments: the example inputs. captured: of the model, or of its `twin` after
    `fully_shard`. reduction: "mean", "sum", or "" for none. gradient_groups: by the name of the parameter.
    accumulate: how many microbatches share the sums of gradients. profiler: measures the step. context: the
    exchanges of fused layers and the sums of gradients, shared with the step for other inputs.
    """

    model: nn.Module
    arguments: Arguments
    captured: Captured
    groups: Groups
    gradient_groups: Mapping[str, str]
    reduction: str
    profiler: Profiler
    accumulate: int = 1
    twin: Twin | None = None
    context: Context = field(default_factory=lambda: Context(Accumulation()))

    @property
    def reduces_gradients(self) -> bool:
        """Whether the step sums gradients beside those that FSDP reduces."""
        return bool(self.reduction) and any(self.gradient_groups.values())

    @property
    def communicates(self) -> bool:
        """Whether it communicates beside its sums of gradients."""
        if self.twin is not None or self.context.layers:
            return True
        return any(_has_group(node) and not GRADIENTS_OF.on(node) for node in self.module.graph.nodes)

    @property
    def divide_by(self) -> int:
        """The divisor of the sum of all ranks' losses."""
        return group_size(self.groups.data) if self.reduction == "mean" else 1

    @property
    def device(self) -> torch.device:
        return self.profiler.device

    @cached_property
    def inputs(self) -> list[object]:
        """A value for each placeholder of the joint graph; tangents are ones."""
        state, leaves = self.captured.state(), pytree.tree_leaves(self.arguments)
        values: list[object] = []
        for node in self.module.graph.find_nodes(op="placeholder"):
            if is_tangent(node):
                tangent = node.meta["val"]
                values.append(torch.ones(tangent.shape, dtype=tangent.dtype, device=tangent.device))
            else:
                values.append(placeholder_value(node, lambda name: state(name).detach(), leaves))
        return values

    @property
    def digest(self) -> str:
        """Hex digits that are equal on all ranks if graph, parameters and buffers are."""
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        state = [(name, list(t.shape), str(t.dtype)) for name, t in tensors]
        return fingerprint(self.program) + hashlib.sha256(repr(state).encode()).hexdigest()

    def rewritten(self) -> ModelStep:
        """The captured graph after the passes `walk.CAPTURED`: with sums of gradients, statistics moved."""
        joint, outputs = self.captured.joint, self.captured.forward_outputs
        step = replace(self, module=joint, forward_outputs=outputs, sums=self._gradient_sums())
        return walk(replace(step, setting=self._setting()), UNPLANNED, CAPTURED)

    def _setting(self) -> dict[str, Any]:
        tensors = [leaf for leaf in pytree.tree_leaves(self.arguments) if isinstance(leaf, Tensor)]
        return {
            "ranks": group_size(self.groups.world),
            "expert_ranks": group_size(self.groups.expert),
            "model": type(self.model).__name__,
            "parameters": {name: _kind(parameter) for name, parameter in self.model.named_parameters()},
            "inputs": [_kind(tensor) for tensor in tensors],
        }

    def with_fused(self, groups: tuple[FusedGroup, ...]) -> ModelStep:
        """The step with these layers as fused launches, without costs."""
        return walk(self, replace(UNPLANNED, fused=groups), (fuse,))

    def with_inputs(self, arguments: Arguments, fused: tuple[FusedGroup, ...]) -> ModelStep:
        """The same step for inputs of other shapes. Args: fused: its fused layers. Raises: CaptureError."""
        captured = _captured(self.model, self.twin, arguments)
        other = replace(self, arguments=arguments, captured=captured, timed=None, cost=unpriced)
        return replace(other, other_sizes=True).rewritten().with_fused(fused)

    def _gradient_sums(self) -> GradientSums:
        sums = GradientSums(self.captured.parameter_of_gradient(), self.divide_by)
        if self.twin is not None:
            own = {self.groups.data: "world", self.groups.replica: "replica"}
            own = {**{group: name for name, group in self.twin.groups.items()}, **own}
            sums = replace(sums, shards=Shards(self.twin, self._scale_of_shards, own))
        if self.reduces_gradients:
            replica = self.groups.replica if self.groups.replica != self.groups.data else ""
            sums = replace(sums, group_of_parameter=self.gradient_groups, replica_group=replica)
        return sums

    def _scale_of_shards(self, parameter: ShardedParameter) -> float:
        """The factor for sums of its gradients, because the graph divides gradients already."""
        own = parameter.divide_by
        if own is None:
            own = self.divide_by if self.reduction else group_size(self.groups.data)
        return self.divide_by / own

    def context_of_layer(self, layer: MatchedLayer) -> int:
        """Add the layer's exchange to the context. -> the number of the context."""
        if layer.name not in self.context.layers:
            self.context.layers[layer.name] = self._exchange_of(layer)
        return self.context.number

    def _exchange_of(self, layer: MatchedLayer) -> LayerExchange:
        """The exchange of a matched layer, with the options of its module if that is a fused one."""
        from lancet_kernels.ops.moe.fused_experts import LayerExchange

        node = layer.w1
        while node.op != "placeholder":  # a cast of the parameter
            node = node.all_input_nodes[0]
        parameters = dict(self.captured.module.named_parameters(remove_duplicate=False))
        parameter = parameters.get(state_name(node) or "")
        for module in moe_layers(self.model):
            if module.exchange is not None and parameter in {*module.expert_tensors().values()}:
                return copy.deepcopy(module.exchange)
        local_experts, hidden, width = layer.w2.meta["val"].shape
        return LayerExchange(layer.group, local_experts, width, hidden, layer.activation)

    def costed(self, cluster: str | Path | Cluster | None) -> ModelStep:
        """The step with the costs of its instructions: measured here, or estimated for a cluster."""
        if cluster is not None:
            ranks, expert_ranks = group_size(self.groups.data), group_size(self.groups.expert)
            shards = group_size(self.twin.groups["shards"]) if self.twin and self.twin.groups else None
            cost = CostModel.for_cluster(load_cluster(cluster), ranks, expert_ranks, shards)
            program = on_links(self._shared(self.program, cost), cost.communication)
            return replace(self, timed=program, cost=cost)
        layers = moe_layers(self.model)
        width = layers[0].d_model if layers else 1

        def measured(again: bool) -> tuple[Program, MeasuredCosts]:
            op_by_op = self.profiler.program(self.module, self.inputs, self.program, again=again)
            return op_by_op, self.profiler.costs(self.module, self.inputs, op_by_op, width, again)

        op_by_op, costs = measured(again=False)
        if all(instruction.milliseconds is None for instruction in self.program.instructions):
            # Only fused launches in the interpreter have times before.
            run_ms, earlier_ms = self.profiler.milliseconds_as_it_runs(self.module, self.inputs, self.program)
            if differ(run_ms, earlier_ms or blocking_ms(op_by_op, costs)):
                op_by_op, costs = measured(again=True)
            costs = self._as_it_runs(op_by_op, costs, run_ms)
        return replace(self, timed=self._timed(self.module, costs, self.program), cost=costs)

    def at_speed(self, run_ms: float) -> ModelStep:
        """The costs of a measured step for ranks on which `run_as_a_whole` of its graph takes `run_ms`."""
        assert isinstance(self.cost, MeasuredCosts)
        program = replace(self, timed=None).program
        op_by_op = self.profiler.program(self.module, self.inputs, program)
        costs = self._as_it_runs(op_by_op, replace(self.cost, slowdown=1.0), run_ms)
        return replace(self, timed=self._timed(self.module, costs, program), cost=costs)

    def _as_it_runs(self, op_by_op: Program, costs: MeasuredCosts, run_ms: float) -> MeasuredCosts:
        beside_ms = self.profiler.other_threads_ms(op_by_op)
        return replace(costs, slowdown=slowdown(op_by_op, costs, run_ms, beside_ms))

    def measured(self, plan: Plan) -> Program:
        """The Program of a costed step with the plan's ranges cut, with measured times."""
        assert isinstance(self.cost, MeasuredCosts)
        return self._timed(module_of(self.module, self.cutter.graph(plan.ranges)), self.cost)

    def _timed(self, module: fx.GraphModule, costs: MeasuredCosts, program: Program | None = None) -> Program:
        """The Program of a graph of the step for one microbatch, with measured times."""
        shares = dict.fromkeys(self.sums_of_gradients, 1 / self.accumulate)
        whole = None if module is self.module else self.module
        op_by_op = self.profiler.program(module, self.inputs, program, shares, beside=whole)
        return self._shared(costs.as_it_runs(op_by_op), costs)

    @property
    def sums_of_gradients(self) -> set[str]:
        return {node.name for node in self.module.graph.nodes if GRADIENTS_OF.on(node)}

    def _shared(self, program: Program, cost: Cost) -> Program:
        """The Program of one microbatch, with its share of the time of the sums of gradients."""
        if self.accumulate == 1:
            return program
        instructions = {i.name: i for i in program.instructions}
        for name in self.sums_of_gradients & instructions.keys():
            ms = cost(instructions[name], program.tensors) / self.accumulate
            instructions[name] = replace(instructions[name], milliseconds=ms, microbatches=self.accumulate)
        return replace(program, instructions=tuple(instructions.values()))

    def planned(self, plan: Plan) -> ModelStep:
        """The step with the plan's ranges cut, in the plan's order."""
        return walk(self, plan, PLANNED)

    def compiled(
        self, plan: Plan, recorder: Recorder, inner_compile: str, give: Give | None
    ) -> Callable[..., object]:
        """A function of the model's inputs that runs the `planned` step. Args: as of `Captured.compile`."""

        def halves(joint: fx.GraphModule, outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
            to_run = replace(self, module=joint, forward_outputs=outputs)
            forward, backward = walk(to_run, plan, RUNNING).halves
            # Keeps the context alive for a backward after the module is freed.
            forward.meta["context"] = backward.meta["context"] = self.context
            return forward, backward

        return self.captured.with_graph(self.module).compile(halves, recorder, inner_compile, give)

    @cached_property
    def guards(self) -> Guards:
        return Guards(self.model, self.captured.assumptions(), self.arguments, self.reduces_gradients)

    def context_of_sum(self, key: tuple[object, ...]) -> int:
        """Add a sum of gradients to the context. -> the number of the context."""
        self.accumulation.of(key, [self._trained[name] for name in key if name in self._trained])
        return self.context.number

    @property
    def accumulation(self) -> Accumulation:
        """The sums of gradients of several microbatches."""
        return self.context.accumulation

    @cached_property
    def _trained(self) -> dict[object, Tensor]:
        return dict(self.model.named_parameters(remove_duplicate=False))


def capture_step(
    model: nn.Module,
    arguments: Arguments,
    reduction: str = "",
    times: str | Path | None = None,
    groups: AnyGroups | None = None,
    accumulate: int = 1,
    rewrite: Callable[[fx.GraphModule], None] | None = None,
) -> ModelStep:
    """The step of a model, whose graph is that of all ranks. Collective.

    Args: reduction: "mean", "sum", or "" for none; rewrite: changes the captured graph before all passes; the
    others as of `optimize`.
    Raises: CaptureError of this rank; UserError that names the ranks with another graph, or without one.
    """
    own = groups_of(model, groups)
    over = gradient_groups(model, own)
    named, twin = model.named_parameters(remove_duplicate=False), twin_of(model, own)
    if twin is not None:
        check_shards(model, twin.parameters, own)
    profiler = Profiler(own, next(model.parameters()).device, times, twin.groups if twin else {})

    def captured() -> ModelStep:
        graph = _captured(model, twin, arguments)
        if rewrite is not None:
            rewrite(graph.joint)
        step = ModelStep(
            module=graph.joint,
            model=model,
            twin=twin,
            arguments=arguments,
            captured=graph,
            groups=own,
            gradient_groups={name: over[parameter] for name, parameter in named},
            reduction=reduction,
            profiler=profiler,
            accumulate=accumulate,
        )
        return step.rewritten()

    return agreed(captured, own.world)


def agreed(make: Callable[[], ModelStep], group: str) -> ModelStep:
    """The step, if all ranks have the same one. Collective. Raises: as `capture_step`."""
    do = "give every rank the same model and the same input shapes"
    return alike(make, lambda step: step.digest, group, "training step", do)


def placeholder_value(node: fx.Node, state: Callable[[str], Tensor], leaves: Sequence[object]) -> object:
    """The value of a placeholder: a parameter or buffer by name (`state`), or one of the inputs' leaves."""
    name, position = state_name(node), input_position(node)
    if name is not None:
        return state(name)
    assert position is not None, f"{node.name} is neither an input nor a parameter"
    return leaves[position]


def _has_group(node: fx.Node) -> bool:
    names = [name for name in ("group", "group_name") if name in argument_names(node.target)]
    # The `group` of a group norm is a number.
    return any(isinstance(argument(node, name), str) and argument(node, name) for name in names)


def _kind(tensor: Tensor) -> list[object]:
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def _captured(model: nn.Module, twin: Twin | None, arguments: Arguments) -> Captured:
    captured = capture(twin.module if twin else model, *arguments)
    if twin is None:
        return captured
    assumptions = partial(TwinAssumptions, twin, captured.assumptions)
    return replace(captured, shards=twin.shards, assumptions=assumptions)


def blocking_ms(program: Program, costs: MeasuredCosts) -> float:
    """The simulated time of the step if all communication blocks."""
    names = [i.name for i in program.instructions if i.kind.is_communication]
    return simulate(program, costs, blocking=frozenset(names)).iteration_ms


def slowdown(program: Program, costs: MeasuredCosts, run_ms: float, other_threads_ms: float = 0.0) -> float:
    """The time of computation in a whole step relative to the sum of its ops (`MeasuredCosts.slowdown`).

    Example: ops of 900 ms and blocking communication of 600 ms, but a step of 1,700: 1 + 200 / 900 = 1.22. If
    45 of the 900 ms are other threads, which move bytes while the step waits: 1 + 245 / 900 = 1.27.

    Args: program: with times op by op. run_ms: of the whole step with blocking communication.
    other_threads_ms: the part of computation that only overlapping communication takes from it.
    """
    ms = durations(program, costs)
    compute_ms = sum(t for i, t in zip(program.instructions, ms, strict=True) if i.kind is Kind.COMPUTE)
    beyond_ms = run_ms - (blocking_ms(program, costs) - other_threads_ms)
    return max(0.5, 1 + beyond_ms / compute_ms) if compute_ms > 0 else 1.0
