"""Switch (top-1) and top-k gates with token-order priority: the partitionable, learned ones.

Switch: Fedus et al. 2022. Top-k: Shazeer et al. 2017, Mixtral (softmax after selection), and Qwen's
renormalized softmax; DeepSeek-V2 2024, section 2.2.2: group-limited selection, scaled weights.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.ops.moe.gates.base import Gate
from lancet_kernels.ops.moe.gates.group_limit import check_groups, check_scale, mask_other_groups
from lancet_kernels.ops.moe.gates.slots import top_k_stable


@dataclass(frozen=True)
class TopK(Gate):
    """The k largest logits of each token.

    softmax: "before" selection (weights are probabilities over all experts) or "after" (over the chosen).
    renormalize: divide the weights of a token by their sum. scale: multiply the weights by it.
    groups, top_groups: choose among the experts of a token's best groups, those with the largest logit.
    """

    name: ClassVar[str] = "topk"
    softmax: str = "before"
    renormalize: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    def check(self, num_experts: int, top_k: int) -> None:
        super().check(num_experts, top_k)
        check_name("softmax of gate topk", self.softmax, ("before", "after"))
        check_scale(self.name, self.scale)
        check_groups(self.name, self.groups, self.top_groups, num_experts, top_k)

    @property
    def normalized(self) -> bool:
        return self.renormalize or self.softmax == "after"

    def select(self, logits_TE, key_T, bias_E, num_experts: int, top_k: int) -> Tensor:
        return top_k_stable(mask_other_groups(logits_TE, self.groups, self.top_groups, 1), top_k)


@dataclass(frozen=True)
class Switch(Gate):
    """The largest logit of each token; its softmax probability is the weight."""

    name: ClassVar[str] = "switch"

    def check(self, num_experts: int, top_k: int) -> None:
        super().check(num_experts, top_k)
        if top_k != 1:
            raise UserError("top_k of gate switch", got=top_k, expected=1, do="use gate='topk' for more")

    def select(self, logits_TE, key_T, bias_E, num_experts: int, top_k: int) -> Tensor:
        return top_k_stable(logits_TE, 1)
