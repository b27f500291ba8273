"""What an optimizer keeps of experts, in its state dict: DTensors over the ranks that share the experts.

    optimizer.state        exp_avg [L, D, F]     of the experts on this rank
    its state_dict()       exp_avg [E, D, F]     the same tensor, as a shard of that of all experts

So torch.distributed.checkpoint saves the state of all experts and loads it at any number of ranks, as it does
with the experts themselves (`expert_names`). Every optimizer is told in its first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lancet_kernels.layer.expert_names import ExpertsByGlobalId
from lancet_kernels.ops.comm.groups import group_of
from lancet_kernels.ops.comm.shards import shard_of

State = dict[str, Any]
_OPTIMIZERS: WeakSet[Optimizer] = WeakSet()


def _before_step(optimizer: Optimizer, _arguments: object, _by_name: object) -> None:
    if torch.compiler.is_compiling() or optimizer in _OPTIMIZERS:
        return
    _OPTIMIZERS.add(optimizer)
    optimizer.register_state_dict_post_hook(partial(_changed, change=_as_shard))
    optimizer.register_load_state_dict_pre_hook(partial(_changed, change=_own))
    # What was loaded before the first step.
    for parameter, layer in _layers(optimizer).items():
        state = optimizer.state.get(parameter, {})
        state.update({key: _own(value, parameter, layer) for key, value in state.items()})


register_optimizer_step_pre_hook(_before_step)


def _layers(optimizer: Optimizer) -> dict[Tensor, ExpertsByGlobalId]:
    """The layers whose experts an optimizer updates, by parameter; where one rank has all experts, none."""
    given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return {
        parameter: layer
        for layer in ExpertsByGlobalId.layers
        if layer.expert_group
        for name in layer.expert_names()
        if (parameter := getattr(layer, name)) in given
    }


def _changed(optimizer: Optimizer, state_dict: State, change: Any) -> State:
    """The state dict with the changed states of experts; neither it nor the optimizer changes.

    torch checks afterwards whether the state dict is one of this optimizer.
    """
    layers, states = _layers(optimizer), dict(state_dict["state"])
    for group, named in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        for parameter, name in zip(group["params"], named["params"], strict=False):
            if parameter in layers and isinstance(states.get(name), Mapping):
                layer = layers[parameter]
                states[name] = {key: change(value, parameter, layer) for key, value in states[name].items()}
    return {**state_dict, "state": states}


def _as_shard(value: object, parameter: Tensor, layer: ExpertsByGlobalId) -> object:
    """A tensor with a row for each expert of this rank as the shard of one with a row for each expert."""
    if not isinstance(value, Tensor) or not value.dim() or len(value) != layer.local_experts:
        return value
    if isinstance(value, DTensor):  # sharded over the ranks that hold the same experts, too
        mesh, placements = _with_experts(value)
        return DTensor.from_local(value.to_local(), mesh, placements, run_check=False)
    mesh = DeviceMesh.from_group(group_of(layer.expert_group), value.device.type)
    return DTensor.from_local(value, mesh, [Shard(0)], run_check=False)


def _own(value: object, parameter: Tensor, layer: ExpertsByGlobalId) -> object:
    """This rank's part of such a tensor. Collective over the ranks of a DTensor that is sharded otherwise."""
    if isinstance(parameter, DTensor):
        return _own_shard(value, parameter, layer)
    if isinstance(value, DTensor):
        if value.placements == (Shard(0),) and len(value.to_local()) == layer.local_experts:
            return value.to_local()
        value = value.full_tensor()
    if isinstance(value, Tensor) and value.dim() and len(value) == layer.num_experts:
        return shard_of(value, 0, layer.expert_group)
    return value


def _own_shard(value: object, parameter: DTensor, layer: ExpertsByGlobalId) -> object:
    """The same for experts that are sharded over the ranks that hold the same ones."""
    mesh, placements = _with_experts(parameter)
    if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (mesh, placements):
        own = value.to_local()
    else:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if not isinstance(whole, Tensor) or not whole.dim() or len(whole) != layer.num_experts:
            return value
        of_rank = shard_of(whole, 0, layer.expert_group)
        own = distribute_tensor(of_rank, parameter.device_mesh, parameter.placements).to_local()
    return DTensor.from_local(own, parameter.device_mesh, parameter.placements, run_check=False)


def _with_experts(shard: DTensor) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The mesh of all ranks and the placements of the tensor of all experts of which this is a part."""
    mesh = shard.device_mesh
    root = mesh._get_root_mesh()
    (name,) = mesh.mesh_dim_names or ("",)
    of_dimension = {name: shard.placements[0]}
    names = root.mesh_dim_names or ()
    return root, tuple(of_dimension.get(other, Shard(0)) for other in names)
