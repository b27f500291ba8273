"""The interface of gates: the contract that every routing rule of this library keeps.

    T  tokens on this rank            K  choices per token
    E  experts in all                 C  capacity: most tokens this rank may send to one expert

A gate maps ``(logits[T, E], used[E])`` to ``(expert[T, K], slot[T, K], weight[T, K], used'[E])``.
``slot[t, k]`` is the row that choice takes in its expert's buffer; ``slot >= C`` means dropped.
``used`` counts the assignments that earlier parts of the same batch made, dropped ones included, so
that calling a *partitionable* gate part by part, passing ``used`` on, gives exactly the slots of one
call on the whole batch (Lancet, section 2.3: capacity passing).

A gate is a frozen dataclass; ``str(gate)`` is its spec, for example ``topk(renormalize=True)``, and
`lancet_kernels.ops.moe.gates.parse_gate` reads it back. Ops and checkpoints carry the spec, not the object.

Weights are made of scores (`Gate.weights`). Normalized scores are computed as the softmax of the log-scores,
which is the same and has no zero to divide by where all scores of a token underflow. The log-score of the
softmax is the logit itself (up to a constant that cancels), so "softmax after selection" is the normalized
case.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.moe.gates.slots import slots_in_token_order, top_k_stable


def sigmoid(logits: Tensor) -> Tensor:
    """1 / (1 + exp(-logits)), bitwise the same for equal logits at any position in the tensor.

    torch.sigmoid on a CPU is not: it uses another exp, which differs by an ulp, for the end of a tensor that
    does not fill a vector register. The routing of a part of a batch would then differ from that of the
    whole.
    """
    return 1 / (1 + torch.exp(-logits))


def scores(logits_TE: Tensor, score: str) -> Tensor:
    """softmax or sigmoid of the logits, [T, E]."""
    return torch.softmax(logits_TE, -1) if score == "softmax" else sigmoid(logits_TE)


def normalized_scores(logits_TN: Tensor, score: str) -> Tensor:
    """The scores divided by their sum over the last dimension; never NaN for finite logits."""
    log_TN = logits_TN if score == "softmax" else torch.nn.functional.logsigmoid(logits_TN)
    return torch.softmax(log_TN, -1)


@dataclass(frozen=True)
class Gate:
    """Base of all gates: largest logits, token-order priority, softmax weights; subclasses differ."""

    name: ClassVar[str]
    partitionable: ClassVar[bool] = True
    """Can it decide from part of a batch, given `used`?"""
    uses_logits: ClassVar[bool] = True
    """False: the routing is not learned, and the layer has no router weight."""
    uses_correction_bias: ClassVar[bool] = False
    """True: selection (not the weights) adds a per-expert bias kept by the layer."""
    key: ClassVar[str | None] = None
    """What `key_T` holds: "token" (token ids) or "index" (global token index); None: no key."""
    score: ClassVar[str] = "softmax"

    @property
    def normalized(self) -> bool:
        """Are the weights of a token's choices divided by their sum?"""
        return False

    @property
    def scale(self) -> float:
        """What the weights are multiplied by."""
        return 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, wanted = getattr(self, field.name), type(field.default)
            if type(value) is not wanted and not (wanted is float and type(value) is int):
                raise UserError(
                    f"{field.name} of gate {self.name}",
                    got=repr(value),
                    expected=f"{wanted.__name__}, such as {field.default!r}",
                    do="check the option",
                )

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{self.name}({','.join(changed)})" if changed else self.name

    def check(self, num_experts: int, top_k: int) -> None:
        """Raise UserError if this gate can't choose `top_k` of `num_experts`."""
        if not 1 <= top_k <= num_experts:
            raise UserError(
                "top_k",
                got=top_k,
                expected=f"1 to num_experts ({num_experts})",
                do="lower top_k or add experts",
            )

    def check_capacity_factor(self, capacity_factor: float | None) -> None:
        """Raise UserError if this gate can't work with the capacity factor (None: dropless)."""

    def num_choices(self, num_experts: int, top_k: int) -> int:
        """K of the outputs; top_k for every gate in which tokens choose."""
        return top_k

    def select(
        self,
        logits_TE: Tensor | None,
        key_T: Tensor | None,
        bias_E: Tensor | None,
        num_experts: int,
        top_k: int,
    ) -> Tensor:
        """-> expert_TK, int64: the experts of each token, all different, best first."""
        assert logits_TE is not None
        return top_k_stable(logits_TE, top_k)

    def assign_slots(
        self,
        logits_TE: Tensor | None,
        expert_TK: Tensor,
        used_E: Tensor,
        capacity: int,
        real_T1: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """-> slot_TK, used'_E (int64), in token order: (t, k) before (t, k + 1) before (t + 1, 0).

        Args: real_T1: bool, which tokens are no padding; None: all. Others get `NO_SLOT`.
        """
        return slots_in_token_order(expert_TK, used_E, real_T1)

    def weights(self, logits_TE: Tensor | None, expert_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """-> weight_TK: what each expert's output is multiplied with.

            s = softmax(logits) or sigmoid(logits)        [T, E]
            w = s[t, expert[t, k]]                        [T, K]
            w = w / sum_k w        (if normalized)
            w = w * scale

        In the dtype of the logits; without a router w = 1 / K, in `dtype`.
        """
        if logits_TE is None:
            return torch.full(expert_TK.shape, 1 / expert_TK.shape[1], dtype=dtype, device=expert_TK.device)
        if self.normalized:
            return normalized_scores(logits_TE.gather(1, expert_TK), self.score) * self.scale
        return scores(logits_TE, self.score).gather(1, expert_TK) * self.scale

    def weights_backward(self, grad_TK: Tensor, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
        """-> gradient of the logits, [T, E], given the gradient of the weights. Written out, because the gate
        is one op to autograd and to the planner."""
        grad_TK = grad_TK * self.scale
        grad_TE = logits_TE.new_zeros(logits_TE.shape)
        if self.normalized:
            # w = softmax(log s), so d log s = w * (dw - sum_k dw * w); for sigmoid, d log s / d logit = 1 - s
            chosen_TK = logits_TE.gather(1, expert_TK)
            weight_TK = normalized_scores(chosen_TK, self.score)
            grad_TK = weight_TK * (grad_TK - (grad_TK * weight_TK).sum(-1, keepdim=True))
            if self.score == "sigmoid":
                grad_TK = grad_TK * sigmoid(-chosen_TK)
            return grad_TE.scatter_add_(1, expert_TK, grad_TK)
        score_TE = scores(logits_TE, self.score)
        grad_TE.scatter_add_(1, expert_TK, grad_TK)
        if self.score == "softmax":
            return score_TE * (grad_TE - (grad_TE * score_TE).sum(-1, keepdim=True))
        return grad_TE * score_TE * (1 - score_TE)

    def probabilities(self, logits_TE: Tensor) -> Tensor:
        """-> [T, E], rows sum to 1: what the load-balance loss averages. Differentiable."""
        return normalized_scores(logits_TE, self.score)
