"""Checks of a model before it is planned: what no plan can train is refused in one line."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lancet_kernels.errors import UserError


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


def refuse_sharded(module: nn.Module) -> None:
    """Raise UserError for parameters that FSDP, DistributedDataParallel or DTensor distribute over ranks."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    name_of_model = type(module).__name__
    for name, part in module.named_modules():
        if isinstance(part, (FSDPModule, FullyShardedDataParallel)):
            raise UserError(
                f"model {name_of_model}",
                got=f"{name or 'the model'} sharded by FSDP, whose hooks torch cannot trace",
                expected="whole parameters on every rank",
                do="leave FSDP out (optimize() sums the gradients), or train without optimize()",
            )
        if isinstance(part, DistributedDataParallel):
            raise UserError(
                f"model {name_of_model}",
                got=f"DistributedDataParallel around {name or 'it'}",
                expected="the model that it wraps",
                do="give optimize() the plain model; it sums the gradients",
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise UserError(
                f"model {name_of_model}",
                got=f"{name} as a DTensor (tensor parallel)",
                expected="plain tensors",
                do="leave tensor parallelism out, or train without optimize()",
            )
