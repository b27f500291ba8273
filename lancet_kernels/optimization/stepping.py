"""The optimizer that a user hands to `optimize`: can its step be part of the backward?"""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lancet_kernels.data_parallel.outside_gradients import has_hooks
from lancet_kernels.errors import UserError
from lancet_kernels.ops.optimizer_step import BucketSteps
from lancet_kernels.optimization.captured_step import CapturedStep


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
