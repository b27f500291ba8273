"""The MoE layers of a model: their parameters, groups, training step, losses and counts of routing; and
dropout that follows the training step.

T  tokens on this rank      D  features

torch's dropout takes numbers from a sequence: a plan may neither cut it into parts nor move it past another
random op. Here a number depends only on seed, call site, training step, token of the global batch, and
feature (`ops.random`), so the mask is the same for every cut of the batch and every number of ranks.

Counts of routing are the tokens that a run's routers send to each expert. Predictions read them from a file
(`lancet plan --hf ... --routing counts.json`); `busiest` gives their imbalance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.files import file_errors, json_text
from lancet_kernels.layer.expert_layer import ExpertLayer, is_number
from lancet_kernels.layer.expert_states import layer_below, tensors_around
from lancet_kernels.layer.moe_layer import MoELayer
from lancet_kernels.ops.base import during
from lancet_kernels.ops.comm.groups import (
    EXPERT_GROUP,
    AnyGroups,
    Groups,
    data_group_name,
    group_rank,
    values_of_ranks,
)
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
        # With p = 0 a captured graph has no input for it either.
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
    summed over the replica group only. Includes parametrizations and adapters of experts.

    Collected from the layers: a mark on the parameter would be lost when the model is copied.
    """
    return [tensor for tensor in _on_experts(model) if isinstance(tensor, nn.Parameter)]


def expert_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers of parametrizations and adapters of experts, which differ between the same ranks."""
    return [tensor for tensor in _on_experts(model) if not isinstance(tensor, nn.Parameter)]


def _on_experts(model: nn.Module) -> Iterator[Tensor]:
    """Parameters of experts, with their parametrizations (`layer.parametrizations.w1`, weight norm, say) and
    the adapters around the layer that name them (`parameter_name`, as PEFT's do)."""
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
    """The names of the parameters that hold experts; parametrized ones, too."""
    if isinstance(module, ExpertLayer):
        return module.expert_names()
    if EXPERT_GROUP not in module.__dict__:
        return []
    return [*dict(module.named_parameters(recurse=False)), *getattr(module, "parametrizations", ())]


def check_placement(model: nn.Module, placed: Collection[nn.Parameter]) -> None:
    """Raise UserError for a parameter that a subclass adds to an MoE layer of several ranks, unless it is in
    `placed`: it is unknown which ranks hold the same values.

    Args: placed: the parameters of experts, and those that `set_gradient_group` names.
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


def groups_of(model: nn.Module, groups: AnyGroups | None = None) -> Groups:
    """The groups of a model: the argument, else the `Groups` of its layers, else those of its expert group.

    Collective over all ranks of the job in the last case.
    Raises: UserError for layers of different expert groups.
    """
    explicit = None if groups is None else Groups.of(groups)
    layers = moe_layers(model)
    ranks = sorted({str(layer.ranks) for layer in layers})
    present = expert_groups(model)
    if len(present) > 1 or (explicit is not None and present - {explicit.expert}):
        raise UserError(
            "expert groups of the model's MoE layers",
            got=f"different ones, of {' and '.join(ranks)} ranks",
            expected="one for all layers, that of `groups` if it is given",
            do="give all layers the same group",
        )
    of_layers = [layer.groups for layer in layers if layer.groups is not None]
    if explicit is not None or of_layers:
        return explicit or of_layers[0]
    # Without MoE layers nothing is expert-parallel: every parameter is replicated over all ranks.
    return Groups.around(next(iter(present), None))


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
    if len(experts := {len(one.assigned_E) for one in sums}) > 1:
        raise UserError(
            "sums",
            got=f"layers of {' and '.join(map(str, sorted(experts)))} experts",
            expected="as many experts in each layer",
            do="call moe_losses for those of each number of experts, and add up the losses",
        )
    return ops.moe_losses(sums, data_group_name(groups))


class RoutingCounts:
    """Counts the choices of a run, in one of two ways.

    Example: `counts = RoutingCounts(model)`, then `with counts.counting():` around some steps, on all ranks;
    or `counts = RoutingCounts()`, `counts.add(losses.assigned)` with the statistics of `MoELayer`s, on one
    rank. Then `counts.save("counts.json")`.

    Args: model: whose layers are counted. groups: as for `optimize`.
    """

    def __init__(self, model: nn.Module | None = None, groups: AnyGroups | None = None) -> None:
        self._groups = Groups() if model is None else groups_of(model, groups)
        if model is not None:
            name_layers(model)
        self._assigned: Tensor | None = None
        self._rows: dict[str, Tensor] = {}
        """By layer, rows of each of this rank's experts."""

    def add(self, assigned: Tensor) -> None:
        """Add a step's counts. Args: assigned: [layers, E], as `MoELosses.assigned`, of all ranks."""
        counts = assigned.detach().cpu()
        self._assigned = counts if self._assigned is None else self._assigned + counts

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """A context in which the rows of this rank's experts are counted: one small sum a layer. Layers with
        backend="fused" are left out."""
        with during(routed=self._rows):
            yield

    def by_layer(self) -> list[list[int]]:
        """The counts [layers][E] of all ranks. Collective where a model is counted."""
        if self._assigned is not None:
            return self._assigned.tolist()
        rows = {layer: counts.tolist() for layer, counts in self._rows.items()}
        own = group_rank(self._groups.expert), rows
        everyone = values_of_ranks(own, self._groups.world, "counts of routing")
        ranks = 1 + max(rank for rank, _ in everyone)
        totals: dict[str, list[int]] = {}
        for rank, by_layer in everyone:
            for layer, counts in by_layer.items():
                total = totals.setdefault(layer, [0] * len(counts) * ranks)
                for expert, count in enumerate(counts, rank * len(counts)):
                    total[expert] += count
        return list(totals.values())

    def save(self, path: str | Path) -> None:
        """Write the file on the first rank. Collective where a model is counted.

        Raises: UserError before anything was counted, and where it cannot be written.
        """
        by_layer = self.by_layer()
        if not by_layer:
            raise UserError(
                "counts", got="none", expected="those of a step", do="call add(), or run a step in counting()"
            )
        if group_rank(self._groups.world) == 0:
            with file_errors(str(path)):
                Path(path).write_text(json_text({"assigned": by_layer}) + "\n", encoding="utf-8")


def busiest(counts: Sequence[Sequence[float]], ranks: int) -> float:
    """The rows of the busiest rank relative to the mean of all ranks; the mean over layers.

    Args: counts: [layers][E], where each rank has E / ranks experts in a row.
    Example: two ranks, layers with 3 1 2 2 and 1 1 3 3 rows: 4 of 4 and 6 of 4, so 1.25.
    """
    by_layer = (torch.tensor(layer, dtype=torch.float64) for layer in counts if any(layer))
    by_rank = [layer.unflatten(0, (ranks, -1)).sum(1) for layer in by_layer]
    return fmean(float(rows.max() / rows.mean()) for rows in by_rank) if by_rank else 1.0
