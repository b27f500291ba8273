"""The training step that `optimize` plans, on this rank: its joint graph, example values of its inputs, its
Program, and the costs of its instructions."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from lancet_kernels.data_parallel.gradients import gradient_groups, groups_of
from lancet_kernels.graph.capture.capture import Captured, capture
from lancet_kernels.graph.capture.captured_graph import copy_of, input_position, is_tangent, state_name
from lancet_kernels.graph.capture.layer_names import layers_of
from lancet_kernels.graph.costs.clusters import Cluster, load_cluster
from lancet_kernels.graph.costs.costs import Cost, CostModel
from lancet_kernels.graph.costs.profiler import Profiler
from lancet_kernels.graph.program.from_fx import program_from_fx
from lancet_kernels.graph.program.program import Program
from lancet_kernels.graph.sharded.fsdp import ShardedParameter
from lancet_kernels.graph.sharded.twin import Twin, twin_of
from lancet_kernels.layer.model_layers import moe_layers
from lancet_kernels.ops.comm.groups import AnyGroups, Groups, group_size
from lancet_kernels.ops.fused.fused_graph import register_layer
from lancet_kernels.ops.optimizer_step import BucketSteps
from lancet_kernels.optimization.guards import Arguments
from lancet_kernels.optimization.model_checks import check_shards
from lancet_kernels.optimization.setting import setting_of
from lancet_kernels.schedules.fuse.fused import lower
from lancet_kernels.schedules.fuse.fused_layers import MatchedLayer
from lancet_kernels.schedules.hiding import what_hides
from lancet_kernels.schedules.order.sink import sink_statistics
from lancet_kernels.schedules.order.weight_gradients import weight_gradients
from lancet_kernels.schedules.partition.ranges import range_names
from lancet_kernels.schedules.plan import FusedGroup, Plan, Prediction
from lancet_kernels.schedules.rewrite.apply import GRADIENTS_OF, reorder
from lancet_kernels.schedules.rewrite.buckets import divide_gradients, insert_all_reduces
from lancet_kernels.schedules.rewrite.gathers import insert_gathers
from lancet_kernels.schedules.rewrite.optimizer_steps import insert_optimizer_steps
from lancet_kernels.schedules.rewrite.realize import GraphCutter
from lancet_kernels.schedules.strategies import Planner, PlanningOptions, ordered
from lancet_kernels.schedules.time.exposed_bounds import exposed_bounds
from lancet_kernels.schedules.time.simulate import Timeline, simulate

if TYPE_CHECKING:  # the kernels need Triton, which not every machine has
    from lancet_kernels.ops.fused.fused_experts import LayerExchange


@dataclass(eq=False)
class CostedGraph:
    """The joint graph of a step, its Program, which may have more instructions (the optimizer's), and their
    costs. inputs: example values, if it is to be measured. setting: `setting_of` its step."""

    module: fx.GraphModule
    program: Program
    cost: Cost
    inputs: Sequence[object] = ()
    setting: Mapping[str, Any] = field(default_factory=dict)
    _planners: dict[PlanningOptions | None, Planner] = field(default_factory=dict, init=False)

    @cached_property
    def cutter(self) -> GraphCutter:
        """Gives the graph and the Program with ranges cut."""
        return GraphCutter(self.module, self.program, self.cost)

    def described(self, plan: Plan, timeline: Timeline) -> Plan:
        """The plan, with what computes while messages travel in its simulated iteration, what no order hides,
        and what it is for."""
        gradients = {self.program.instructions[i].name for i in weight_gradients(self.program)}
        hidings = what_hides(timeline, layers_of(self.module.graph), gradients)
        times = timeline.times
        ms = [end - start for start, end in zip(times.start, times.end, strict=True)]
        bounds = exposed_bounds(timeline.program, ms)
        return replace(plan, hidings=hidings, setting=self.setting, exposed_bounds=bounds)

    def planner(self, options: PlanningOptions | None = None) -> Planner:
        """The planner for this graph; one for each options."""
        if options not in self._planners:
            fill = self.cutter.with_fillers
            self._planners[options] = Planner(self.program, self.cost, options, self.cutter, fill)
        return self._planners[options]


@dataclass(eq=False)
class CapturedStep:
    """One training step of a model on this rank: captures it, and measures or estimates its instructions.

    gradient_groups: by the name of the parameter. reduction: as of `of`. fused: the layers that are fused
    launches. steps: of the optimizer, if they are part of the step. twin: of a model after `fully_shard`.
    accumulate: how many microbatches share the sums of gradients.
    """

    model: nn.Module
    inputs: tuple
    by_name: Mapping[str, object]
    groups: Groups
    profiler: Profiler
    gradient_groups: Mapping[str, str]
    reduction: str
    fused: tuple[FusedGroup, ...] = ()
    steps: BucketSteps | None = None
    twin: Twin | None = None
    accumulate: int = 1
    _layer_numbers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: tuple,
        by_name: Mapping[str, object],
        reduction: str,
        times: str | Path | None,
        groups: AnyGroups | None = None,
    ) -> CapturedStep:
        """The step of a model. Collective.

        Args: reduction: "mean", "sum", or "" for none; the others as of `optimize`.
        """
        own = groups_of(model, groups)
        over = gradient_groups(model, own)
        named, twin = model.named_parameters(remove_duplicate=False), twin_of(model, own)
        others: Mapping[str, str] = {}
        if twin is not None:
            check_shards(model, twin.parameters, own)
            others = twin.groups
        return cls(
            model,
            inputs,
            by_name,
            own,
            Profiler(own, next(model.parameters()).device, times, others),
            {name: over[parameter] for name, parameter in named},
            reduction,
            twin=twin,
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
        """The captured step, with gradient all-reduces, and with statistics moved
        (`schedules.order.sink`)."""
        twin = self.twin
        captured = capture(twin.module if twin else self.model, self.inputs, self.by_name)
        if twin is not None:
            captured = replace(captured, shards=twin.shards, assumptions=twin.watched(captured.assumptions))
            own = {self.groups.data: "world", self.groups.replica: "replica"}
            own = {**{group: name for name, group in twin.groups.items()}, **own}
            insert_gathers(captured.joint, twin, captured.parameter_of_gradient(), self._scale_of_shards, own)
        divide_gradients(captured.joint, self.divide_by)
        if self.reduces_gradients:
            replica = self.groups.replica if self.groups.replica != self.groups.data else ""
            over = {**self.gradient_groups, **dict.fromkeys(captured.plain.trained, self.groups.data)}
            insert_all_reduces(captured.joint, captured.parameter_of_gradient(), over, replica)
        if self.steps is not None:
            parameter = self.model.get_parameter
            insert_optimizer_steps(captured.joint, captured.parameter_of_gradient(), self.steps, parameter)
        reorder(captured.joint.graph, sink_statistics(program_from_fx(captured.joint)))
        return captured

    def _scale_of_shards(self, parameter: ShardedParameter) -> float:
        """What sums of its gradients are multiplied with; those of the graph are divided already."""
        own = parameter.divide_by
        if own is None:
            own = self.divide_by if self.reduction else group_size(self.groups.data)
        return self.divide_by / own

    def with_inputs(self, arguments: Arguments) -> CapturedStep:
        """The same step, with the same fused layers and their exchanges, for inputs of other shapes."""
        inputs, by_name = arguments
        return replace(self, inputs=inputs, by_name=by_name)

    def graph(self) -> fx.GraphModule:
        """The joint graph, in which the layers to fuse are fused launches."""
        joint = self.captured.joint
        if any(group.fused for group in self.fused):
            joint = copy_of(joint)
            lower(joint, self.fused, self._register)
        return joint

    def _register(self, layer: MatchedLayer) -> int:
        """The number of a fused layer's exchange; a layer is registered only once."""
        if layer.name not in self._layer_numbers:
            self._layer_numbers[layer.name] = register_layer(self._exchange_of(layer))
        return self._layer_numbers[layer.name]

    def _exchange_of(self, layer: MatchedLayer) -> LayerExchange:
        """The exchange of a matched layer, with the options of its module if that is a fused one."""
        from lancet_kernels.ops.fused.fused_experts import LayerExchange

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
        """What a plan of this step is for."""
        return setting_of(self.model, self.groups, (self.inputs, self.by_name))

    @property
    def layer_numbers(self) -> list[int]:
        """The numbers of the exchanges of the fused layers."""
        return list(self._layer_numbers.values())

    def forget_fused_layers(self) -> None:
        """Drop all registered layers, because no layer is fused after all."""
        self._layer_numbers.clear()

    def graph_inputs(self) -> list[object]:
        """A value for each placeholder of the joint graph: parameters, buffers, the example inputs, and ones
        as tangents."""
        traced = self.captured.module
        # With the second names of tied weights: torch's graph reads one of the names, not always the first.
        state: dict[str, torch.Tensor] = dict(traced.named_parameters(remove_duplicate=False))
        state |= dict(traced.named_buffers(remove_duplicate=False))
        state |= self.captured.shards()
        flat = pytree.tree_leaves((self.inputs, self.by_name))
        values: list[object] = []
        for node in self.captured.joint.graph.nodes:
            if node.op != "placeholder":
                continue
            if is_tangent(node):
                tangent = node.meta["val"]
                values.append(torch.ones(tangent.shape, dtype=tangent.dtype, device=tangent.device))
            elif (position := input_position(node)) is not None:
                values.append(flat[position])
            else:
                name = state_name(node)
                assert name is not None, f"{node.name} is neither an input nor a parameter"
                values.append(state[name].detach())
        return values

    def costed(
        self, module: fx.GraphModule, inputs: Sequence[object], cluster: str | Path | Cluster | None
    ) -> CostedGraph:
        """A graph of the step with the costs of its instructions: measured here, or estimated for a
        cluster."""
        if cluster is not None:
            ranks, expert_ranks = group_size(self.groups.data), group_size(self.groups.expert)
            shards = group_size(self.twin.groups["shards"]) if self.twin and self.twin.groups else None
            estimate = CostModel.for_cluster(load_cluster(cluster), ranks, None, expert_ranks, shards)
            program = self._shared(program_from_fx(module), estimate)
            return CostedGraph(module, program, estimate, inputs, self.setting)
        program = self.profiler.program(module, inputs)
        layers = moe_layers(self.model)
        cost = self.profiler.costs(module, inputs, program, layers[0].d_model if layers else 1)
        return CostedGraph(module, self._shared(program, cost), cost, inputs, self.setting)

    def _shared(self, program: Program, cost: Cost) -> Program:
        """The Program of one of the microbatches that share the sums of gradients: each has its share of
        their time."""
        if self.accumulate == 1:
            return program
        sums = {node.name for node in self.captured.joint.graph.nodes if GRADIENTS_OF in node.meta}
        return replace(
            program,
            instructions=tuple(
                replace(i, milliseconds=cost(i, program.tensors) / self.accumulate) if i.name in sums else i
                for i in program.instructions
            ),
        )

    def planned(
        self, graph: CostedGraph, plans: Sequence[Plan], measured: bool
    ) -> list[tuple[Plan, Timeline]]:
        """Each plan with its prediction, and the timeline of the simulated step. A plan without an order gets
        the best one.

        Args: measured: measure the instructions of the partitioned graph; otherwise estimate the parts.
        """
        programs: dict[tuple[object, ...], Program] = {}
        result = []
        for plan in plans:
            key = range_names(plan.ranges)
            if key not in programs:
                programs[key] = self._measured(graph, plan) if measured else graph.cutter(plan.ranges)
            program = programs[key]
            if plan.order:
                timeline = simulate(program.reordered(plan.order), graph.cost, blocking=plan.blocking)
                result.append((replace(plan, predicted=Prediction.of(timeline)), timeline))
            else:
                result.append(ordered(plan, program, graph.cost))
        return result

    def _measured(self, graph: CostedGraph, plan: Plan) -> Program:
        """The Program of the graph with the plan's ranges cut, with the measured times of its
        instructions."""
        module = fx.GraphModule(graph.module, graph.cutter.graph(plan.ranges))
        return self._shared(self.profiler.program(module, graph.inputs), graph.cost)
