"""Experts in checkpoints: each is stored under its global id, independent of the ranks that save and load it.

parameters of a rank        w1 [L, D, F]            L experts, stacked for the grouped GEMM
state_dict                  experts.7.w1 [D, F]     a view of one of them

`expert_states` does the same for optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import nn


class ExpertsByGlobalId(nn.Module):
    """A module that holds the experts `expert_ids()` of `num_experts` in parameters [L, ...]."""

    layers: ClassVar[WeakSet[ExpertsByGlobalId]] = WeakSet()
    """All that there are in this process."""
    rank: int
    num_experts: int
    local_experts: int
    expert_group: str

    def __init__(self) -> None:
        super().__init__()
        self.layers.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As a copy."""
        super().__setstate__(state)
        self.layers.add(self)

    @property
    def experts(self) -> _Experts:
        """The experts of this rank by their names in checkpoints: `experts.7.w1`, where 7 is an attribute.

        torch.distributed.checkpoint.state_dict looks for attributes of these names.
        """
        return _Experts(self)

    def expert_names(self) -> Iterator[str]:
        """Names of the parameters [L, ...] that hold the experts of this rank."""
        return (name for name in ("w1", "b1", "w2", "b2") if getattr(self, name) is not None)

    def expert_ids(self) -> range:
        """Global ids of the experts on this rank."""
        return range(self.rank * self.local_experts, (self.rank + 1) * self.local_experts)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.expert_names():
            stacked = destination.pop(prefix + name)
            for local, expert in enumerate(self.expert_ids()):
                destination[f"{prefix}experts.{expert}.{name}"] = stacked[local]

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        not_stacked = []
        for name in self.expert_names():
            keys = [f"{prefix}experts.{expert}.{name}" for expert in self.expert_ids()]
            if all(key in state_dict for key in keys):
                state_dict[prefix + name] = torch.stack([state_dict.pop(key) for key in keys])
            elif prefix + name not in state_dict:
                not_stacked.append(prefix + name)
                missing_keys += [key for key in keys if key not in state_dict]
                # Known, so not unexpected; an incomplete parameter stays as it is.
                for key in keys:
                    state_dict.pop(key, None)
        # A full checkpoint also has the other ranks' experts: not ours to load, not unexpected either.
        for key in [k for k in state_dict if k.startswith(prefix + "experts.")]:
            expert = key.removeprefix(prefix + "experts.").split(".")[0]
            if expert.isdigit() and int(expert) < self.num_experts and int(expert) not in self.expert_ids():
                del state_dict[key]
        own_missing: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, own_missing, unexpected_keys, error_msgs
        )
        # Under their global names they are told already.
        missing_keys += [key for key in own_missing if key not in not_stacked]


class _Experts:
    def __init__(self, layer: ExpertsByGlobalId) -> None:
        self._layer = layer

    def __getattr__(self, expert: str) -> SimpleNamespace:
        ids = self._layer.expert_ids()
        if not expert.isdigit() or int(expert) not in ids:
            raise AttributeError(f"expert {expert}: this rank has {ids.start} to {ids.stop - 1}")
        place = ids.index(int(expert))
        return SimpleNamespace(
            **{name: getattr(self._layer, name)[place] for name in self._layer.expert_names()}
        )
