"""Expert choice (Zhou et al. 2022): every expert takes the C tokens that score highest with it.

A token may be chosen by any number of experts, so K = E: ``expert[t, e] = e`` for all, and the slot is < C if
the expert chose the token, and C (dropped) otherwise. An expert compares all tokens, so the gate is not
partitionable.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.moe.gates.base import Gate


@dataclass(frozen=True)
class ExpertChoice(Gate):
    """Each expert takes its C best tokens, by softmax probability over the experts."""

    name: ClassVar[str] = "expert-choice"
    partitionable: ClassVar[bool] = False

    def check_capacity_factor(self, capacity_factor: float | None) -> None:
        if capacity_factor is None:
            raise UserError(
                "capacity_factor of gate expert-choice",
                got=None,
                expected="a number",
                do="give one: it says how many tokens each expert takes",
            )

    def num_choices(self, num_experts: int, top_k: int) -> int:
        return num_experts

    def select(self, logits_TE, key_T, bias_E, num_experts: int, top_k: int) -> Tensor:
        return torch.arange(num_experts, device=logits_TE.device).repeat(logits_TE.shape[0], 1)

    def assign_slots(self, logits_TE, expert_TK, used_E, capacity: int) -> tuple[Tensor, Tensor]:
        num_tokens = logits_TE.shape[0]
        chosen = min(capacity, num_tokens)
        order_TE = torch.sort(torch.softmax(logits_TE, -1), dim=0, descending=True, stable=True).indices
        slot_TE = torch.full_like(expert_TK, capacity)
        rank_C1 = torch.arange(chosen, device=logits_TE.device)[:, None]
        slot_TE.scatter_(0, order_TE[:chosen], rank_C1.expand(chosen, used_E.numel()))
        return slot_TE, used_E + chosen
