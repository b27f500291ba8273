"""`export_state_dict`: the weights of a converted model, named and laid out as in the original."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lancet_kernels.ops.comm.groups import group_of
from lancet_kernels.ops.comm.waiting import waiting
from lancet_kernels.transformers.block import ConvertedMoE


def export_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict that the model would have without `convert`, with its current weights; bitwise.

    Collective over the expert group: every rank gathers all experts, one weight of one block at a time. Of a
    sharded model (`fsdp`) every rank gathers all parameters: collective over all its ranks.
    `model.save_pretrained(folder, state_dict=export_state_dict(model))` writes a checkpoint that
    transformers loads. With several ranks call export_state_dict on all of them, save_pretrained on one.

    Args: model: after `convert`. For a model without converted blocks the result is `model.state_dict()`.
    Raises: CommunicationError.
    """
    state = model.state_dict()
    for prefix, layer in model.named_modules():
        if isinstance(layer, ConvertedMoE):
            state = _with_block(state, prefix + "." if prefix else "", layer)
    return {name: _whole(value) for name, value in state.items()}


def _with_block(state: dict[str, Tensor], prefix: str, layer: ConvertedMoE) -> dict[str, Tensor]:
    """The state dict with the names of the block in place of the layer's, in the same order."""
    exported: dict[str, Tensor] = {}
    for name, value in state.items():
        own = name.removeprefix(prefix)
        if not name.startswith(prefix):
            exported[name] = value
        elif own.startswith("block."):
            exported[prefix + own.removeprefix("block.")] = value
    for weight in layer.layout.weights:
        value_E = _of_all_ranks(layer, weight)
        for name, value in layer.layout.restore(weight, value_E):
            exported[f"{prefix}experts.{name}"] = value
    return exported


@torch.no_grad()
def _of_all_ranks(layer: ConvertedMoE, weight: str) -> Tensor:
    """A weight of all experts, [E, ...]."""
    own = _whole(getattr(layer, weight).detach())
    if not layer.expert_group:
        return own
    group = group_of(layer.expert_group)
    gathered = [torch.empty_like(own) for _ in range(layer.ranks)]
    with waiting(f"export of {weight} of {layer.name}", group):
        dist.all_gather(gathered, own.contiguous(), group=group)
    return torch.cat(gathered)


def _whole(value: Tensor) -> Tensor:
    """A tensor that FSDP shards, gathered; others as they are."""
    if not isinstance(value, DTensor):
        return value
    mesh = value.device_mesh
    with waiting("export of a sharded parameter", mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD):
        return value.full_tensor()
