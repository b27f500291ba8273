"""Batch-prioritized routing (V-MoE, Riquelme et al. 2021, section 3.4 and Algorithm 2).

Tokens take their slots by falling importance instead of by position, so that the least important are
dropped: first all first choices by importance, then all second ones. Needs the whole batch: not
partitionable.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.gates.base import Gate
from lancet_kernels.ops.gates.slots import slots_in_choice_order, top_k_stable


@dataclass(frozen=True)
class BatchPrioritized(Gate):
    """Top-k; slots by importance. importance: "max" (largest probability) or "sum" (of the k chosen ones)."""

    name: ClassVar[str] = "batch-prioritized"
    partitionable: ClassVar[bool] = False
    importance: str = "max"

    def check(self, num_experts: int, top_k: int) -> None:
        super().check(num_experts, top_k)
        if self.importance not in ("max", "sum"):
            raise UserError(
                "importance of gate batch-prioritized",
                got=repr(self.importance),
                expected="'max' or 'sum'",
                do="choose how tokens are ranked",
            )

    def select(self, logits_TE, key_T, bias_E, num_experts: int, top_k: int) -> Tensor:
        return top_k_stable(logits_TE, top_k)

    def assign_slots(self, logits_TE, expert_TK, used_E, capacity: int) -> tuple[Tensor, Tensor]:
        chosen_TK = torch.softmax(logits_TE, -1).gather(1, expert_TK)
        importance_T = chosen_TK[:, 0] if self.importance == "max" else chosen_TK.sum(-1)
        order_T = torch.sort(importance_T, descending=True, stable=True).indices
        return slots_in_choice_order(expert_TK, used_E, order_T)


def naive_batch_prioritized(
    logits_TE: Tensor, top_k: int, importance: str = "max"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference: loops as in the paper's Algorithm 2. -> expert_TK, slot_TK, weight_TK, used'_E."""
    num_tokens, num_experts = logits_TE.shape
    probability_TE = torch.softmax(logits_TE, -1)
    ranked = [
        sorted(range(num_experts), key=lambda e: (-logits_TE[t, e].item(), e))[:top_k]
        for t in range(num_tokens)
    ]
    chosen_TK = torch.stack([probability_TE[t, ranked[t]] for t in range(num_tokens)])
    importance_T = (chosen_TK.max(-1).values if importance == "max" else chosen_TK.sum(-1)).tolist()
    used = [0] * num_experts
    slot_TK = torch.zeros(num_tokens, top_k, dtype=torch.int64)
    for k in range(top_k):
        for t in sorted(range(num_tokens), key=lambda t: (-importance_T[t], t)):
            slot_TK[t, k] = used[ranked[t][k]]
            used[ranked[t][k]] += 1
    return torch.tensor(ranked), slot_TK, chosen_TK, torch.tensor(used)
