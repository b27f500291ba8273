"""DistributedDataParallel or FSDP around a model with MoE layers, whose experts are left to their own groups.

DistributedDataParallel assumes that every parameter is replicated: it would overwrite all experts with those
of rank 0, and average gradients of different experts. `ddp` excludes experts from it, and averages their
gradients over the ranks that hold the same experts.

`fully_shard` assumes that every parameter is the same on all ranks of its mesh. `fsdp` calls it with another
mesh for experts, and lets it divide all gradients by the number of ranks with different tokens. Experts are
sharded over the ranks that hold the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.fsdp_parameters import (
    is_sharded,
    mesh_of_experts,
    placements_over,
    set_divisor,
)
from lancet_kernels.layer.expert_layer import AVERAGES
from lancet_kernels.layer.expert_states import adapter_tensors
from lancet_kernels.layer.gradients import (
    broadcast_replicated,
    gradient_groups,
    ranks_that_hold,
)
from lancet_kernels.layer.model_layers import expert_buffers, expert_groups, expert_parameters, groups_of
from lancet_kernels.ops.comm.collectives import start_all_reduce
from lancet_kernels.ops.comm.groups import AnyGroups, Groups, group_of, group_ranks, group_size


def ddp(model: nn.Module, groups: AnyGroups | None = None, **options: Any) -> DistributedDataParallel:
    """`model` in DistributedDataParallel, with correct gradients for its MoE layers.

    As DistributedDataParallel does, all gradients are averages over the ranks with different tokens: do not
    divide the loss by their number. Collective over all ranks of the job.

    Args: groups: as for `optimize`. options: of DistributedDataParallel, but for `process_group`.
    Raises: UserError without torch.distributed, and for a model that trains nothing but experts.
    """
    experts = set(expert_parameters(model)) if expert_groups(model) - {""} else set()
    if not any(p.requires_grad and p not in experts for p in model.parameters()):
        raise UserError(
            f"data parallelism of {type(model).__name__}",
            got="no trained parameters but those of experts",
            expected="some that DistributedDataParallel would average",
            do="call prepare_data_parallel(model), which sums those of experts, and train the model itself",
        )
    groups = prepare_data_parallel(model, groups)
    process_group = group_of(groups.data) if groups.data else dist.group.WORLD
    return DistributedDataParallel(model, process_group=process_group, **options)


def prepare_data_parallel(model: nn.Module, groups: AnyGroups | None = None) -> Groups:
    """`ddp` without the wrapping, for frameworks that wrap `model` in DistributedDataParallel themselves.

    Afterwards a DistributedDataParallel around this module leaves the experts alone, and their gradients are
    averaged over the ranks that hold the same experts. Collective over all ranks of the job; call it again
    when other parameters train, and for a copy of the model.

    Args: groups: as for `optimize`.
    Returns: the groups of the model.
    Raises: UserError without torch.distributed, and for DTensors.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "data parallelism",
            got="no process group",
            expected="one",
            do="call init_process_group first, or train the model without data parallelism",
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UserError(
                f"data parallelism of {type(model).__name__}",
                got=f"{name} as a DTensor",
                expected="plain tensors, whose gradients DistributedDataParallel averages",
                do="shard it with fsdp() or fully_shard, along the ranks with different tokens",
            )
    groups = groups_of(model, groups)
    broadcast_replicated(model, groups)
    over, ranks = gradient_groups(model, groups), group_size(groups.data)
    own = {parameter: group for parameter, group in over.items() if group != groups.data}
    ignored, excluded = [], {*own, *expert_buffers(model)}
    for module_name, module in model.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if tensor in excluded:
                # DistributedDataParallel spells a parameter of the model itself both `.w1` and `w1`.
                ignored += [f"{module_name}.{name}", f"{module_name}.{name}".removeprefix(".")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    for parameter, group in own.items():
        if parameter in AVERAGES:
            AVERAGES.pop(parameter)[0].remove()
        if parameter.requires_grad:
            # A hook averages each gradient before it is added to `.grad`, so that micro-batches add up. The
            # all-to-all has summed it over the expert group.
            hook = parameter.register_hook(
                lambda g, group=group: start_all_reduce([g], group).wait()[0] / ranks
            )
            AVERAGES[parameter] = hook, groups.data
    return groups


def refuse_averages(model: nn.Module) -> None:
    """Raise UserError for gradients that `prepare_data_parallel` averages: a plan would sum them again."""
    for name, parameter in model.named_parameters():
        if parameter in AVERAGES:
            raise UserError(
                f"gradient of {name}",
                got="the average of ddp(model) or prepare_data_parallel(model), and sums of the plan",
                expected="one of them",
                do="leave these calls out, or call optimize(..., reduce_gradients=False)",
            )


def fsdp(
    model: nn.Module, mesh: DeviceMesh | None = None, groups: AnyGroups | None = None, **options: Any
) -> nn.Module:
    """Shard a model in place with `fully_shard`: each block of its lists of modules, then the rest. Blocks
    with tied weights belong to the rest: `fully_shard` would untie them.

    Gradients are those of the mean loss of all ranks with different tokens, experts' too: do not divide the
    loss. Collective over all ranks of the job.

    Args:
        mesh: of one dimension, along which parameters are sharded, or of two, along the first of which they
            are replicated (HSDP); None: all ranks with different tokens. Experts are sharded over all ranks
            that hold the same ones.
        groups: as for `optimize`.
        options: of `fully_shard`: mp_policy, reshard_after_forward.
    Returns: the model.
    Raises: UserError without torch.distributed, for a model that is sharded already, a mesh of other ranks,
    experts whose widths those ranks cannot divide, expert groups whose ranks do not ascend, or a parameter
    that `set_gradient_group` gives to other ranks than these.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "sharding", got="no process group", expected="one", do="call init_process_group before"
        )
    if is_sharded(model):
        raise UserError(
            f"model {type(model).__name__}",
            got="a model that fully_shard has sharded",
            expected="whole parameters",
            do="leave fsdp() and shard= out",
        )
    own = groups_of(model, groups)
    kind = next(model.parameters()).device.type if mesh is None else mesh.device_type
    if kind == "meta":
        raise UserError(
            "sharding",
            got="parameters on the meta device, and no mesh",
            expected="a mesh of the device that they will be on",
            do="give it as mesh=: that of init_device_mesh, say",
        )
    if mesh is None:
        mesh = (
            DeviceMesh.from_group(group_of(own.data), kind)
            if own.data
            else DeviceMesh(kind, [dist.get_rank()])
        )
    # Gradients of the others would be left out of the sums.
    if sorted(mesh.mesh.flatten().tolist()) != sorted(group_ranks(own.data)):
        raise UserError(
            "mesh of fsdp",
            got=f"ranks {sorted(mesh.mesh.flatten().tolist())}",
            expected=f"the ranks with different tokens, expert ranks among them: {group_ranks(own.data)}",
            do="leave it out, give one of these ranks, or say by groups= which ranks have different tokens",
        )
    experts, holders = set(expert_parameters(model)), ranks_that_hold(model, own)
    # Experts, and parameters that `set_gradient_group` gives to the replica group.
    differ = {p for p, group in holders.items() if p in experts or group == own.replica != own.data}
    # Experts are sharded along a dimension that does not count experts.
    columns = {tensor for _, tensor, place in adapter_tensors(model) if place.form == "columns"}
    dim_of = {p: int(p in experts and p not in columns) for p in differ}
    ranks = group_size(own.replica)
    for name, parameter in model.named_parameters():
        if parameter in experts and (parameter.dim() < 2 or parameter.shape[dim_of[parameter]] % ranks):
            raise UserError(
                "experts to shard",
                got=f"parameters {tuple(parameter.shape)} over {ranks} ranks that hold the same experts",
                expected=f"a multiple of {ranks} as their {('first', 'second')[dim_of[parameter]]} dimension",
                do="use larger expert groups, or other widths",
            )
        if parameter not in differ and holders[parameter] != own.data:
            raise UserError(
                f"parameter {name} to shard",
                got=f"a gradient group of {group_size(holders[parameter])} ranks",
                expected=f"the ranks with different tokens, or the {ranks} that hold the same experts",
                do="leave fsdp() out, or give fully_shard that parameter among its ignored_params",
            )

    along: list[Any] = [Shard(0), Shard(1)]
    if differ and not (mesh.ndim == 1 and own.replica == own.data):
        along = placements_over(mesh_of_experts(own, kind), [0, 1])

    def placement(parameter: nn.Parameter) -> Any:
        return along[dim_of[parameter]] if parameter in dim_of else None

    for module in (*_units(model), model):
        fully_shard(module, mesh=mesh, shard_placement_fn=placement, **options)
    set_divisor(model, group_size(own.data))
    return model


def _units(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks, each once, that share no parameter with other modules."""
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(module)
    for block in dict.fromkeys(_blocks(model)):
        own = set(block.modules())
        if all(holders[parameter] <= own for parameter in block.parameters()):
            yield block


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of modules that have parameters."""
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from _blocks(child)
