"""FSDP around a model with MoE layers: experts are sharded over the ranks that hold the same ones.

`fully_shard` assumes that every parameter is the same on all ranks of its mesh. `fsdp` calls it with another
mesh for experts, and lets it divide all gradients by the number of ranks with different tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.fsdp_parameters import (
    is_sharded,
    mesh_of_experts,
    placement_over,
    set_divisor,
)
from lancet_kernels.layer.gradients import groups_of
from lancet_kernels.layer.model_layers import expert_parameters
from lancet_kernels.ops.comm.groups import AnyGroups, group_of, group_size


def fsdp(
    model: nn.Module, mesh: DeviceMesh | None = None, groups: AnyGroups | None = None, **options: Any
) -> nn.Module:
    """Shard a model in place with `fully_shard`: each block of its lists of modules, then the rest.

    Gradients are those of the mean loss of all ranks with different tokens, experts' too: do not divide the
    loss. Collective over all ranks of the job.

    Args:
        mesh: of one dimension, along which parameters are sharded, or of two, along the first of which they
            are replicated (HSDP); None: all ranks with different tokens. Experts are sharded over all ranks
            that hold the same ones.
        groups: as for `optimize`.
        options: of `fully_shard`: mp_policy, reshard_after_forward.
    Returns: the model.
    Raises: UserError without torch.distributed, for a model that is sharded already, or for experts whose
    widths those ranks cannot divide.
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
    kind = next(model.parameters()).device.type
    if mesh is None:
        mesh = (
            DeviceMesh.from_group(group_of(own.data), kind)
            if own.data
            else DeviceMesh(kind, [dist.get_rank()])
        )
    experts = set(expert_parameters(model))
    over_replicas: Any = Shard(1)
    if experts and not _same_ranks(mesh, own.replica):
        over_replicas = placement_over(mesh_of_experts(own, kind), Shard(1))
    ranks = group_size(own.replica)
    for parameter in experts:
        if parameter.dim() < 2 or parameter.shape[1] % ranks:
            raise UserError(
                "experts to shard",
                got=f"parameters {tuple(parameter.shape)} over {ranks} ranks that hold the same experts",
                expected=f"a multiple of {ranks} as their second dimension",
                do="use larger expert groups, or other widths",
            )

    def placement(parameter: nn.Parameter) -> Any:
        return over_replicas if parameter in experts else None

    for module in (*_blocks(model), model):
        fully_shard(module, mesh=mesh, shard_placement_fn=placement, **options)
    set_divisor(model, group_size(own.data))
    return model


def _same_ranks(mesh: DeviceMesh, group: str) -> bool:
    """Is the mesh one dimension of the ranks of a group?"""
    own = dist.get_process_group_ranks(group_of(group)) if group else [dist.get_rank()]
    return mesh.ndim == 1 and mesh.mesh.tolist() == own


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of modules that have parameters."""
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from _blocks(child)
