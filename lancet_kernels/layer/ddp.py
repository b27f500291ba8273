"""DistributedDataParallel around a model with MoE layers: experts are left to their own groups.

DistributedDataParallel assumes that every parameter is replicated: it would overwrite all experts with those
of rank 0, and average gradients of different experts. `ddp` excludes experts from it, and averages their
gradients over the ranks that hold the same experts.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lancet_kernels.errors import UserError
from lancet_kernels.layer.gradients import broadcast_replicated, gradient_groups, groups_of
from lancet_kernels.layer.model_layers import expert_buffers
from lancet_kernels.ops.comm.all_reduce import start_all_reduce
from lancet_kernels.ops.comm.groups import AnyGroups, Groups, group_of, group_size


def ddp(model: nn.Module, groups: AnyGroups | None = None, **options: Any) -> DistributedDataParallel:
    """`model` in DistributedDataParallel, with correct gradients for its MoE layers.

    As DistributedDataParallel does, all gradients are averages over the ranks with different tokens: do not
    divide the loss by their number. Collective over all ranks of the job.

    Args: groups: as for `optimize`. options: of DistributedDataParallel, but for `process_group`.
    Raises: UserError without torch.distributed.
    """
    groups = prepare_data_parallel(model, groups)
    process_group = group_of(groups.data) if groups.data else dist.group.WORLD
    return DistributedDataParallel(model, process_group=process_group, **options)


def prepare_data_parallel(model: nn.Module, groups: AnyGroups | None = None) -> Groups:
    """`ddp` without the wrapping, for frameworks that wrap `model` in DistributedDataParallel themselves.

    Afterwards a DistributedDataParallel around this module leaves the experts alone, and their gradients are
    averaged over the ranks that hold the same experts. Collective over all ranks of the job; call it once.

    Args: groups: as for `optimize`.
    Returns: the groups of the model.
    Raises: UserError without torch.distributed.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "data parallelism",
            got="no process group",
            expected="one",
            do="call init_process_group first, or train the model without data parallelism",
        )
    groups = groups_of(model, groups)
    broadcast_replicated(model, groups)
    over, ranks = gradient_groups(model, groups), group_size(groups.data)
    own = {parameter: group for parameter, group in over.items() if group != groups.data}
    ignored, kept = [], {*own, *expert_buffers(model)}
    for module_name, module in model.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if tensor in kept:
                # Of the model itself, DistributedDataParallel looks for `.w1` here and for `w1` there.
                ignored += [f"{module_name}.{name}", f"{module_name}.{name}".removeprefix(".")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    for parameter, group in own.items():
        if parameter.requires_grad:
            # Before it is added to `.grad`, so that micro-batches add up.
            # The all-to-all has summed over the expert group.
            parameter.register_hook(lambda g, group=group: start_all_reduce([g], group).wait()[0] / ranks)
    return groups
