"""How a block stores the weights of its experts, and how `MoELayer` does.

                    transformers 5                    transformers 4.5x                   MoELayer
    gate and up     experts.gate_up_proj [E, 2F, D]   experts.7.gate_proj.weight [F, D]   w1 [L, D, 2F]
                                                      experts.7.up_proj.weight [F, D]
    down            experts.down_proj [E, D, F]       experts.7.down_proj.weight [D, F]   w2 [L, F, D]

    E  experts in all      L  experts of this rank      D  model width      F  hidden width of an expert

A layout gives one expert's weights in the form of `MoELayer`, and the way back. Both only move numbers,
so a round trip is bitwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Block = Any
"""A module of transformers, whose attributes are those of its family."""
Read = Callable[[str, int | None], Tensor]
"""(name relative to `experts`, row or None) -> that row of the tensor, or all of it."""


class Layout:
    """Where the experts of a block lie. Subclasses say how."""

    weights: tuple[str, ...] = ("w1", "w2")
    """Names of the parameters of `MoELayer` that are filled."""

    def sizes(self, experts: Block) -> tuple[int, int, int]:
        """D, F and E."""
        raise NotImplementedError

    def sources(self, experts: Block, weight: str) -> list[tuple[nn.Module, str]]:
        """Modules, and names of their parameters, from which `weight` of all experts is read."""
        raise NotImplementedError

    def of_expert(self, read: Read, weight: str, expert: int) -> Tensor:
        """`weight` of one expert in the form of `MoELayer`, without its leading dimension."""
        raise NotImplementedError

    def restore(self, weight: str, value_E: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Names relative to `experts`, and tensors, of `weight` [E, ...] in the block's own form."""
        raise NotImplementedError


@dataclass(frozen=True)
class Stacked(Layout):
    """All experts in two parameters, each matrix as torch.nn.Linear has it (transformers 5)."""

    names: ClassVar[dict[str, str]] = {"w1": "gate_up_proj", "w2": "down_proj"}

    def sizes(self, experts: Block) -> tuple[int, int, int]:
        num_experts, d_model, d_ff = experts.down_proj.shape
        return d_model, d_ff, num_experts

    def sources(self, experts: Block, weight: str) -> list[tuple[nn.Module, str]]:
        return [(experts, self.names[weight])]

    def of_expert(self, read: Read, weight: str, expert: int) -> Tensor:
        return read(self.names[weight], expert).t()

    def restore(self, weight: str, value_E: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield self.names[weight], value_E.transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Interleaved(Stacked):
    """All experts in four parameters (GPT-OSS):

    gate_up_proj [E, D, 2F], gate and up in alternate columns        w1 [L, D, 2F] = [gate | up]
    gate_up_proj_bias [E, 2F]                                        b1 [L, 2F]
    down_proj [E, F, D], down_proj_bias [E, D]                       w2 [L, F, D], b2 [L, D]
    """

    weights = ("w1", "b1", "w2", "b2")
    names: ClassVar[dict[str, str]] = {
        "w1": "gate_up_proj", "b1": "gate_up_proj_bias", "w2": "down_proj", "b2": "down_proj_bias",
    }  # fmt: skip

    def sizes(self, experts: Block) -> tuple[int, int, int]:
        num_experts, d_ff, d_model = experts.down_proj.shape
        return d_model, d_ff, num_experts

    def of_expert(self, read: Read, weight: str, expert: int) -> Tensor:
        value = read(self.names[weight], expert)
        return torch.cat([value[..., ::2], value[..., 1::2]], -1) if weight in ("w1", "b1") else value

    def restore(self, weight: str, value_E: Tensor) -> Iterator[tuple[str, Tensor]]:
        if weight in ("w1", "b1"):
            value_E = torch.stack(value_E.chunk(2, -1), -1).flatten(-2)
        yield self.names[weight], value_E.contiguous()


@dataclass(frozen=True)
class Listed(Layout):
    """A ModuleList with three Linear modules for each expert (transformers 4.5x)."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def sizes(self, experts: Block) -> tuple[int, int, int]:
        d_model, d_ff = getattr(experts[0], self.down).weight.shape
        return d_model, d_ff, len(experts)

    def sources(self, experts: Block, weight: str) -> list[tuple[nn.Module, str]]:
        return [(getattr(expert, name), "weight") for expert in experts for name in self._sources(weight)]

    def of_expert(self, read: Read, weight: str, expert: int) -> Tensor:
        names = [f"{expert}.{name}.weight" for name in self._sources(weight)]
        return torch.cat([read(name, None) for name in names]).t()

    def restore(self, weight: str, value_E: Tensor) -> Iterator[tuple[str, Tensor]]:
        names = self._sources(weight)
        for expert, value in enumerate(value_E):
            for name, part in zip(names, value.t().chunk(len(names)), strict=True):
                yield f"{expert}.{name}.weight", part.contiguous()

    def _sources(self, weight: str) -> tuple[str, ...]:
        return (self.gate, self.up) if weight == "w1" else (self.down,)


def stack_experts(layout: Layout, read: Read, weight: str, expert_ids: range) -> Tensor:
    """`weight` of some experts as `MoELayer` has it, [L, ...]."""
    own = None
    for local, expert in enumerate(expert_ids):
        one = layout.of_expert(read, weight, expert)
        own = one.new_empty(len(expert_ids), *one.shape) if own is None else own
        own[local].copy_(one)
    assert own is not None
    return own


@torch.no_grad()
def take_experts(layout: Layout, experts: Block, expert_ids: range) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights of some experts as parameters [L, ...] of `MoELayer`; `experts` loses its own.

    Each weight is freed before the next one is read: at most one weight of one block is in memory twice.
    """

    def read(name: str, row: int | None) -> Tensor:
        value = experts.get_parameter(name)
        return value if row is None else value[row]

    for weight in layout.weights:
        sources = layout.sources(experts, weight)
        trained = any(getattr(module, name).requires_grad for module, name in sources)
        own = stack_experts(layout, read, weight, expert_ids)
        for module, name in sources:
            delattr(module, name)
        yield weight, nn.Parameter(own, requires_grad=trained)
