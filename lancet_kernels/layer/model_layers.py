"""The MoE layers of a model: their parameters, training step and losses."""

from __future__ import annotations

from torch import nn

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.layer.dropout_layer import Dropout
from lancet_kernels.layer.moe_layer import MoELayer
from lancet_kernels.ops.comm.groups import EXPERT_GROUP, AnyGroups, data_group_name
from lancet_kernels.ops.moe.losses import RoutingSums


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """All MoE layers of a model, in order."""
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def name_layers(model: nn.Module) -> None:
    """Give each MoE layer its name in the model, for messages about failed collectives."""
    for name, module in model.named_modules():
        if isinstance(module, MoELayer):
            module.name = name or module.name


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of experts, which differ between the ranks of an expert group: their gradients are
    summed over the replica group only.

    Collected from the layers: a mark on the parameter would be lost when the model is copied.
    """
    own = [getattr(layer, name) for layer in moe_layers(model) for name in layer.expert_names()]
    others = (module for module in model.modules() if EXPERT_GROUP in module.__dict__)
    return own + [p for module in others for p in module.parameters(recurse=False)]


def expert_groups(model: nn.Module) -> set[str]:
    """The expert groups of a model: those of its MoE layers, and of other modules that hold experts."""
    others = (module.__dict__[EXPERT_GROUP] for module in model.modules() if EXPERT_GROUP in module.__dict__)
    return {layer.expert_group for layer in moe_layers(model)} | set(others)


def set_routing_step(model: nn.Module, step: int) -> None:
    """Set the training step of everything in a model that draws random numbers: random gates and `Dropout`s.

    Raises: UserError if two dropouts have the same site.
    """
    sites: set[tuple[int, int]] = set()
    for module in model.modules():
        if not isinstance(module, Dropout) or not module.p:
            continue
        if (module.seed, module.site) in sites:
            raise UserError(
                "site of Dropout",
                got=f"{module.site} twice in one model",
                expected="another number for every dropout",
                do="number them, or they have the same mask",
            )
        sites.add((module.seed, module.site))
        module.step.fill_(step)
    for layer in moe_layers(model):
        if layer.gate.key == "index":
            layer.routing_step.fill_(step)


def moe_losses(sums: list[RoutingSums], groups: AnyGroups | None = None) -> ops.MoELosses:
    """Load-balance loss, z-loss and statistics of the layers with these sums (see `ops.moe.losses`).

    Collective over `groups`, all ranks with different tokens (None: all ranks): one small all-reduce.
    """
    is_list = isinstance(sums, (list, tuple)) and not isinstance(sums, RoutingSums)
    if not is_list or not sums or not all(isinstance(one, RoutingSums) for one in sums):
        wrong = next((one for one in sums if not isinstance(one, RoutingSums)), None) if is_list else sums
        raise UserError(
            "sums",
            got="none" if is_list and not sums else f"a {type(wrong).__name__}{' in the list' * is_list}",
            expected="one RoutingSums per MoE layer",
            do="call forward with return_sums=True, and give a list of what comes second",
        )
    return ops.moe_losses(sums, data_group_name(groups))
