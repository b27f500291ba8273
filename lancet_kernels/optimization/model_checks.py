"""Checks of a model, and of its optimizer, before they are planned: what no plan can train is refused in one
line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lancet_kernels.data_parallel.outside_gradients import has_hooks
from lancet_kernels.errors import UserError
from lancet_kernels.graph.sharded.fsdp import ShardedParameter, sharded_parameters
from lancet_kernels.layer.model_layers import expert_parameters
from lancet_kernels.ops.comm.groups import Groups, group_size
from lancet_kernels.ops.optimizer_step import BucketSteps

if TYPE_CHECKING:
    from lancet_kernels.optimization.captured_step import CapturedStep


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
    experts = {id(parameter) for parameter in expert_parameters(model)}
    for one in sharded:
        is_expert = id(one.parameter) in experts
        ranks, over = group_size(one.group) * group_size(one.replicas), groups.data
        if is_expert:
            over = groups.replica
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
    sharded = {id(parameter.parameter) for parameter in sharded_parameters(module)}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and id(parameter) not in sharded:
            raise UserError(
                f"model {name_of_model}",
                got=f"{name} as a DTensor (tensor parallel)",
                expected="plain tensors, or parameters that fully_shard has sharded",
                do="leave tensor parallelism out, or train without optimize()",
            )


def steps_of(optimizer: object, step: CapturedStep) -> BucketSteps:
    """The steps of an optimizer as part of a captured step.

    Raises: UserError for what is no optimizer or steps no parameter of the model by itself; for gradients
        that the plan does not sum, or that a hook changes.
    """
    if not isinstance(optimizer, Optimizer):
        raise UserError(
            "optimizer",
            got=f"a {type(optimizer).__name__}",
            expected="a torch.optim.Optimizer",
            do="give the optimizer of the model's parameters",
        )
    steps = BucketSteps(optimizer, step.accumulation)
    stepped = {n: p for n, p in step.model.named_parameters() if p.requires_grad and steps.trains(p)}
    if not stepped:
        raise UserError(
            f"optimizer {type(optimizer).__name__}",
            got="no trained parameter of the model",
            expected="parameters that the model has now",
            do="make the optimizer of model.parameters(), after fsdp() or fully_shard, not shard=",
        )
    for name, parameter in stepped.items():
        if not step.reduction and step.gradient_groups[name] and not isinstance(parameter, DTensor):
            raise UserError(
                "optimizer",
                got=f"reduce_gradients=False, and {name}, whose gradient other ranks have a part of",
                expected="gradients that are summed before the optimizer's step",
                do="leave reduce_gradients=False out, or call optimizer.step() yourself",
            )
        if has_hooks(parameter) and not isinstance(parameter, DTensor):
            raise UserError(
                "optimizer",
                got=f"a hook on {name}, which changes its gradient behind the step",
                expected="gradients that nothing changes between their sum and the optimizer's step",
                do="remove the hook, or call optimizer.step() yourself",
            )
    return steps
