"""Checks of a model before it is planned: what no plan can train is refused in one line."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.fsdp_parameters import ShardedParameter, sharded_parameters
from lancet_kernels.layer.model_layers import expert_parameters
from lancet_kernels.ops.comm.groups import Groups, group_size


def check_model(model: nn.Module) -> None:
    """Raise UserError for a model that no plan can train: without parameters, with parameters that no
    gradient can reach, or distributed over ranks by a wrapper."""
    name = f"model {type(model).__name__}"
    parameters = dict(model.named_parameters())
    if not parameters:
        raise UserError(
            name,
            got="no parameters",
            expected="a training step, which trains some",
            do="give the module that holds the model and its loss, or call this one as it is",
        )
    for parameter_name, parameter in parameters.items():
        if is_lazy(parameter):
            raise UserError(
                name,
                got=f"{parameter_name}, a lazy parameter without a shape",
                expected="parameters with values",
                do="call the model once before",
            )
        if parameter.is_inference():
            raise UserError(
                name,
                got=f"{parameter_name} as a tensor of torch.inference_mode(), which cannot be trained",
                expected="parameters made outside of it",
                do="build the model outside of torch.inference_mode()",
            )
    refuse_sharded(model)


def check_shards(model: nn.Module, sharded: Sequence[ShardedParameter], groups: Groups) -> None:
    """Raise UserError for parameters that are sharded over other ranks than those that hold the same ones."""
    experts = set(expert_parameters(model))
    for one in sharded:
        is_expert = one.parameter in experts
        over = groups.replica if is_expert else groups.data
        ranks = group_size(one.group) * group_size(one.replicas)
        if ranks != group_size(over):
            raise UserError(
                f"model {type(model).__name__}",
                got=f"{one.name} sharded over {ranks} ranks",
                expected=f"the {group_size(over)} ranks that hold the same "
                + ("experts" if is_expert else "parameters"),
                do="shard the model with lancet_kernels.fsdp, or give optimize() the groups",
            )


def refuse_sharded(module: nn.Module) -> None:
    """Raise UserError for parameters that DistributedDataParallel or the first FSDP distribute over ranks, or
    DTensors of anything but `fully_shard`."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    name_of_model = type(module).__name__
    for name, part in module.named_modules():
        if isinstance(part, FullyShardedDataParallel):
            raise UserError(
                f"model {name_of_model}",
                got=f"{name or 'the model'} in a FullyShardedDataParallel",
                expected="sharding by fully_shard, which leaves the modules as they are",
                do="use torch.distributed.fsdp.fully_shard, or train without optimize()",
            )
        if isinstance(part, DistributedDataParallel):
            raise UserError(
                f"model {name_of_model}",
                got=f"DistributedDataParallel around {name or 'it'}",
                expected="the model that it wraps",
                do="give optimize() the plain model; it sums the gradients",
            )
    sharded = {one.parameter for one in sharded_parameters(module)}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and parameter not in sharded:
            raise UserError(
                f"model {name_of_model}",
                got=f"{name} as a DTensor (tensor parallel)",
                expected="plain tensors, or parameters that fully_shard has sharded",
                do="leave tensor parallelism out, or train without optimize()",
            )
