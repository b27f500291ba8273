"""Sigmoid gate with group-limited selection and a correction bias (DeepSeek-V3, 2024, section 2.1.2).

Experts lie in `groups` groups of E / groups. A group's score is the sum of its two best biased scores;
only experts of the best `top_groups` groups can be chosen. The bias steers the selection alone; the
weights are the plain sigmoids. Slots go in token order, so the gate is partitionable.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.gates.base import Gate
from lancet_kernels.ops.gates.slots import top_k_stable
from lancet_kernels.ops.gates.weights import sigmoid


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
        if self.groups < 1 or num_experts % self.groups:
            raise UserError(
                "groups of gate sigmoid",
                got=self.groups,
                expected=f"a divisor of num_experts ({num_experts})",
                do="choose how many equal groups the experts form",
            )
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise UserError(
                "scale of gate sigmoid",
                got=self.scale,
                expected="a positive number",
                do="leave it out for weights that sum to 1",
            )
        reachable = self.top_groups * (num_experts // self.groups)
        if not 1 <= self.top_groups <= self.groups or top_k > reachable:
            raise UserError(
                "top_groups of gate sigmoid",
                got=self.top_groups,
                expected=f"1 to groups ({self.groups}) with at least top_k ({top_k}) experts in them",
                do="raise top_groups or lower top_k",
            )

    def select(self, logits_TE, key_T, bias_E, num_experts: int, top_k: int) -> Tensor:
        score_TE = self.biased_scores(logits_TE, bias_E)
        if self.top_groups < self.groups:
            score_TE = score_TE.masked_fill(~self._allowed(score_TE, num_experts), -torch.inf)
        return top_k_stable(score_TE, top_k)

    @staticmethod
    def biased_scores(logits_TE: Tensor, bias_E: Tensor | None) -> Tensor:
        """What selection compares, [T, E]."""
        score_TE = sigmoid(logits_TE)
        return score_TE if bias_E is None else score_TE + bias_E.to(score_TE.dtype)

    def _allowed(self, score_TE: Tensor, num_experts: int) -> Tensor:
        """-> [T, E] bool: is the expert in one of the token's best groups?"""
        size = num_experts // self.groups
        score_TGS = score_TE.view(-1, self.groups, size)
        group_TG = score_TGS.topk(min(2, size), dim=-1).values.sum(-1)
        allowed_TG = torch.zeros_like(group_TG, dtype=torch.bool)
        allowed_TG.scatter_(1, top_k_stable(group_TG, self.top_groups), True)
        return allowed_TG.repeat_interleave(size, dim=1)


def naive_sigmoid(
    logits_TE: Tensor, used_E: Tensor, bias_E: Tensor, top_k: int, gate: Sigmoid
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference, one token after the other. -> expert_TK, slot_TK, weight_TK, used'_E."""
    num_experts = logits_TE.shape[1]
    size = num_experts // gate.groups
    used = used_E.tolist()
    experts: list[list[int]] = []
    slots: list[list[int]] = []
    weights: list[Tensor] = []
    for logits_E in logits_TE:
        biased_E = sigmoid(logits_E) + bias_E.to(logits_E.dtype)
        best = [group.sort().values[-2:] for group in biased_E.split(size)]
        group_score, biased = [two.sum().item() for two in best], biased_E.tolist()
        groups = sorted(range(gate.groups), key=lambda g: (-group_score[g], g))[: gate.top_groups]
        candidates = [e for e in range(num_experts) if e // size in groups]
        chosen = sorted(candidates, key=lambda e: (-biased[e], e))[:top_k]
        weight_K = sigmoid(logits_E[chosen])
        weights.append((weight_K / weight_K.sum() if gate.renormalize else weight_K) * gate.scale)
        experts.append(chosen)
        slots.append([])
        for e in chosen:
            slots[-1].append(used[e])
            used[e] += 1
    return torch.tensor(experts), torch.tensor(slots), torch.stack(weights), torch.tensor(used)
