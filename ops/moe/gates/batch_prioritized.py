"""Batch-prioritized routing (V-MoE, Riquelme et al. 2021, section 3.4 and Algorithm 2).

Tokens take their slots by falling importance instead of by position, so that the least important are
dropped: first all first choices by importance, then all second ones. Needs the whole batch: not
partitionable.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lancet_kernels.errors import check_name
from lancet_kernels.ops.moe.gates.base import Gate
from lancet_kernels.ops.moe.gates.slots import slots_in_choice_order, top_k_stable


@dataclass(frozen=True)
class BatchPrioritized(Gate):
    """Top-k; slots by importance. importance: "max" (largest probability) or "sum" (of the k chosen ones)."""

    name: ClassVar[str] = "batch-prioritized"
    partitionable: ClassVar[bool] = False
    importance: str = "max"

    def check(self, num_experts: int, top_k: int) -> None:
        super().check(num_experts, top_k)
        check_name("importance of gate batch-prioritized", self.importance, ("max", "sum"))

    def select(self, logits_TE, key_T, bias_E, num_experts: int, top_k: int) -> Tensor:
        return top_k_stable(logits_TE, top_k)

    def assign_slots(self, logits_TE, expert_TK, used_E, capacity: int) -> tuple[Tensor, Tensor]:
        chosen_TK = torch.softmax(logits_TE, -1).gather(1, expert_TK)
        importance_T = chosen_TK[:, 0] if self.importance == "max" else chosen_TK.sum(-1)
        order_T = torch.sort(importance_T, descending=True, stable=True).indices
        return slots_in_choice_order(expert_TK, used_E, order_T)
