"""GShard's top-2 gate: choice-order priority, weights normalized over the two (Lepikhin et al. 2020,
Algorithm 1).

Every first choice takes its slot before any second choice does, so a token's slot depends on the whole
batch: not partitionable. The second expert is always used (GShard's random dispatch of the second expert is
left out: it would make the routing depend on a random stream).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.gates.base import Gate
from lancet_kernels.ops.gates.slots import slots_in_choice_order, top_k_stable


@dataclass(frozen=True)
class GShard(Gate):
    """Top-2, all first choices before all second choices."""

    name: ClassVar[str] = "gshard"
    partitionable: ClassVar[bool] = False

    @property
    def normalized(self) -> bool:
        return True

    def check(self, num_experts: int, top_k: int) -> None:
        super().check(num_experts, top_k)
        if top_k != 2:
            raise UserError(
                "top_k of gate gshard", got=top_k, expected=2, do="set top_k=2, or use gate='topk'"
            )

    def select(self, logits_TE, key_T, bias_E, num_experts: int, top_k: int) -> Tensor:
        return top_k_stable(logits_TE, top_k)

    def assign_slots(self, logits_TE, expert_TK, used_E, capacity: int) -> tuple[Tensor, Tensor]:
        return slots_in_choice_order(expert_TK, used_E)


def naive_gshard(logits_TE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference in two passes over the tokens. -> expert_T2, slot_T2, weight_T2, used'_E."""
    num_tokens, num_experts = logits_TE.shape
    used = [0] * num_experts
    experts = torch.zeros(num_tokens, 2, dtype=torch.int64)
    slots = torch.zeros(num_tokens, 2, dtype=torch.int64)
    weights = torch.zeros(num_tokens, 2, dtype=logits_TE.dtype)
    for choice in (0, 1):
        for t in range(num_tokens):
            ranked = sorted(range(num_experts), key=lambda e: (-logits_TE[t, e].item(), e))
            e = ranked[choice]
            experts[t, choice] = e
            slots[t, choice] = used[e]
            used[e] += 1
            probability_E = torch.softmax(logits_TE[t], 0)
            weights[t, choice] = probability_E[e] / (probability_E[ranked[0]] + probability_E[ranked[1]])
    return experts, slots, weights, torch.tensor(used)
