"""Experts in state dicts: each under its global id, independent of the ranks that save and load it.

    parameters of a rank   w1 [L, D, F]            L experts, stacked for the grouped GEMM
    state_dict()           experts.7.w1 [D, F]     a view of one of them; of what parametrizes w1:
                           experts.7.parametrizations.w1.original0 [1, F]
    optimizer.state        exp_avg [L, D, F]       of the experts on this rank
    its state_dict()       exp_avg [E, D, F]       the same tensor as a DTensor, a shard of all experts' one

Experts of converted models keep transformers' names: in state dicts their parameters are such DTensors, too.
So torch.distributed.checkpoint saves the experts and an optimizer's state of them, and loads both at any
number of ranks. Every optimizer is told in its first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.nn.utils.parametrize import is_parametrized
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.groups import group_of
from lancet_kernels.ops.comm.shards import shard_of

State = dict[str, Any]
_OPTIMIZERS: WeakSet[Optimizer] = WeakSet()


class ShardedExperts(nn.Module):
    """A module that holds the experts `expert_ids()` of `num_experts` in parameters [L, ...], or
    [L * rows_per_expert(), ...]."""

    layers: ClassVar[WeakSet[ShardedExperts]] = WeakSet()
    """All that there are in this process."""
    rank: int
    num_experts: int
    local_experts: int
    expert_group: str

    def __init__(self) -> None:
        super().__init__()
        self.layers.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As a copy."""
        super().__setstate__(state)
        self.layers.add(self)

    def expert_names(self) -> list[str]:
        """Names of the parameters [L, ...] that hold the experts of this rank; parametrized ones, too."""
        raise NotImplementedError

    def expert_tensors(self) -> dict[str, Tensor]:
        """The parameters of experts by name; in place of a parametrized one, those it is computed from."""
        tensors: dict[str, Tensor] = {}
        for name in self.expert_names():
            if is_parametrized(self, name):
                path = f"parametrizations.{name}"
                tensors |= {f"{path}.{n}": p for n, p in self.get_submodule(path).named_parameters()}
            else:
                tensors[name] = self.get_parameter(name)
        return tensors

    def expert_ids(self) -> range:
        """Global ids of the experts on this rank."""
        return range(self.rank * self.local_experts, (self.rank + 1) * self.local_experts)

    def rows_per_expert(self) -> int:
        return 1

    def own_rows(self) -> slice:
        """The rows of this rank's experts in the parameters of all experts."""
        ids, each = self.expert_ids(), self.rows_per_expert()
        return slice(ids.start * each, ids.stop * each)

    def has_rows(self, value: object, experts: int) -> bool:
        """Is it a tensor with the rows of so many experts?"""
        return (
            isinstance(value, Tensor) and value.dim() > 0 and len(value) == experts * self.rows_per_expert()
        )


class ExpertsByGlobalId(ShardedExperts):
    """Experts that state dicts name one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_by_global_id)

    @property
    def experts(self) -> _Experts:
        """The experts of this rank by their names in checkpoints: `experts.7.w1`, where 7 is an attribute.

        torch.distributed.checkpoint.state_dict looks for attributes of these names.
        """
        return _Experts(self)

    def expert_names(self) -> list[str]:
        return [
            n for n in ("w1", "b1", "w2", "b2") if is_parametrized(self, n) or getattr(self, n) is not None
        ]

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        not_stacked = []
        for name, tensor in self.expert_tensors().items():
            keys = [f"{prefix}experts.{expert}.{name}" for expert in self.expert_ids()]
            if all(key in state_dict for key in keys):
                state_dict[prefix + name] = torch.stack([state_dict.pop(key) for key in keys])
            elif prefix + name not in state_dict:
                not_stacked.append(prefix + name)
                missing_keys += [key for key in keys if key not in state_dict]
                # Known, so not unexpected; an incomplete parameter stays as it is.
                for key in keys:
                    state_dict.pop(key, None)
                if "." in name:  # of a child, which would tell it again
                    state_dict[prefix + name] = tensor.detach()
        # A full checkpoint also has the other ranks' experts: not ours to load, not unexpected either.
        for key in [k for k in state_dict if k.startswith(prefix + "experts.")]:
            expert = key.removeprefix(prefix + "experts.").split(".")[0]
            if expert.isdigit() and int(expert) < self.num_experts and int(expert) not in self.expert_ids():
                del state_dict[key]
        own_missing: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, own_missing, unexpected_keys, error_msgs
        )
        # Under their global names they are told already.
        missing_keys += [key for key in own_missing if key not in not_stacked]


def save_as_shards(layer: ShardedExperts) -> None:
    """From now on state dicts of the layer hold experts under the names of their parameters: as DTensors with
    a row for each expert of all ranks; where one rank has all, as they are. Whole tensors load, too."""
    layer.layers.add(layer)
    layer.register_state_dict_post_hook(_with_shards)
    layer.register_load_state_dict_pre_hook(_with_own_rows)


def _with_shards(layer: ShardedExperts, state_dict: State, prefix: str, _metadata: object) -> None:
    for name, tensor in layer.expert_tensors().items() if layer.expert_group else ():
        value = state_dict[prefix + name]
        _check_rows(layer, value, prefix + name)
        state_dict[prefix + name] = _as_shard(value, tensor, layer)


def _with_own_rows(layer: ShardedExperts, state_dict: State, prefix: str, *_: object) -> None:
    for name, tensor in layer.expert_tensors().items() if layer.expert_group else ():
        if (key := prefix + name) in state_dict:
            state_dict[key] = _own(state_dict[key], tensor, layer)


def _check_rows(layer: ShardedExperts, value: Tensor, name: str) -> None:
    """Raise UserError unless a tensor has a row for each expert of this rank."""
    if not layer.has_rows(value, layer.local_experts):
        raise UserError(
            f"state of {name}",
            got=f"a tensor {tuple(value.shape)} that belongs to {layer.local_experts} experts together",
            expected=f"{layer.local_experts} rows, one for each expert of this rank",
            do="give it such rows, or call torch.nn.utils.parametrize.remove_parametrizations first",
        )


def _by_global_id(layer: ExpertsByGlobalId, state_dict: State, prefix: str, _metadata: object) -> None:
    """Name the experts of a state dict one by one. Raises: UserError for a tensor without a row for each."""
    for name in layer.expert_tensors():
        stacked = state_dict.pop(prefix + name)
        _check_rows(layer, stacked, prefix + name)
        for local, expert in enumerate(layer.expert_ids()):
            state_dict[f"{prefix}experts.{expert}.{name}"] = stacked[local]


class _Experts:
    def __init__(self, layer: ExpertsByGlobalId) -> None:
        self._layer = layer

    def __getattr__(self, expert: str) -> SimpleNamespace:
        ids = self._layer.expert_ids()
        if not expert.isdigit() or int(expert) not in ids:
            raise AttributeError(f"expert {expert}: this rank has {ids.start} to {ids.stop - 1}")
        of_expert = SimpleNamespace()
        for path, tensor in self._layer.expert_tensors().items():
            *outer, name = path.split(".")
            place = of_expert
            for part in outer:
                place.__dict__.setdefault(part, SimpleNamespace())
                place = place.__dict__[part]
            setattr(place, name, tensor[ids.index(int(expert))])
        return of_expert


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


def _layers(optimizer: Optimizer) -> dict[Tensor, ShardedExperts]:
    """The layers whose experts an optimizer updates, by parameter; where one rank has all experts, none."""
    given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return {
        parameter: layer
        for layer in ShardedExperts.layers
        if layer.expert_group
        for parameter in layer.expert_tensors().values()
        if parameter in given
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


def _as_shard(value: object, parameter: Tensor, layer: ShardedExperts) -> object:
    """A tensor with a row for each expert of this rank as the shard of one with a row for each expert."""
    if not isinstance(value, Tensor) or not layer.has_rows(value, layer.local_experts):
        return value
    if isinstance(value, DTensor):  # sharded over the ranks that hold the same experts, too
        mesh, placements = _with_experts(value)
        return DTensor.from_local(value.to_local(), mesh, placements, run_check=False)
    kind = "cpu" if value.is_meta else value.device.type
    mesh = DeviceMesh.from_group(group_of(layer.expert_group), kind)
    return DTensor.from_local(value, mesh, [Shard(0)], run_check=False)


def _own(value: object, parameter: Tensor, layer: ShardedExperts) -> object:
    """This rank's part of such a tensor. Collective over the ranks of a DTensor that is sharded otherwise."""
    if isinstance(parameter, DTensor):
        return _own_shard(value, parameter, layer)
    if isinstance(value, DTensor):
        if value.placements == (Shard(0),) and layer.has_rows(value.to_local(), layer.local_experts):
            return value.to_local()
        value = value.full_tensor()
    if isinstance(value, Tensor) and layer.has_rows(value, layer.num_experts):
        return shard_of(value, 0, layer.expert_group)
    return value


def _own_shard(value: object, parameter: DTensor, layer: ShardedExperts) -> object:
    """The same for experts that are sharded over the ranks that hold the same ones."""
    mesh, placements = _with_experts(parameter)
    if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (mesh, placements):
        own = value.to_local()
    else:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if not isinstance(whole, Tensor) or not layer.has_rows(whole, layer.num_experts):
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
