"""How `fully_shard` (FSDP2) shards a model: which parameters over which ranks, in which units, with which
dtypes. The only file that reads FSDP's private state.

A unit is what one call of `fully_shard` wraps, whose parameters FSDP gathers and frees together.

A model is captured through its twin: the same modules without FSDP's hooks, with whole parameters that have a
shape but no memory. The twin shares buffers and attributes with the model; `Twin.update` copies what was
assigned since. The casts of FSDP's hooks (`MixedPrecisionPolicy`) are hooks of the twin, and so captured.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lancet_kernels.errors import UserError, class_name
from lancet_kernels.ops.comm.groups import (
    EXPERT_GROUP,
    FORWARD_OF,
    Groups,
    group_name,
    group_of,
    group_ranks,
    groups_of_all_ranks,
    subgroup,
)

_MESHES: WeakKeyDictionary[dist.ProcessGroup, dict[Groups, DeviceMesh]] = WeakKeyDictionary()
"""By the group of all ranks."""
_DIVISOR = "_lancet_divisor"
"""Attribute of a parameter group of FSDP: the argument of `set_divisor`."""
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
        """Add the gradient of `shard()` to the parameter's `.grad`."""
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
    _reshard(units(model))
    first_name = {parameter: name for name, parameter in model.named_parameters()}
    outermost = _outermost(model)
    result = []
    number_of: dict[int, int] = {}
    for state, group in _units(model):
        # Parameters of one call may be sharded over several meshes, each a group of its own.
        unit = number_of.setdefault(id(state), len(number_of))
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
            after_forward = group.post_forward_mesh_info
            if after_forward is not None and after_forward.shard_mesh_size != mesh.shard_mesh_size:
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
                    after_forward is not None and state not in outermost,
                    getattr(group, _DIVISOR, group.gradient_divide_factor),
                    held,
                )
            )
    return result


def units(model: nn.Module) -> list[Any]:
    """FSDP's parameter groups."""
    return [group for _, group in _units(model)]


def _reshard(groups: Iterable[Any]) -> None:
    """Free the outermost module's parameters, which FSDP leaves gathered after a forward without
    gradients."""
    for group in groups:
        if not group.is_sharded:
            group.reshard()


def set_divisor(model: nn.Module, divide_by: float) -> None:
    """Let FSDP, too, divide sums of gradients by this number, where the user has set none."""
    for group in units(model):
        if group.gradient_divide_factor is not None and not hasattr(group, _DIVISOR):
            continue
        setattr(group, _DIVISOR, divide_by)
        policy, parameter = group.mp_policy, group.fsdp_params[0]
        reduced = policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
        # torch 2.13 divides twice by it where a rank's shard is the whole, in dtypes whose sums may overflow.
        shards = group.mesh_info.shard_mesh_size
        twice = shards == 1 and reduced not in (torch.float32, torch.bfloat16)
        group.gradient_divide_factor = divide_by**0.5 if twice else divide_by
        # Otherwise the reduce-scatter itself would multiply by a factor, which gloo cannot.
        if shards > 1 and group.device.type == "cpu":
            group.force_sum_reduction_for_comms = True


def hook_numbers(model: nn.Module) -> set[int]:
    """The numbers of the forward hooks that FSDP has registered."""
    numbers: set[int] = set()
    for state in _states(model):
        for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
            numbers.update(one.id for one in getattr(handle, "handles", (handle,)))
    return numbers


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before `fully_shard` replaced it by a subclass."""
    from torch.distributed.fsdp import FSDPModule

    kind = type(module)
    if not isinstance(module, FSDPModule):
        return kind
    return next(base for base in kind.__bases__ if base is not FSDPModule)


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
        f"model {class_name(model)}",
        got=got,
        expected="parameters that fully_shard has sharded over one mesh dimension",
        do=f"use {do}, or train without optimize()",
    )


def placements_over(mesh: DeviceMesh, dims: Sequence[int]) -> list[Any]:
    """What a `shard_placement_fn` returns for parameters with their own mesh, sharded along these dimensions.

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
    mesh_info = FSDPMeshInfo(mesh, shard_mesh_dim=0)  # fully_shard wants one object for one mesh
    return [ShardPlacementResult(placement=Shard(dim), mesh_info=mesh_info) for dim in dims]


def mesh_of_experts(groups: Groups, device_type: str) -> DeviceMesh:
    """The ranks that hold the same experts as this one, as a mesh of one dimension. Its root is the mesh of
    all ranks of the model, with the dimensions "replica" and "expert". Collective over all ranks of the job
    in the first call."""
    world = cast(dist.ProcessGroup, dist.group.WORLD)
    meshes = _MESHES.setdefault(world, {})
    if groups not in meshes:
        replicas = {*group_ranks(groups.replica)}
        # Those of this model: each has a replica of this rank. The data group may lack some of their ranks,
        # which have the same tokens as others.
        rows = [row for row in groups_of_all_ranks(group_ranks(groups.expert)) if replicas.intersection(row)]
        # A process group has its ranks in order; as places in a mesh they would be other shards.
        if any(sorted(column) != [*column] for column in zip(*rows, strict=True)):
            raise UserError(
                "expert groups of a sharded model",
                got=", ".join(map(str, rows)),
                expected="ranks that ascend from group to group",
                do="make the groups in the order of the ranks, as init_device_mesh does",
            )
        names = [
            name or subgroup([dist.get_rank()], world.group_name) for name in (groups.replica, groups.expert)
        ]
        meshes[groups] = DeviceMesh.from_group(
            [group_of(name) for name in names], device_type, rows, mesh_dim_names=("replica", "expert")
        )
    return meshes[groups]["replica"]


def copies_of_shard(parameter: Tensor) -> int:
    """How many ranks hold the same shard of a DTensor (HSDP); 1 for any other tensor."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())


def group_of_copies(parameter: Tensor) -> str:
    """The ranks that hold the same shard of a DTensor (HSDP); "" for one rank, and for any other tensor."""
    if not isinstance(parameter, DTensor) or copies_of_shard(parameter) == 1:
        return ""
    along = [dim for dim, p in enumerate(parameter.placements) if p.is_replicate()]
    return group_name(parameter.device_mesh.get_group(along[0])) if len(along) == 1 else ""


_BEFORE, _BEHIND = "_forward_pre_hooks", "_forward_hooks"
_WITH_KWARGS = "_forward_pre_hooks_with_kwargs"
_HOOKS = (_BEFORE, _BEHIND, _WITH_KWARGS)
_OWN = ("_modules", "_parameters", *_HOOKS)
"""Attributes of a module that its twin has for itself."""
_CAST = -1
"""The number of a hook that casts; torch counts its own from 0."""


class Twin:
    """The twin of a model, and what is sharded of it.

    Attributes: module: the twin. parameters: those that are sharded. names: by any name of a sharded
    parameter (tied weights have several), its first one. groups: those that are none of `Groups`, by the
    name under which their communication has costs.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[ShardedParameter]) -> None:
        self.parameters, self._units = tuple(parameters), units(model)
        first: dict[Tensor, str] = {p.parameter: p.name for p in parameters}
        every = model.named_parameters(remove_duplicate=False)
        self.groups: dict[str, str] = {}
        self.names = {name: first[p] for name, p in every if p in first}
        whole: dict[Tensor, nn.Parameter] = {p.parameter: _without_memory(p) for p in parameters}
        self._twins = {module: object.__new__(own_class(module)) for module in model.modules()}
        self._forwards = {
            module: module.__dict__[FORWARD_OF](twin)
            for module, twin in self._twins.items()
            if FORWARD_OF in module.__dict__
        }
        self._of_fsdp = hook_numbers(model)
        self._hooks: dict[nn.Module, tuple[tuple[int, ...], ...]] = {}
        """The numbers of a module's hooks when its twin got them."""
        self._casts = {m: _casts(state._mp_policy) for state in _states(model) for m in state._modules}
        for module, twin in self._twins.items():
            own = {name: whole.get(p, p) if p is not None else None for name, p in module._parameters.items()}
            children = {n: None if m is None else self._twins[m] for n, m in module._modules.items()}
            hooks: dict[str, Any] = {kind: OrderedDict() for kind in _HOOKS}
            twin.__dict__.update(_parameters=own, _modules=children, **hooks)
        self.update()
        self.module = self._twins[model]

    def update(self) -> None:
        """Give the twin the attributes and hooks that the model has now."""
        for module, twin in self._twins.items():
            mine, theirs = twin.__dict__, module.__dict__
            own = {name: mine[name] for name in _OWN}
            # Whole dicts at once: this is part of every call of a plan.
            mine.update(theirs)
            mine.update(own)
            for name in FLAGS:
                mine.pop(name, None)
            if len(mine) != len(theirs) - sum(name in theirs for name in FLAGS):
                for name in mine.keys() - theirs.keys():
                    del mine[name]
            if getattr(theirs.get("forward"), "__self__", None) is module:
                mine["forward"] = MethodType(theirs["forward"].__func__, twin)
            if module in self._forwards:
                mine["forward"] = self._forwards[module]
            numbers = tuple(tuple(theirs[kind]) for kind in _HOOKS)
            if self._hooks.get(module) != numbers:
                self._hooks[module] = numbers
                self._update_hooks(module, mine, theirs)

    def _update_hooks(self, module: nn.Module, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
        casts = self._casts.get(module, {})
        for kind in (_BEFORE, _BEHIND):
            users = {n: hook for n, hook in theirs[kind].items() if n not in self._of_fsdp}
            own = {_CAST: casts[kind]} if kind in casts else {}
            mine[kind].clear()
            # FSDP's come first before a forward, and last behind it.
            mine[kind].update({**own, **users} if kind == _BEFORE else {**users, **own})
        mine[_WITH_KWARGS].clear()
        mine[_WITH_KWARGS].update({n: True for n in mine[_BEFORE] if n == _CAST or n in theirs[_WITH_KWARGS]})

    def reshard(self) -> None:
        """Free parameters that FSDP has left gathered."""
        _reshard(self._units)

    def shards(self) -> dict[str, Tensor]:
        """This rank's shards, differentiable, by every name of a parameter."""
        shards = {p.name: p.shard() for p in self.parameters}
        return {name: shards[first] for name, first in self.names.items()}


def _without_memory(parameter: ShardedParameter) -> nn.Parameter:
    # As FSDP's own while they are not gathered: a storage without bytes.
    whole = torch.empty(parameter.shape, dtype=parameter.compute_dtype, device=parameter.parameter.device)
    whole.untyped_storage().resize_(0)
    return nn.Parameter(whole, requires_grad=parameter.parameter.requires_grad)


def _casts(policy: Any) -> dict[str, Any]:
    """By kind of hook, the cast that FSDP would make there."""
    casts: dict[str, Any] = {}
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        casts[_BEFORE] = lambda _module, args, by_name: _cast((args, by_name), policy.param_dtype)
    if policy.output_dtype is not None:
        casts[_BEHIND] = lambda _module, _args, output: _cast(output, policy.output_dtype)
    return casts


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def one(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, one, values)


def twin_of(model: nn.Module, groups: Groups) -> Twin | None:
    """The twin of a model that FSDP shards; None for any other one.

    Args: groups: their communicators replace those of FSDP meshes with the same ranks: a mesh may use that
        of the all-to-alls, in whose queue gathers would wait.
    """
    if not is_sharded(model):
        return None
    own = {tuple(group_ranks(name)): name for name in (groups.replica, groups.data)}

    def or_own(name: str) -> str:
        return own.get(tuple(group_ranks(name)), name)

    parameters = sharded_parameters(model)
    twin = Twin(model, [replace(p, group=or_own(p.group), replicas=or_own(p.replicas)) for p in parameters])
    for parameter in twin.parameters:
        for name, group in (("shards", parameter.group), ("copies", parameter.replicas)):
            if group and group not in own.values():
                twin.groups[name] = group
    return twin
