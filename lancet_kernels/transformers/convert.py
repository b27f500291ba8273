"""`convert`: the MoE blocks of a transformers model become expert-parallel `MoELayer`s, in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from lancet_kernels.errors import UserError
from lancet_kernels.layer.moe_layer import MoELayer
from lancet_kernels.ops.comm.groups import AnyGroups
from lancet_kernels.transformers.block import ConvertedMoE
from lancet_kernels.transformers.family import Unsupported
from lancet_kernels.transformers.registry import BY_BLOCK, FAMILIES


@dataclass(frozen=True)
class ConversionReport:
    """Which blocks were converted, and which were not. Printable."""

    converted: dict[str, str]
    """Name of the module in the model -> family and sizes."""
    left_alone: dict[str, str]
    """Name of the module -> why it stays as it was."""

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
    """Replace the MoE blocks of a transformers model by `MoELayer`s with their weights and routing, in place.

    Each rank keeps its share of every block's experts. Everything else stays: routers, shared experts and
    attention with their parameters, and the model's own loss, including that of its router logits
    (`output_router_logits`). Convert before an optimizer is made and before anything wraps the model.
    Beside the model, memory is needed for one weight of one block's experts.

    Args:
        model: any module with transformers' blocks in it, for example from `from_pretrained`; parameters may
            be on the meta device.
        groups: as for `MoELayer`.
        backend, capacity_factor: as for `MoELayer`; capacity_factor None is dropless, as transformers is.
        strict: raise if a block is left alone, or if there is none.
    Raises: UserError, before anything is changed.
    """
    report = ConversionReport({}, {})
    replacements: list[tuple[nn.Module, str, nn.Module, ConvertedMoE]] = []
    for parent, attribute, name, block in _moe_blocks(model):
        family = BY_BLOCK.get(type(block).__name__)
        if family is None:
            supported = ", ".join(family.name for family in FAMILIES)
            report.left_alone[name] = f"{type(block).__name__} is not a block of {supported}"
            continue
        _refuse_sharded(name, block)
        try:
            layer = ConvertedMoE(
                block, family, groups=groups, backend=backend, capacity_factor=capacity_factor
            )
        except Unsupported as error:
            report.left_alone[name] = f"{family.name}, but {error}"
            continue
        layer.name = name
        experts = f"{layer.local_experts} of {layer.num_experts} experts here"
        report.converted[name] = f"{family.name}, {experts}, gate {layer.gate}, top_k {layer.top_k}"
        replacements.append((parent, attribute, block, layer))
    if strict and (report.left_alone or not report.converted):
        left = "; ".join(f"{name} ({why})" for name, why in report.left_alone.items())
        raise UserError(
            "model to convert",
            got=left or f"a {type(model).__name__} without MoE blocks",
            expected="blocks that can be converted and no others",
            do="convert with strict=False to leave the others alone",
        )
    for parent, attribute, block, layer in replacements:
        layer.take_weights(block)
        setattr(parent, attribute, layer)
    return report


def _moe_blocks(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Module]]:
    """Parent, attribute, name in the model, and module of every block of experts that is no MoELayer."""
    if isinstance(getattr(model, "experts", None), nn.Module) and not isinstance(model, MoELayer):
        raise UserError(
            "model to convert",
            got=f"a {type(model).__name__}, which is an MoE block itself",
            expected="a model that contains MoE blocks",
            do="give the model, or torch.nn.Sequential(block)",
        )

    def below(parent: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, str, nn.Module]]:
        for attribute, child in parent.named_children():
            if isinstance(child, MoELayer):
                continue
            if isinstance(getattr(child, "experts", None), nn.Module):
                yield parent, attribute, prefix + attribute, child
            else:
                yield from below(child, f"{prefix}{attribute}.")

    yield from below(model, "")


def _refuse_sharded(name: str, block: nn.Module) -> None:
    """Raise UserError for a block that FSDP or tensor parallelism has sharded already."""
    for own, parameter in block.named_parameters():
        if isinstance(parameter, DTensor):
            raise UserError(
                f"block {name}",
                got=f"{own} as a DTensor",
                expected="parameters that are whole on every rank, or on the meta device",
                do="convert the model before it is sharded",
            )
