"""`convert`: makes the experts of a transformers model expert-parallel, in place; `CausalLMStep`: the
training step of a causal language model, loss included, for `optimize`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lancet_kernels.errors import UserError, class_name
from lancet_kernels.layer.expert_layer import ExpertLayer
from lancet_kernels.layer.expert_states import save_as_shards
from lancet_kernels.ops.base import during
from lancet_kernels.ops.comm.collectives import shard_of
from lancet_kernels.ops.comm.groups import AnyGroups, data_group_name, group_size
from lancet_kernels.transformers.checkpoints import guard_save_pretrained
from lancet_kernels.transformers.experts import (
    ADAPTERS,
    ConvertedExperts,
    derived,
    expert_parallel,
    has_interface,
    reason_against,
)
from lancet_kernels.transformers.routers import keep_choices, keep_float32, record_outputs


@dataclass(frozen=True)
class ConversionReport:
    """Converted experts, and others. Printable."""

    converted: dict[str, str]
    """Name of the module in the model -> its class and sizes."""
    left_alone: dict[str, str]
    """Name of the module -> the reason why it was not converted."""

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} MoE blocks converted, {len(self.left_alone)} left alone"]
        lines += [f"  {name}: {what}" for name, what in self.converted.items()]
        lines += [f"  {name}: left alone: {why}" for name, why in self.left_alone.items()]
        return "\n".join(lines)


def convert(
    model: nn.Module,
    groups: AnyGroups | None = None,
    *,
    backend: str = "torch",
    capacity_factor: float | None = None,
    strict: bool = False,
) -> ConversionReport:
    """Divide the experts of a transformers model among ranks, and compute them as `MoELayer` does, in place.

    Each rank keeps its share of every block's experts. Everything else stays the model's own code, its loss
    of router logits (`output_router_logits`) included. Convert before you create an optimizer or wrap the
    model. The peak memory is that of the model and one weight of one block's experts.

    Args:
        model: any module with transformers' blocks in it, for example from `from_pretrained`; parameters may
            be on the meta device.
        groups: as for `MoELayer`.
        backend, capacity_factor: as for `MoELayer`; capacity_factor None is dropless, as transformers is.
        strict: raise if experts are left alone, or if there are none.
    Raises: UserError, before anything is changed.
    """
    report = ConversionReport({}, {})
    chosen: dict[str, nn.Module] = {}
    for name, experts in experts_of(model):
        if why := _reason(experts):
            report.left_alone[name] = f"{class_name(experts)}: {why}"
        else:
            _refuse_changed(name, experts)
            chosen[name] = experts
    if strict and (report.left_alone or not chosen):
        left = "; ".join(dict.fromkeys(report.left_alone.values()))
        raise UserError(
            "model to convert",
            got=left or f"a {class_name(model)} without MoE blocks",
            expected="experts that can be converted and no others",
            do="convert with strict=False to leave the others alone",
        )
    for experts in chosen.values():  # a copy, so that errors come before anything is changed
        expert_parallel(copy.copy(experts), groups, backend, capacity_factor, _kind(experts))
    for name, experts in chosen.items():
        own, block_name = class_name(experts), name.rpartition(".")[0]
        block = model.get_submodule(block_name)
        keep_choices(block)
        keep_float32(model, block_name)
        if own in ADAPTERS:
            block.__class__ = derived(ADAPTERS[own].block, type(block))
        layer = expert_parallel(experts, groups, backend, capacity_factor, _kind(experts))
        layer.name = name
        _keep_own_experts(layer)
        save_as_shards(layer)
        count = f"{layer.local_experts} of {layer.num_experts} experts here"
        report.converted[name] = f"{own}, {count}, activation {layer.activation}"
    guard_save_pretrained(model)
    return report


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of all experts of transformers in a model, with or without its experts interface."""
    outermost = ""
    for name, module in model.named_modules():
        if isinstance(module, ExpertLayer) or (outermost and name.startswith(outermost)):
            continue
        if any(map(_has_adapter, module.children())):  # its child has the weights
            continue
        if has_interface(module) or _has_adapter(module) or name.rpartition(".")[2] == "experts":
            outermost = f"{name}."
            yield name, module


def _has_adapter(module: nn.Module) -> bool:
    return class_name(module) in ADAPTERS


def _kind(experts: nn.Module) -> type[ConvertedExperts]:
    return ADAPTERS[class_name(experts)].experts if _has_adapter(experts) else ConvertedExperts


def _reason(experts: nn.Module) -> str:
    """The reason why such experts are not converted; "" if they are."""
    if "base_layer" in experts._modules:
        return "adapters are around it: convert the model before they are put there"
    if has_interface(experts) or _has_adapter(experts):
        return reason_against(experts, _kind(experts))
    if isinstance(experts, nn.ModuleList):
        if getattr(sys.modules.get("transformers"), "__version__", "5").startswith("4."):
            return "a list of modules, as transformers before 5.0 has experts: install transformers>=5"
        return "a list of modules, one for each expert, and not one module with the weights of all"
    return "its class has no `use_experts_implementation` of transformers, which says how its weights lie"


def _refuse_changed(name: str, experts: nn.Module) -> None:
    """Raise UserError for experts that FSDP or tensor parallelism has sharded already, and for those with a
    patched forward, which would be called in place of ours."""
    for own, parameter in experts.named_parameters():
        if isinstance(parameter, DTensor):
            raise UserError(
                f"experts {name}",
                got=f"{own} as a DTensor",
                expected="parameters that are whole on every rank, or on the meta device",
                do="convert the model before it is sharded",
            )
    if "forward" in vars(experts):
        raise UserError(
            f"experts {name}",
            got="a forward that was put in the place of its class's, as device_map does",
            expected="transformers' own",
            do="load the model without device_map, and convert it before it is patched",
        )


@torch.no_grad()
def _keep_own_experts(layer: ExpertLayer) -> None:
    """Keep the rows of this rank's experts; each parameter is freed before the next one is read."""
    if layer.ranks == 1:
        return
    for name in layer.expert_names():
        whole = layer._parameters.pop(name)
        assert whole is not None
        part = nn.Parameter(shard_of(whole, 0, layer.expert_group).clone(), whole.requires_grad)
        del whole
        layer.register_parameter(name, part)


class CausalLMStep(nn.Module):
    """The inputs of the model by name, including `labels` -> its loss.

    `optimize(CausalLMStep(model), batch)` plans it for a dict batch. The loss is the model's own: with
    `output_router_logits` in its config or in the batch, the load-balance loss of its routers is part of it.

    Args:
        model: a causal language model of transformers.
        groups: with `num_items_in_batch`, the ranks with different tokens; None: all ranks.
    """

    def __init__(self, model: nn.Module, groups: AnyGroups | None = None) -> None:
        super().__init__()
        self.model = model
        self.ranks = group_size(data_group_name(groups))
        record_outputs(model)  # also for a torch.compile of the caller's own

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_router_logits: bool | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Tensor:
        """-> the loss, a scalar to differentiate.

        Args:
            attention_mask: [B, S], 1 for a token and 0 for padding, which the `MoELayer`s of a converted
                model leave out, too (see there).
            num_items_in_batch: the number of labels that count (`labels[:, 1:] != -100`) in the batches of
                all ranks together, as transformers' Trainer has it; for several microbatches, their mean. A
                tensor, because a plan would be for one number alone. The mean of the losses over the ranks
                is then that over all labels; None: the mean of the means of the ranks.
        """
        by_name = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "output_router_logits": output_router_logits,
            # The model divides by it, and gradients are those of the mean over the ranks.
            "num_items_in_batch": None if num_items_in_batch is None else num_items_in_batch / self.ranks,
        }
        options = {name: value for name, value in by_name.items() if value is not None}
        is_padding = attention_mask is not None and attention_mask.dim() == 2
        with during(padding_mask=attention_mask if is_padding else None):
            return self.model(input_ids=input_ids, labels=labels, use_cache=False, **options).loss
