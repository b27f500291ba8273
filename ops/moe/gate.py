"""The interface of gates: the contract that every routing rule of this library keeps.

    T  tokens on this rank            K  choices per token, N = T * K
    E  experts in all                 C  capacity: most tokens this rank may send to one expert

A gate maps ``(logits[T, E], used[E])`` to ``(expert[T, K], slot[T, K], weight[T, K], used'[E])``.
``slot[t, k]`` is the row that choice takes in its expert's buffer; ``slot >= C`` means dropped.
``used`` counts the assignments of earlier parts of the same batch, dropped ones included: a *partitionable*
gate that is called part by part gives exactly the slots of one call on the whole batch (Lancet, section 2.3:
capacity passing).

A gate is a frozen dataclass; ``str(gate)`` is its spec, for example ``topk(renormalize=True)``, which ops and
checkpoints carry, and `lancet_kernels.ops.moe.gates.parse_gate` reads back.

Normalized scores are the softmax of the log-scores, which has no zero to divide by where all scores of a
token underflow. The log-score of the softmax is the logit itself (up to a constant that cancels), so "softmax
after selection" is the normalized case.

`real`: which choices belong to tokens that are no padding; None: all. Padding gets `NO_SLOT` and counts for
no expert, as if the batch did not have it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lancet_kernels.errors import UserError

NO_SLOT = 2**31 - 1
"""The slot of a choice of padding: behind every capacity, so that it is dropped."""


def slots_in_order(expert_N: Tensor, used_E: Tensor, real_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Number the choices of each expert in the order given, starting after `used`.

    Example: expert = [2, 0, 2, 2], used = [5, 0, 1] -> slot = [1, 5, 2, 3], used' = [6, 0, 4].

    Args: expert_N, int64, choices by falling priority; used_E, int64; real_N, bool.
    Returns: slot_N and used'_E, int64. Slots may exceed the capacity: those are the dropped ones.
    """
    if real_N is not None:
        # The others choose an expert that does not exist.
        target_N = torch.where(real_N, expert_N, used_E.numel())
        slot_N, used_E1 = slots_in_order(target_N, torch.cat([used_E, used_E.new_zeros(1)]))
        return torch.where(real_N, slot_N, NO_SLOT), used_E1[:-1].contiguous()
    # Not bincount, for which the host waits for a GPU.
    count_E = torch.zeros_like(used_E).scatter_add_(0, expert_N, torch.ones_like(expert_N))
    first_E = count_E.cumsum(0) - count_E
    sorted_N, order_N = torch.sort(expert_N, stable=True)
    place_N = torch.arange(expert_N.numel(), device=expert_N.device)
    slot_N = place_N + (used_E - first_E)[sorted_N]
    return torch.empty_like(expert_N).scatter_(0, order_N, slot_N), used_E + count_E


def slots_in_token_order(
    expert_TK: Tensor, used_E: Tensor, real_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Earlier tokens first; of one token, its better choice first. -> slot_TK, used'_E.

    Args: real_TK: or [T, 1].
    """
    real_N = None if real_TK is None else real_TK.expand_as(expert_TK).reshape(-1)
    slot_N, used_E = slots_in_order(expert_TK.reshape(-1), used_E, real_N)
    return slot_N.view_as(expert_TK), used_E


def slots_in_choice_order(
    expert_TK: Tensor,
    used_E: Tensor,
    real_T1: Tensor | None = None,
    token_order_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """All first choices before any second choice; inside a choice by `token_order_T` (default: as they come).

    Args: real_T1, bool; token_order_T, int64: the tokens by falling priority.
    Returns: slot_TK, used'_E.
    """
    order_T = slice(None) if token_order_T is None else token_order_T
    real_N = None if real_T1 is None else real_T1[order_T].expand_as(expert_TK).T.reshape(-1)
    slot_KT, used_E = slots_in_order(expert_TK[order_T].T.reshape(-1), used_E, real_N)
    slot_TK = torch.empty_like(expert_TK)
    slot_TK[order_T] = slot_KT.view(expert_TK.shape[1], expert_TK.shape[0]).T
    return slot_TK, used_E


def top_k_stable(score_TE: Tensor, k: int) -> Tensor:
    """Indices of the k largest of each row, best first; of equal scores the lower index wins, NaN is largest.

    torch.topk leaves the order of ties open, and a tie that differs between two ranks or two parts is a
    different routing. So float32 is compared as integers in which the index is the lowest digit: no two are
    equal (0.6 of the time of a stable sort for 4096 tokens and 256 experts, 2-core CPU, 2026-11-24).
    """
    if k == 1:
        return score_TE.argmax(-1, keepdim=True)
    if score_TE.dtype != torch.float32:
        return torch.sort(score_TE, dim=-1, descending=True, stable=True).indices[..., :k].contiguous()
    experts = score_TE.shape[-1]
    bits_TE = score_TE.contiguous().view(torch.int32).long()
    magnitude_TE = bits_TE & 0x7FFFFFFF  # of a negative number: the largest is the smallest
    order_TE = torch.where(bits_TE < 0, -magnitude_TE, magnitude_TE)
    order_TE = order_TE.masked_fill(score_TE.isnan(), 0x7FFFFFFF)
    index_E = torch.arange(experts, device=score_TE.device)
    return (order_TE * experts - index_E).topk(k, dim=-1).indices


def sigmoid(logits: Tensor) -> Tensor:
    """1 / (1 + exp(-logits)), bitwise the same for equal logits at any position in the tensor.

    torch.sigmoid on a CPU is not: it uses another exp, which differs by an ulp, for the end of a tensor that
    does not fill a vector register. The routing of a part of a batch would then differ from that of the
    whole.
    """
    # Where exp overflows, the score is 0, but autograd would give 0 * inf. NaN logits and gradients stay NaN.
    overflows = logits <= -math.log(torch.finfo(logits.dtype).max)
    return 1 / (1 + torch.exp(-logits.masked_fill(overflows, -torch.inf)))


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
    """The content of `key_T`: "token" (token ids) or "index" (global token index); None: no key."""
    score: ClassVar[str] = "softmax"
    only_top_k: ClassVar[int | None] = None
    """The one top_k that it can choose; None: any."""

    @property
    def normalized(self) -> bool:
        """Are the weights of a token's choices divided by their sum?"""
        return False

    @property
    def scale(self) -> float:
        """The factor of the weights."""
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
        if self.only_top_k is not None and top_k != self.only_top_k:
            raise UserError(
                f"top_k of gate {self.name}",
                got=top_k,
                expected=self.only_top_k,
                do=f"set top_k={self.only_top_k}, or use gate='topk'",
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

    def checked(self, expert_TK: Tensor, num_experts: int, top_k: int) -> Tensor:
        """The result of `select`. Raises: UserError unless it is int64 [T, K]."""
        choices = self.num_choices(num_experts, top_k)
        if expert_TK.dtype != torch.int64 or expert_TK.shape[1:] != (choices,):
            raise UserError(
                f"select of gate {self.name}",
                got=f"{list(expert_TK.shape)} of {expert_TK.dtype}",
                expected=f"[tokens, {choices}] of torch.int64",
                do="return the experts of each token",
            )
        return expert_TK

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
