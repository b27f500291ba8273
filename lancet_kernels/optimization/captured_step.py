"""Captures the training step that `optimize` plans, on this rank, and measures or estimates its costs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from lancet_kernels.graph.capture.capture import Captured, capture
from lancet_kernels.graph.capture.captured_graph import (
    copy_of,
    input_position,
    is_tangent,
    module_of,
    state_name,
)
from lancet_kernels.graph.capture.fsdp_parameters import ShardedParameter
from lancet_kernels.graph.capture.twin import Twin, twin_of
from lancet_kernels.graph.costs.clusters import Cluster, load_cluster
from lancet_kernels.graph.costs.costs import Cost, CostModel, MeasuredCosts, durations
from lancet_kernels.graph.costs.profiler import Profiler, differ
from lancet_kernels.graph.program.program import Kind, Program
from lancet_kernels.layer.gradients import gradient_groups, groups_of
from lancet_kernels.layer.model_layers import moe_layers
from lancet_kernels.ops.comm.all_reduce import Accumulation
from lancet_kernels.ops.comm.groups import AnyGroups, Groups, group_size
from lancet_kernels.ops.moe.fused_graph import register_layer
from lancet_kernels.optimization.guards import Arguments
from lancet_kernels.optimization.model_checks import check_shards
from lancet_kernels.schedules.plan import FusedGroup, Plan
from lancet_kernels.schedules.rewrite.apply import GRADIENTS_OF
from lancet_kernels.schedules.rewrite.fused_layers import MatchedLayer
from lancet_kernels.schedules.rewrite.gathers import Shards
from lancet_kernels.schedules.rewrite.walk import CAPTURED, UNPLANNED, GradientSums, Step, fuse, walk
from lancet_kernels.schedules.time.simulate import simulate

if TYPE_CHECKING:  # the kernels need Triton, which not every machine has
    from lancet_kernels.ops.moe.fused_experts import LayerExchange


@dataclass(eq=False)
class CapturedStep:
    """One training step of a model on this rank: captures it, and measures or estimates its instructions.

    arguments: the example inputs. traced: captures the step when it is first called. gradient_groups: by the
    name of the parameter. reduction: as of `of`. fused: the layers that are fused launches. twin: of a model
    after `fully_shard`. accumulate: how many microbatches share the sums of gradients. layer_numbers: of the
    exchanges of the fused layers, by name.
    """

    model: nn.Module
    arguments: Arguments
    traced: Callable[[], Captured]
    groups: Groups
    profiler: Profiler
    gradient_groups: Mapping[str, str]
    reduction: str
    fused: tuple[FusedGroup, ...] = ()
    twin: Twin | None = None
    accumulate: int = 1
    accumulation: Accumulation = field(default_factory=Accumulation)
    layer_numbers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: tuple,
        by_name: dict[str, object],
        reduction: str,
        times: str | Path | None,
        groups: AnyGroups | None = None,
        accumulate: int = 1,
    ) -> CapturedStep:
        """The step of a model. Collective.

        Args: reduction: "mean", "sum", or "" for none; the others as of `optimize`.
        """
        own = groups_of(model, groups)
        over = gradient_groups(model, own)
        named, twin = model.named_parameters(remove_duplicate=False), twin_of(model, own)
        if twin is not None:
            check_shards(model, twin.parameters, own)
        return cls(
            model,
            (inputs, by_name),
            _tracing(model, twin, (inputs, by_name)),
            own,
            Profiler(own, next(model.parameters()).device, times, twin.groups if twin else {}),
            {name: over[parameter] for name, parameter in named},
            reduction,
            twin=twin,
            accumulate=accumulate,
        )

    @property
    def reduces_gradients(self) -> bool:
        """Does the step sum gradients that FSDP does not?"""
        return bool(self.reduction) and any(self.gradient_groups.values())

    @property
    def divide_by(self) -> int:
        """What the sum of all ranks' losses is divided by."""
        return group_size(self.groups.data) if self.reduction == "mean" else 1

    @property
    def device(self) -> torch.device:
        return self.profiler.device

    @cached_property
    def captured(self) -> Captured:
        """The captured step after the passes `walk.CAPTURED`: with sums of gradients, statistics moved."""
        traced = self.traced()
        captured = traced.with_graph(copy_of(traced.joint))
        walk(Step(captured.joint, sums=self._sums(captured)), UNPLANNED, CAPTURED)
        return captured

    def _sums(self, captured: Captured) -> GradientSums:
        sums = GradientSums(captured.parameter_of_gradient(), self.divide_by)
        if self.twin is not None:
            own = {self.groups.data: "world", self.groups.replica: "replica"}
            own = {**{group: name for name, group in self.twin.groups.items()}, **own}
            sums = replace(sums, shards=Shards(self.twin, self._scale_of_shards, own))
        if self.reduces_gradients:
            replica = self.groups.replica if self.groups.replica != self.groups.data else ""
            over = {**self.gradient_groups, **dict.fromkeys(captured.plain.trained, self.groups.data)}
            sums = replace(sums, group_of_parameter=over, replica_group=replica)
        return sums

    def _scale_of_shards(self, parameter: ShardedParameter) -> float:
        """What sums of its gradients are multiplied with; those of the graph are divided already."""
        own = parameter.divide_by
        if own is None:
            own = self.divide_by if self.reduction else group_size(self.groups.data)
        return self.divide_by / own

    def with_inputs(self, arguments: Arguments) -> CapturedStep:
        """The same step, with the same fused layers and their exchanges, for inputs of other shapes."""
        return replace(self, arguments=arguments, traced=_tracing(self.model, self.twin, arguments))

    def step(self) -> Step:
        """The step before its costs are known, in which the layers to fuse are fused launches."""
        step = Step(
            self.captured.joint,
            setting=self.setting,
            forward_outputs=self.captured.forward_outputs,
            register=self._register,
        )
        return fuse(step, replace(UNPLANNED, fused=self.fused))

    def _register(self, layer: MatchedLayer) -> int:
        """The number of a fused layer's exchange; a layer is registered only once."""
        if layer.name not in self.layer_numbers:
            self.layer_numbers[layer.name] = register_layer(self._exchange_of(layer))
        return self.layer_numbers[layer.name]

    def _exchange_of(self, layer: MatchedLayer) -> LayerExchange:
        """The exchange of a matched layer, with the options of its module if that is a fused one."""
        from lancet_kernels.ops.moe.fused_experts import LayerExchange

        node = layer.w1
        while node.op != "placeholder":  # a cast of the parameter
            node = node.all_input_nodes[0]
        parameters = dict(self.captured.module.named_parameters(remove_duplicate=False))
        parameter = parameters.get(state_name(node) or "")
        for module in moe_layers(self.model):
            if module.w1 is parameter and module.exchange is not None:
                return copy.deepcopy(module.exchange)
        local_experts, hidden, width = layer.w2.meta["val"].shape
        return LayerExchange(layer.group, local_experts, width, hidden, layer.activation)

    @property
    def setting(self) -> dict[str, Any]:
        """What a plan of this step is for, in the user's words, as JSON values (`planning`)."""
        tensors = [leaf for leaf in pytree.tree_leaves(self.arguments) if isinstance(leaf, Tensor)]
        return {
            "ranks": group_size(self.groups.world),
            "expert_ranks": group_size(self.groups.expert),
            "model": type(self.model).__name__,
            "parameters": {name: _kind(parameter) for name, parameter in self.model.named_parameters()},
            "inputs": [_kind(tensor) for tensor in tensors],
        }

    def graph_inputs(self) -> list[object]:
        """A value for each placeholder of the joint graph; tangents are ones."""
        state, leaves = self.captured.state(), pytree.tree_leaves(self.arguments)
        values: list[object] = []
        for node in self.captured.joint.graph.find_nodes(op="placeholder"):
            if is_tangent(node):
                tangent = node.meta["val"]
                values.append(torch.ones(tangent.shape, dtype=tangent.dtype, device=tangent.device))
            else:
                values.append(placeholder_value(node, lambda name: state(name).detach(), leaves))
        return values

    def costed(self, step: Step, cluster: str | Path | Cluster | None) -> Step:
        """A step with the costs of its instructions: measured here, or estimated for a cluster."""
        if cluster is not None:
            ranks, expert_ranks = group_size(self.groups.data), group_size(self.groups.expert)
            shards = group_size(self.twin.groups["shards"]) if self.twin and self.twin.groups else None
            cost: Cost = CostModel.for_cluster(load_cluster(cluster), ranks, expert_ranks, shards)
            return replace(step, timed=self._shared(step.program, cost), cost=cost)
        layers = moe_layers(self.model)
        width = layers[0].d_model if layers else 1

        def measured(again: bool) -> tuple[Program, MeasuredCosts]:
            op_by_op = self.profiler.program(step.module, step.inputs, step.program, again=again)
            return op_by_op, self.profiler.costs(step.module, step.inputs, op_by_op, width, again)

        op_by_op, costs = measured(again=False)
        if all(instruction.milliseconds is None for instruction in step.program.instructions):
            # Times that an instruction already has are those of fused launches in the interpreter.
            run_ms, earlier_ms = self.profiler.milliseconds_as_it_runs(step.module, step.inputs, step.program)
            if differ(run_ms, earlier_ms or blocking_ms(op_by_op, costs)):
                op_by_op, costs = measured(again=True)
            beside_ms = self.profiler.other_threads_ms(op_by_op)
            costs = replace(costs, slowdown=slowdown(op_by_op, costs, run_ms, beside_ms))
        return replace(step, timed=self._timed(step.module, step, costs, step.program), cost=costs)

    def measured(self, step: Step, plan: Plan) -> Program:
        """The Program of a costed step with the plan's ranges cut, with measured times."""
        assert isinstance(step.cost, MeasuredCosts)
        module = module_of(step.module, step.cutter.graph(plan.ranges))
        return self._timed(module, step, step.cost)

    def _timed(
        self, module: fx.GraphModule, step: Step, costs: MeasuredCosts, program: Program | None = None
    ) -> Program:
        """The Program of a graph of a step in one of the microbatches, with measured times."""
        shares = dict.fromkeys(self._sums_of_gradients, 1 / self.accumulate)
        op_by_op = self.profiler.program(module, step.inputs, program, shares)
        return self._shared(costs.as_it_runs(op_by_op), costs)

    @property
    def _sums_of_gradients(self) -> set[str]:
        return {node.name for node in self.captured.joint.graph.nodes if GRADIENTS_OF in node.meta}

    def _shared(self, program: Program, cost: Cost) -> Program:
        """The Program of one of the microbatches, each of which has its share of the sums' time."""
        if self.accumulate == 1:
            return program
        sums = self._sums_of_gradients
        return replace(
            program,
            instructions=tuple(
                replace(
                    i, milliseconds=cost(i, program.tensors) / self.accumulate, microbatches=self.accumulate
                )
                if i.name in sums
                else i
                for i in program.instructions
            ),
        )


def placeholder_value(node: fx.Node, state: Callable[[str], Tensor], leaves: Sequence[object]) -> object:
    """What is handed to a graph for a placeholder: a parameter or buffer, or one of the leaves of the inputs.

    Args: state: gives a parameter or buffer by name.
    """
    name, position = state_name(node), input_position(node)
    if name is not None:
        return state(name)
    assert position is not None, f"{node.name} is neither an input nor a parameter"
    return leaves[position]


def _kind(tensor: Tensor) -> list[object]:
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def _tracing(model: nn.Module, twin: Twin | None, arguments: Arguments) -> Callable[[], Captured]:
    """Captures the module, or its twin, once."""

    @cache
    def traced() -> Captured:
        captured = capture(twin.module if twin else model, *arguments)
        if twin is None:
            return captured
        return replace(captured, shards=twin.shards, assumptions=twin.watched(captured.assumptions))

    return traced


def blocking_ms(program: Program, costs: MeasuredCosts) -> float:
    """A step all communication of which blocks, simulated."""
    names = [i.name for i in program.instructions if i.kind.is_communication]
    return simulate(program, costs, blocking=frozenset(names)).iteration_ms


def slowdown(program: Program, costs: MeasuredCosts, run_ms: float, other_threads_ms: float = 0.0) -> float:
    """How many times as long computation takes in a step as it runs as op by op (`MeasuredCosts.slowdown`).

    Example: ops of 900 ms and blocking communication of 600 ms, but a step of 1,700: 1 + 200 / 900 = 1.22. If
    45 of the 900 ms are other threads, which move bytes while the step waits: 1 + 245 / 900 = 1.27.

    Args: program: with times op by op. run_ms: the step as it runs, all communication of which blocks.
    other_threads_ms: of computation, what only communication that overlaps it takes from it.
    """
    ms = durations(program, costs)
    compute_ms = sum(t for i, t in zip(program.instructions, ms, strict=True) if i.kind is Kind.COMPUTE)
    # A step of next to no computation says nothing about it.
    beyond_ms = run_ms - (blocking_ms(program, costs) - other_threads_ms)
    return max(0.5, 1 + beyond_ms / compute_ms) if compute_ms > 0 else 1.0
