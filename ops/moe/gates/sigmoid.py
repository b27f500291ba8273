"""Sigmoid gate with group-limited selection and a correction bias (DeepSeek-V3, 2024, section 2.1.2).

Experts lie in `groups` groups of E / groups. A group's score is the sum of its two best biased scores;
only experts of the best `top_groups` groups can be chosen. The bias steers the selection alone; the
weights are the plain sigmoids. Slots go in token order, so the gate is partitionable.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lancet_kernels.ops.moe.gates.base import Gate
from lancet_kernels.ops.moe.gates.group_limit import check_groups, check_scale, mask_other_groups
from lancet_kernels.ops.moe.gates.slots import top_k_stable
from lancet_kernels.ops.moe.gates.weights import sigmoid


# By keyword: `scale`, a name of the base class too, would otherwise be the first positional argument.
@dataclass(frozen=True, kw_only=True)
class Sigmoid(Gate):
    """groups, top_groups: group-limited selection; renormalize: weights of a token sum to `scale`."""

    name: ClassVar[str] = "sigmoid"
    uses_correction_bias: ClassVar[bool] = True
    score: ClassVar[str] = "sigmoid"
    groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0

    @property
    def normalized(self) -> bool:
        return self.renormalize

    def check(self, num_experts: int, top_k: int) -> None:
        super().check(num_experts, top_k)
        check_scale(self.name, self.scale)
        check_groups(self.name, self.groups, self.top_groups, num_experts, top_k)

    def select(self, logits_TE, key_T, bias_E, num_experts: int, top_k: int) -> Tensor:
        score_TE = self.biased_scores(logits_TE, bias_E)
        return top_k_stable(mask_other_groups(score_TE, self.groups, self.top_groups, 2), top_k)

    @staticmethod
    def biased_scores(logits_TE: Tensor, bias_E: Tensor | None) -> Tensor:
        """What selection compares, [T, E]."""
        score_TE = sigmoid(logits_TE)
        return score_TE if bias_E is None else score_TE + bias_E.to(score_TE.dtype)
