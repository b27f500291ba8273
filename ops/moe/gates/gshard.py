"""GShard's top-2 gate: choice-order priority, weights normalized over the two (Lepikhin et al. 2020,
Algorithm 1).

Every first choice takes its slot before any second choice does, so a token's slot depends on the whole
batch: not partitionable. The second expert is always used (GShard's random dispatch of the second expert is
left out: it would make the routing depend on a random stream).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.moe.gates.base import Gate
from lancet_kernels.ops.moe.gates.slots import slots_in_choice_order, top_k_stable


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
