"""Gates that decide from the whole batch, and so are not partitionable: GShard's top-2, batch-prioritized
routing, expert choice."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.ops.moe.gates.base import NO_SLOT, Gate, slots_in_choice_order


@dataclass(frozen=True)
class GShard(Gate):
    """Top-2, all first choices before all second choices, weights normalized over the two (Lepikhin et al.
    2020, Algorithm 1).

    The second expert is always used (GShard's random dispatch of the second expert is left out: it would make
    the routing depend on a random stream).
    """

    name: ClassVar[str] = "gshard"
    partitionable: ClassVar[bool] = False
    normalized = True

    def check(self, num_experts: int, top_k: int) -> None:
        super().check(num_experts, top_k)
        if top_k != 2:
            raise UserError(
                "top_k of gate gshard", got=top_k, expected=2, do="set top_k=2, or use gate='topk'"
            )

    def assign_slots(self, logits_TE, expert_TK, used_E, capacity, real_T1=None) -> tuple[Tensor, Tensor]:
        return slots_in_choice_order(expert_TK, used_E, real_T1)


@dataclass(frozen=True)
class BatchPrioritized(Gate):
    """Top-k; slots by falling importance instead of by position, so that the least important tokens are
    dropped: first all first choices, then all second ones (V-MoE, Riquelme et al. 2021, section 3.4 and
    Algorithm 2).

    importance: "max" (largest probability) or "sum" (of the k chosen ones).
    """

    name: ClassVar[str] = "batch-prioritized"
    partitionable: ClassVar[bool] = False
    importance: str = "max"

    def check(self, num_experts: int, top_k: int) -> None:
        super().check(num_experts, top_k)
        check_name("importance of gate batch-prioritized", self.importance, ("max", "sum"))

    def assign_slots(self, logits_TE, expert_TK, used_E, capacity, real_T1=None) -> tuple[Tensor, Tensor]:
        chosen_TK = torch.softmax(logits_TE, -1).gather(1, expert_TK)
        importance_T = chosen_TK[:, 0] if self.importance == "max" else chosen_TK.sum(-1)
        order_T = torch.sort(importance_T, descending=True, stable=True).indices
        return slots_in_choice_order(expert_TK, used_E, real_T1, order_T)


@dataclass(frozen=True)
class ExpertChoice(Gate):
    """Each expert takes its C best tokens, by softmax probability over the experts (Zhou et al. 2022).

    A token may be chosen by any number of experts, so K = E: ``expert[t, e] = e`` for all, and the slot is
    < C if the expert chose the token, and C (dropped) otherwise.
    """

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

    def assign_slots(self, logits_TE, expert_TK, used_E, capacity, real_T1=None) -> tuple[Tensor, Tensor]:
        chosen = min(capacity, logits_TE.shape[0])
        score_TE = torch.softmax(logits_TE, -1)
        if real_T1 is not None:
            score_TE = score_TE.masked_fill(~real_T1, -1.0)  # behind all others
        order_TE = torch.sort(score_TE, dim=0, descending=True, stable=True).indices
        slot_TE = torch.full_like(expert_TK, capacity)
        rank_C1 = torch.arange(chosen, device=logits_TE.device)[:, None]
        slot_TE.scatter_(0, order_TE[:chosen], rank_C1.expand(chosen, used_E.numel()))
        if real_T1 is None:
            return slot_TE, used_E + chosen
        return torch.where(real_T1, slot_TE, NO_SLOT), used_E + real_T1.sum().clamp(max=chosen)
