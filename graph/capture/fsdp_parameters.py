"""What `fully_shard` (FSDP2) has made of a model: which parameters are sharded over which ranks, in which
units, with which dtypes. The only file that reads FSDP's private state.

A unit is what one call of `fully_shard` wraps: FSDP gathers the parameters of a unit together, and frees them
together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.groups import (
    EXPERT_GROUP,
    Groups,
    group_name,
    group_ranks,
    groups_of_all_ranks,
)

_MESHES: WeakKeyDictionary[dist.ProcessGroup, dict[Groups, DeviceMesh]] = WeakKeyDictionary()
"""By the group of all ranks."""
_DIVISOR = "_lancet_divisor"
"""Attribute of a parameter group of FSDP: what `set_divisor` was asked for."""
FLAGS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Attributes by which torch.compile knows modules of FSDP."""


@dataclass(eq=False)
class ShardedParameter:
    """A parameter that FSDP shards.

    Attributes:
        name: its first name in the model.
        unit: the number of its unit, in the order of the model's modules.
        shape: of the whole parameter. dim: the dimension along which it is sharded.
        group: the ranks over which it is sharded; replicas: those that hold the same shard (HSDP); "": one
            rank.
        dtype: of the shard and its gradient. compute_dtype: of the gathered parameter. reduce_dtype: in which
            gradients are summed.
        regathers: gathered a second time for the backward (`reshard_after_forward`).
        divide_by: the sum of the gradients is divided by it; None: by the number of ranks.
    """

    name: str
    unit: int
    shape: torch.Size
    dim: int
    group: str
    replicas: str
    dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    regathers: bool
    divide_by: float | None
    _fsdp: Any

    @property
    def parameter(self) -> DTensor:
        """The DTensor that optimizers update."""
        return self._fsdp.sharded_param

    @property
    def shard_size(self) -> int:
        """The size of a shard along `dim`: the same on all ranks, so that of the last may be padding."""
        return int(self._fsdp.padded_sharded_param_size[self.dim])

    def shard(self) -> Tensor:
        """This rank's shard, padded. Its gradient becomes that of the parameter."""
        shard = self.parameter.to_local()
        missing = self.shard_size - shard.shape[self.dim]
        if not missing:
            return shard
        return F.pad(shard, (0, 0) * (shard.dim() - 1 - self.dim) + (0, missing))

    def add_gradient(self, shard: Tensor) -> None:
        """Add that of the `shard` to `.grad` of the parameter."""
        own, rows = self.parameter, self.parameter.to_local().shape[self.dim]
        local = shard.narrow(self.dim, 0, rows).to(self.dtype)
        gradient = DTensor.from_local(
            local, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
        )
        own.grad = gradient if own.grad is None else own.grad + gradient


def is_sharded(model: nn.Module) -> bool:
    """Is any part of the model wrapped by `fully_shard`?"""
    return next(_states(model), None) is not None


def sharded_parameters(model: nn.Module) -> list[ShardedParameter]:
    """The parameters that FSDP shards, in the order of the model.

    Raises: UserError for what is not supported: tensor parallelism below FSDP, parameters that are kept on
    the CPU, a mesh to which parameters are resharded after the forward.
    """
    first_name = {parameter: name for name, parameter in model.named_parameters()}
    outermost = _outermost(model)
    result = []
    number_of: dict[int, int] = {}
    for state, group in _units(model):
        # Parameters of one call may be sharded over several meshes, each a group of its own.
        unit = number_of.setdefault(id(state), len(number_of))
        if not group.is_sharded:
            # FSDP leaves the outermost module gathered after a forward without gradients.
            group.reshard()
        for held in group.fsdp_params:
            info = held._module_info
            if getattr(info.module, info.param_name) is not held.sharded_param:
                # Assigned since (a checkpoint was loaded), which FSDP notices in its first forward.
                held.reset_sharded_param()
            mesh = held.mesh_info
            name = first_name.get(held.sharded_param)
            if name is None:
                raise _refusal(model, f"{info.param_name}, which FSDP holds gathered", "reshard()")
            # Experts of this rank may be a part of a DTensor of all experts.
            is_tensor_parallel = held.is_dtensor and EXPERT_GROUP not in info.module.__dict__
            if is_tensor_parallel or not hasattr(mesh, "shard_process_group"):
                raise _refusal(
                    model, f"{name} as a DTensor below FSDP (tensor parallel)", "no tensor parallelism"
                )
            if held.offload_to_cpu:
                raise _refusal(model, f"{name} kept on the CPU (CPUOffloadPolicy)", "no offload_policy")
            kept = group.post_forward_mesh_info
            if kept is not None and kept.shard_mesh_size != mesh.shard_mesh_size:
                raise _refusal(model, f"{name} with reshard_after_forward as a number", "True or False")
            policy, dtype = group.mp_policy, held.sharded_param.dtype
            floating = dtype.is_floating_point
            compute = policy.param_dtype if policy.param_dtype is not None and floating else dtype
            result.append(
                ShardedParameter(
                    name,
                    unit,
                    held._orig_size,
                    held.fsdp_placement.dim,
                    group_name(mesh.shard_process_group),
                    group_name(mesh.replicate_process_group) if mesh.replicate_mesh_dim is not None else "",
                    dtype,
                    compute,
                    policy.reduce_dtype or compute,
                    kept is not None and state not in outermost,
                    getattr(group, _DIVISOR, group.gradient_divide_factor),
                    held,
                )
            )
    return result


def units(model: nn.Module) -> list[Any]:
    """FSDP's parameter groups."""
    return [group for _, group in _units(model)]


def set_divisor(model: nn.Module, divide_by: float) -> None:
    """Let FSDP, too, divide sums of gradients by this number, where the user has set none."""
    for group in units(model):
        if group.gradient_divide_factor is not None and not hasattr(group, _DIVISOR):
            continue
        setattr(group, _DIVISOR, divide_by)
        policy, parameter = group.mp_policy, group.fsdp_params[0]
        reduced = policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
        # torch 2.13 divides twice by it where a rank's shard is the whole, in dtypes whose sums may overflow.
        twice = group.mesh_info.shard_mesh_size == 1 and reduced not in (torch.float32, torch.bfloat16)
        group.gradient_divide_factor = divide_by**0.5 if twice else divide_by


def hook_numbers(model: nn.Module) -> set[int]:
    """The numbers of the forward hooks that FSDP has registered."""
    numbers: set[int] = set()
    for state in _states(model):
        for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
            numbers.update(one.id for one in getattr(handle, "handles", (handle,)))
    return numbers


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before `fully_shard`, which puts one that derives from it in its place."""
    from torch.distributed.fsdp import FSDPModule

    kind = type(module)
    if not isinstance(module, FSDPModule):
        return kind
    return next(base for base in kind.__bases__ if base is not FSDPModule)


def policies(model: nn.Module) -> dict[nn.Module, Any]:
    """By module that was wrapped, its MixedPrecisionPolicy."""
    return {module: state._mp_policy for state in _states(model) for module in state._modules}


def _states(model: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            if id(state) not in seen:
                seen.add(id(state))
                yield state


def _units(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """(state, parameter group), in the order of the modules."""
    for state in _states(model):
        groups: Iterable[Any] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        yield from ((state, group) for group in groups if group is not None)


def _outermost(model: nn.Module) -> list[Any]:
    """The states that keep what they gather through the backward: FSDP's default for outermost modules."""
    wrapped = {module: state for state in _states(model) for module in state._modules}
    inner = {below for module in wrapped for below in module.modules() if below is not module}
    return [s for module, s in wrapped.items() if module not in inner and s._auto_reshard_after_forward]


def _refusal(model: nn.Module, got: str, do: str) -> UserError:
    return UserError(
        f"model {type(model).__name__}",
        got=got,
        expected="parameters that fully_shard has sharded over one mesh dimension",
        do=f"use {do}, or train without optimize()",
    )


def placement_over(mesh: DeviceMesh, placement: Shard) -> Any:
    """What a `shard_placement_fn` returns for parameters with a mesh of their own.

    Raises: UserError for a torch whose `fully_shard` has one mesh for all parameters.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    except ImportError:
        raise UserError(
            "sharding of experts",
            got=f"torch {torch.__version__}",
            expected="a torch whose fully_shard takes a mesh for each parameter (2.13)",
            do="install a newer torch, or give fully_shard the experts as ignored_params",
        ) from None
    return ShardPlacementResult(placement=placement, mesh_info=FSDPMeshInfo(mesh, shard_mesh_dim=0))


def mesh_of_experts(groups: Groups, device_type: str) -> DeviceMesh:
    """The ranks that hold the same experts as this one, as a mesh of one dimension. Its root is the mesh of
    all ranks, with the dimensions "replica" and "expert". Collective over all ranks; made once."""
    meshes = _MESHES.setdefault(cast(dist.ProcessGroup, dist.group.WORLD), {})
    if groups not in meshes:
        rows = groups_of_all_ranks(group_ranks(groups.expert), "expert groups")
        meshes[groups] = DeviceMesh(device_type, rows, mesh_dim_names=("replica", "expert"))
    return meshes[groups]["replica"]


def copies_of_shard(parameter: Tensor) -> int:
    """How many ranks hold the same shard of a DTensor (HSDP); 1 for any other tensor."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())
