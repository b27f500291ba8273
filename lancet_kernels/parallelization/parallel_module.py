"""The module that `parallelize` returns: a rank's part of the parameters, called with the whole batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any
from weakref import ref

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.capture import hooks_of
from lancet_kernels.graph.rules.rules import Form
from lancet_kernels.layer.expert_states import ShardedModule, save_states_as_shards
from lancet_kernels.layer.gradients import broadcast_first, set_gradient_group
from lancet_kernels.ops.comm.collectives import shard_of
from lancet_kernels.ops.comm.groups import group_name
from lancet_kernels.optimization.guards import Guards, bind
from lancet_kernels.optimization.optimized_module import OptimizedModule
from lancet_kernels.parallelization.one_device_model import OneDeviceModel, runs_graph
from lancet_kernels.schedules.shard.sharding_strategy import ShardingStrategy


def sharded_module(
    model: nn.Module,
    graph: fx.Graph,
    forms: Mapping[str, Form],
    group: str,
    tensors: Mapping[str, Tensor],
) -> nn.Module:
    """A module that runs the graph, with the parameters and buffers of the model under their names: those of
    the first rank, of sharded ones this rank's slice.

    Args: forms: of parameters on a rank, by name. tensors: others that the graph reads, by attribute.
    """
    root, saved = nn.Module(), model.state_dict()
    for name, buffer in [*model.named_buffers(), *tensors.items()]:
        _owner(root, name).register_buffer(name.rpartition(".")[2], buffer, persistent=name in saved)
    for name, parameter in model.named_parameters():
        form = forms[name]
        if form.dimension is not None:
            whole = parameter.detach().clone()
            broadcast_first(whole, group, "broadcast of the parameters to be sharded")
            own = shard_of(whole, form.dimension, group).clone(memory_format=torch.contiguous_format)
            parameter = nn.Parameter(own, requires_grad=parameter.requires_grad)
        _owner(root, name).register_parameter(name.rpartition(".")[2], parameter)
    module = runs_graph(root, graph)
    for name, form in forms.items():
        if form.is_cut:
            # Every rank has another slice, whose gradient is not summed.
            set_gradient_group(_owner(module, name), None, [name.rpartition(".")[2]])
    module.train(model.training)
    return module


def _owner(root: nn.Module, name: str) -> nn.Module:
    """The submodule that a tensor of this name belongs to, created if there is none."""
    owner = root
    for part in name.split(".")[:-1]:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    return owner


class ParallelModule(ShardedModule):
    """This rank's part of a training step. Call it with the whole batch, like the model on one device. Every
    rank gets the whole result, and by `backward` the gradients of its parameters: for whole ones the sum over
    the ranks, for sharded ones its slice of that.

    A state dict is that of the whole model, by its names; sharded parameters are DTensors there, and load
    from a DTensor on other ranks or from the whole tensor.

    strategy: the sharding of the model. plan: the order of the step. optimized: the module that runs it.
    """

    def __init__(
        self, optimized: OptimizedModule, strategy: ShardingStrategy, source: OneDeviceModel, mesh: DeviceMesh
    ) -> None:
        super().__init__()
        runs = optimized.module
        self._modules, self._parameters, self._buffers = runs._modules, runs._parameters, runs._buffers
        self._non_persistent_buffers_set = runs._non_persistent_buffers_set
        # In a tuple, so that it is no submodule with the same parameters.
        self._held = (optimized,)
        self.strategy, self.plan, self.mesh = strategy, optimized.plan, mesh
        self.forms = source.forms(strategy)
        model, self._name = source.model, source.name
        self._reads, self._structure = source.input_positions, source.captured.result_structure
        self._signature = inspect.signature(model.forward)
        self._guards = Guards(
            model,
            source.captured.assumptions(),
            source.arguments,
            sums_gradients=True,
            by="parallelize",
            kinds=("_modules", "_parameters", "_buffers"),
        )
        plain = source.captured.plain
        # Not without paths, because it refers to the model with all of its parameters.
        self._plain = plain if plain.paths else None
        first = source.first_names
        self._names = {name: first[name] for name in model.state_dict() if name in first}
        self._in_strategy = source.state_names
        named = dict(model.named_modules())
        for name, module in self.named_modules():
            module.training = named[name].training if name in named else model.training
        self._modes = {name: module.training for name, module in self.named_modules()}
        self._sharded = [
            (name, ref(parameter), parameter._version)
            for name, parameter in model.named_parameters()
            if self.forms[name].dimension is not None
        ]

    @property
    def optimized(self) -> OptimizedModule:
        return self._held[0]

    def forward(self, *inputs: object, **by_name: object) -> object:
        """The model's result for the whole batch.

        Raises: UserError for shapes other than the example's, in another mode, and after other changes of the
        model or this module that the graph does not follow.
        """
        arguments = bind(self._signature, f"the parallelized {self._name}", inputs, by_name)
        reason = self._guards.reason(arguments) or self._changed()
        if reason:
            raise UserError(
                f"call of the parallelized {self._name}",
                got=reason,
                expected="what parallelize() was given: its graph is for these inputs and settings alone",
                do="keep to them (drop the last batch), or parallelize() once more for the others",
            )
        for name, tensor in self._plain.values().items() if self._plain is not None else ():
            setattr(_owner(self, name), name.rpartition(".")[2], tensor)
        leaves = pytree.tree_leaves(self._guards.inputs.laid_out(arguments))
        results = self.optimized(*(leaves[position] for position in self._reads))
        return pytree.tree_unflatten(list(results), self._structure)

    def _changed(self) -> str:
        """A change that the graph does not follow; "" if there is none."""
        for name, module in self.named_modules():
            if module.training is not self._modes.get(name, module.training):
                modes = ("evaluation", "training")
                where = f" of {name}" if name else ""
                return f"{modes[module.training]} mode{where}, was {modes[not module.training]} mode"
            if module is not self and any(hooks_of(module)):
                return f"hooks of {name}, which is not called"
        for name, parameter, version in self._sharded:
            whole = parameter()
            if whole is not None and whole._version != version:
                return f"another value of {name} in the model, of which this module has its own part"
        return ""

    def explain(self) -> str:
        """The strategy and the plan as text."""
        return f"{self.strategy.explain(self._in_strategy)}\n{self.plan.explain()}"

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of an optimizer of these parameters, by the names of the whole model, DTensors where they
        are sharded. Missing state is created, for torch.distributed.checkpoint to load into, by a step of the
        optimizer, which may be collective."""
        self._check_optimizer(optimizer)
        _make_state(optimizer)
        save_states_as_shards(optimizer)
        return get_optimizer_state_dict(self, optimizer)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load a result of `optimizer_state_dict`, also of another number of ranks."""
        self._check_optimizer(optimizer)
        set_optimizer_state_dict(self, optimizer, dict(state))

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UserError for an optimizer of a parameter that is not this module's."""
        own = set(self.parameters())
        strangers = sum(p not in own for group in optimizer.param_groups for p in group["params"])
        if strangers:
            raise UserError(
                f"optimizer of the parallelized {self._name}",
                got=f"{strangers} parameters that are not of this module",
                expected="parameters of the parallelized module",
                do="make the optimizer behind parallelize(), with its parameters()",
            )

    def names_in_states(self) -> dict[str, str]:
        return self._names

    def layout(self, name: str) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
        form = self.forms.get(name)
        return None if form is None or form.dimension is None else (self.mesh, (Shard(form.dimension),))

    def part(self, name: str, whole: Tensor) -> Tensor:
        form = self.forms.get(name)
        if form is None or (dim := form.dimension) is None:
            return whole
        size = self.get_parameter(name).shape[dim] * self.mesh.size()
        if whole.shape[dim] != size:
            raise UserError(
                f"{name} of the parallelized {self._name}",
                got=list(whole.shape),
                expected=f"the whole tensor, {size} along dimension {dim}",
                do="give the state dict of the whole model",
            )
        return shard_of(whole, dim, group_name(self.mesh.get_group()))


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of an optimizer that has made no step by one whose changes are undone."""
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [(p, p.grad, p.detach().clone()) for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, gradient, value in before:
        parameter.grad = gradient
        parameter.data.copy_(value)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"] * 0
