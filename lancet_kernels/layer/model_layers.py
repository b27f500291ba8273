"""The MoE layers of a model: their parameters, training step and losses; and dropout of the same step, whose
mask does not depend on how a batch is cut or over how many ranks it is distributed.

T  tokens on this rank      D  features

torch's dropout takes numbers from a sequence, so they depend on what was drawn before: a plan may neither
cut it into parts nor move it past another random op. Here a number depends only on seed, call site,
training step, token of the global batch, and feature (`ops.random`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from numbers import Integral

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.layer.expert_layer import ExpertLayer, is_number
from lancet_kernels.layer.expert_states import layer_below, tensors_around
from lancet_kernels.layer.moe_layer import MoELayer
from lancet_kernels.ops.comm.groups import EXPERT_GROUP, AnyGroups, data_group_name
from lancet_kernels.ops.moe.router import RoutingSums


def dropout(
    x: Tensor,
    p: float = 0.5,
    *,
    step: Tensor,
    site: int,
    seed: int = 0,
    training: bool = True,
    groups: AnyGroups | None = None,
) -> Tensor:
    """x [..., D] -> [..., D]: each feature of each token zero with probability p, else divided by 1 - p.

    The identity if not training or p = 0.

    Args:
        step: int64 scalar tensor. The mask is the same for the same step: increment it for every batch.
        site: number of this dropout in the model; two with the same number have the same mask.
        groups: the ranks over which the batch is distributed, with equal numbers of tokens, in the order of
            the ranks (of `Groups` the data group); None: all ranks.
    Raises: UserError for p outside [0, 1), x without dimensions.
    """
    _check_probability(p)
    if not training or p == 0:
        return x
    return _dropped(x, float(p), step, seed, site, data_group_name(groups))


class Dropout(nn.Module):
    """`dropout` as a module, in place of `nn.Dropout`.

    The mask changes when `set_routing_step(model, step)` sets another step: call it for every batch. Until
    then recomputation (activation checkpointing) and the backward use the mask of the forward. The step is a
    buffer, which a captured CUDA graph reads; it is not in the state dict.

    Args:
        p: probability of zero, in [0, 1).
        site: number of this dropout in the model. Two with the same number would share a mask.
        seed: the same on all ranks.
        groups: the ranks over which the batch is distributed (of `Groups` the data group); None: all ranks.
    Raises: UserError.
    """

    step: Tensor

    def __init__(
        self,
        p: float,
        site: int,
        *,
        seed: int = 0,
        groups: AnyGroups | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_probability(p)
        for what, value in (("site", site), ("seed", seed)):
            if not is_number(value, Integral) or not 0 <= value < 2**63:
                raise UserError(
                    f"{what} of Dropout", got=repr(value), expected="a whole number from 0", do="give one"
                )
        self.p, self.site, self.seed = float(p), int(site), int(seed)
        self._group = data_group_name(groups)
        # Without dropout a graph has nothing of it, not even an input.
        if self.p:
            self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        if not self.training or not self.p:
            return x
        return _dropped(x, self.p, self.step, self.seed, self.site, self._group)

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site}, seed={self.seed}"


def _dropped(x: Tensor, p: float, step: Tensor, seed: int, site: int, group: str) -> Tensor:
    if x.dim() < 1:
        raise UserError("input of dropout", got="a scalar", expected="[..., D]", do="drop something larger")
    tokens = x.shape[:-1]
    token = ops.token_index(tokens.numel(), group, x.device, True).view(tokens)
    feature_D = torch.arange(x.shape[-1], device=x.device)
    return ops.dropout(x, token, feature_D, step, p, seed, site)


def _check_probability(p: float) -> None:
    if not is_number(p) or not 0 <= p < 1:
        raise UserError("p of dropout", got=repr(p), expected="0 <= p < 1", do="use 0.1, say")


def moe_layers(model: nn.Module) -> list[ExpertLayer]:
    """All MoE layers of a model, in order: each `MoELayer`, and the experts of each converted block."""
    return [module for module in model.modules() if isinstance(module, ExpertLayer)]


def name_layers(model: nn.Module) -> None:
    """Give each MoE layer its name in the model, for messages about failed collectives."""
    for name, module in model.named_modules():
        if isinstance(module, ExpertLayer):
            module.name = name or module.name


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of experts, which differ between the ranks of an expert group: their gradients are
    summed over the replica group only. Those of parametrizations and adapters of experts are among them.

    Collected from the layers: a mark on the parameter would be lost when the model is copied.
    """
    return [tensor for tensor in _on_experts(model) if isinstance(tensor, nn.Parameter)]


def expert_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers of parametrizations and adapters of experts, which differ between ranks as these do."""
    return [tensor for tensor in _on_experts(model) if not isinstance(tensor, nn.Parameter)]


def _on_experts(model: nn.Module) -> Iterator[Tensor]:
    """Parameters of experts, and what lies on them.

    On a parameter `w1` of a layer lie its parametrizations (`layer.parametrizations.w1`), of which weight
    norm is one, and adapters around the layer that have it as their `parameter_name`, as PEFT's have.
    """
    for module in model.modules():
        innermost = layer_below(module)
        names = _expert_names(innermost)
        if innermost is module:
            for name in names:
                if is_parametrized(module, name):
                    parametrized = module.get_submodule(f"parametrizations.{name}")
                    yield from [*parametrized.parameters(), *parametrized.buffers()]
                else:
                    yield module.get_parameter(name)
        elif getattr(module, "parameter_name", None) in names:
            yield from tensors_around(module).values()


def _expert_names(module: nn.Module) -> list[str]:
    """The parameters of a module that hold experts, by their names; parametrized ones, too."""
    if isinstance(module, ExpertLayer):
        return module.expert_names()
    if EXPERT_GROUP not in module.__dict__:
        return []
    return [*dict(module.named_parameters(recurse=False)), *getattr(module, "parametrizations", ())]


def check_placement(model: nn.Module, placed: Collection[nn.Parameter]) -> None:
    """Raises: UserError for a parameter in an MoE layer of several ranks that may differ between them or not.

    Experts differ, and what lies on them; the router and the shared expert are equal. Nobody can tell of
    what a subclass adds. Args: placed: the parameters of experts, and those of which `set_gradient_group`
    was told the ranks.
    """
    for path, layer in model.named_modules():
        if not isinstance(layer, ExpertLayer) or layer.ranks == 1:
            continue
        for name, parameter in layer.named_parameters():
            if parameter not in placed and name.partition(".")[0] not in layer.equal_on_all_ranks:
                raise UserError(
                    f"parameter {name} of {path or 'an MoE layer'}",
                    got=f"a {type(layer).__name__} that adds it to an MoELayer",
                    expected="to know which ranks hold the same values",
                    do=f"call set_gradient_group(layer, ranks, [{name!r}]), with None if no other rank does",
                )


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
        if isinstance(layer, MoELayer) and layer.gate.key == "index":
            layer.routing_step.fill_(step)


def moe_losses(sums: list[RoutingSums], groups: AnyGroups | None = None) -> ops.MoELosses:
    """Load-balance loss, z-loss and statistics of the layers with these sums (see `ops.moe.router`).

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
