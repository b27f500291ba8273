"""The gates by name, and how a gate's spec is read.

Partitionable are those that decide token by token, with token-order priority: not GShard's top-2,
batch-prioritized routing and expert choice.

Switch: Fedus et al. 2022. Top-k: Shazeer et al. 2017, Mixtral (softmax after selection), and Qwen's
renormalized softmax. Sigmoid: DeepSeek-V3 (2024, section 2.1.2), with a correction bias.

Group-limited selection: a token chooses among the experts of its best `top_groups` of `groups` equal groups,
of S = E / groups experts each. DeepSeek-V2 (2024, section 2.2.2) rates a group by its best expert,
DeepSeek-V3 by the sum of its two best.

Hash and random gates compute routing from a key. Each (key, expert) pair gets a 64-bit number from a counter
(`ops.random`), and a token goes to the k experts with the largest numbers, however the batch was cut. Hash
(Roller et al. 2021) keys by token id: a token of the vocabulary always meets the same experts. Random (Zuo et
al. 2022, Chen et al. 2023) keys by the global index of the token in the step's batch, mixed with the step.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.ops.moe.gate import NO_SLOT, Gate, sigmoid, slots_in_choice_order, top_k_stable
from lancet_kernels.ops.random import GOLDEN, signed, splitmix64


@dataclass(frozen=True)
class Switch(Gate):
    """The largest logit of each token; its softmax probability is the weight."""

    name: ClassVar[str] = "switch"
    only_top_k: ClassVar[int | None] = 1


class _GroupLimited(Gate):
    """Among the experts of a token's best groups, with scaled weights."""

    groups: int
    top_groups: int
    best: ClassVar[int]
    """A group is rated by the sum of the scores of so many of its experts."""

    def check(self, num_experts: int, top_k: int) -> None:
        super().check(num_experts, top_k)
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise UserError(
                f"scale of gate {self.name}",
                got=self.scale,
                expected="a positive number",
                do="leave it out for weights that are not scaled",
            )
        if self.groups < 1 or num_experts % self.groups:
            raise UserError(
                f"groups of gate {self.name}",
                got=self.groups,
                expected=f"a divisor of num_experts ({num_experts})",
                do="choose how many equal groups the experts form",
            )
        reachable = self.top_groups * (num_experts // self.groups)
        if not 1 <= self.top_groups <= self.groups or top_k > reachable:
            raise UserError(
                f"top_groups of gate {self.name}",
                got=self.top_groups,
                expected=f"1 to groups ({self.groups}) with at least top_k ({top_k}) experts in them",
                do="raise top_groups or lower top_k",
            )

    def select(self, logits_TE, key_T, bias_E, num_experts: int, top_k: int) -> Tensor:
        score_TE = self.selection_scores(logits_TE, bias_E)
        if self.top_groups < self.groups:
            size = num_experts // self.groups
            rated_TGS = score_TE.view(-1, self.groups, size)
            group_TG = rated_TGS.topk(min(self.best, size), dim=-1).values.sum(-1)
            allowed_TG = torch.zeros_like(group_TG, dtype=torch.bool)
            allowed_TG.scatter_(1, top_k_stable(group_TG, self.top_groups), True)
            score_TE = score_TE.masked_fill(~allowed_TG.repeat_interleave(size, dim=1), -torch.inf)
        return top_k_stable(score_TE, top_k)

    def selection_scores(self, logits_TE: Tensor, bias_E: Tensor | None) -> Tensor:
        """The scores for selection, [T, E]."""
        return logits_TE


@dataclass(frozen=True)
class TopK(_GroupLimited):
    """The k largest logits of each token.

    softmax: "before" selection (weights are probabilities over all experts) or "after" (over the chosen).
    renormalize: divide the weights of a token by their sum. scale: multiply the weights by it.
    groups, top_groups: choose among the experts of a token's best groups, those with the largest logit.
    """

    name: ClassVar[str] = "topk"
    best: ClassVar[int] = 1
    softmax: str = "before"
    renormalize: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    def check(self, num_experts: int, top_k: int) -> None:
        super().check(num_experts, top_k)
        check_name("softmax of gate topk", self.softmax, ("before", "after"))

    @property
    def normalized(self) -> bool:
        return self.renormalize or self.softmax == "after"


# By keyword: `scale`, a name of the base class too, would otherwise be the first positional argument.
@dataclass(frozen=True, kw_only=True)
class Sigmoid(_GroupLimited):
    """groups, top_groups: group-limited selection; renormalize: weights of a token sum to `scale`.

    The correction bias steers the selection alone; the weights are the plain sigmoids.
    """

    name: ClassVar[str] = "sigmoid"
    best: ClassVar[int] = 2
    uses_correction_bias: ClassVar[bool] = True
    score: ClassVar[str] = "sigmoid"
    groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0

    @property
    def normalized(self) -> bool:
        return self.renormalize

    def selection_scores(self, logits_TE: Tensor, bias_E: Tensor | None) -> Tensor:
        score_TE = sigmoid(logits_TE)
        return score_TE if bias_E is None else score_TE + bias_E.to(score_TE.dtype)


@dataclass(frozen=True)
class _Counter(Gate):
    uses_logits: ClassVar[bool] = False
    seed: int = 0

    def select(self, logits_TE, key_T, bias_E, num_experts: int, top_k: int) -> Tensor:
        token_T1 = splitmix64(key_T + signed(self.seed * GOLDEN))[:, None]
        number_TE = splitmix64(token_T1 + torch.arange(num_experts, device=key_T.device))
        return top_k_stable(number_TE, top_k)


@dataclass(frozen=True)
class Hash(_Counter):
    """Fixed experts for every token id. seed: which fixed assignment."""

    name: ClassVar[str] = "hash"
    key: ClassVar[str] = "token"


@dataclass(frozen=True)
class Random(_Counter):
    """Random experts for every token of every step. seed: which random assignment."""

    name: ClassVar[str] = "random"
    key: ClassVar[str] = "index"


@dataclass(frozen=True)
class GShard(Gate):
    """Top-2, all first choices before all second choices, weights normalized over the two (Lepikhin et al.
    2020, Algorithm 1).

    The second expert is always used (GShard's random dispatch of the second expert is left out: it would make
    the routing depend on a random stream).
    """

    name: ClassVar[str] = "gshard"
    partitionable: ClassVar[bool] = False
    only_top_k: ClassVar[int | None] = 2
    normalized = True

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


GATES: dict[str, type[Gate]] = {
    gate.name: gate for gate in (Switch, TopK, GShard, BatchPrioritized, ExpertChoice, Hash, Random, Sigmoid)
}


def parse_gate(spec: str) -> Gate:
    """Read a gate from its spec: a name, or a name with options, as `topk(softmax='after')`.

    Raises: UserError for an unknown name, an unknown option, a value that is no literal or of the wrong type.
    """
    name = spec.partition("(")[0].strip()
    check_name("gate", name, GATES)
    gate: Any = GATES[name]
    return _parsed(spec, name, gate)


@lru_cache
def _parsed(spec: str, name: str, gate: type[Gate]) -> Gate:
    """By class, too: a notebook may define a gate anew."""
    _, bracket, rest = spec.partition("(")
    if not bracket:
        return gate()
    if ")" not in rest:
        raise UserError(
            f"options of gate {name}",
            got=repr(spec),
            expected="a closing bracket",
            do=f"write {name}, or {name}(option=value)",
        )
    try:
        call = ast.parse(f"gate({rest}", mode="eval").body
        if not isinstance(call, ast.Call):
            raise TypeError("not one pair of parentheses")
        options = {k.arg: _value(gate, k) for k in call.keywords if k.arg is not None}
        if call.args or len(options) < len(call.keywords):
            raise TypeError("options are given by name, each once")
        return gate(**options)
    except UserError:
        raise
    except (SyntaxError, ValueError, TypeError, AttributeError) as error:
        fields = ", ".join(field.name for field in dataclasses.fields(gate)) or "none"
        raise UserError(
            f"options of gate {name}",
            got=repr(spec),
            expected=f"name=value pairs of: {fields}",
            do=f"write them as {name}(option=value)",
        ) from error


def _value(gate: type[Gate], option: ast.keyword) -> object:
    """The value of an option as it was written. Raises: UserError if it is no Python literal."""
    defaults = {field.name: field.default for field in dataclasses.fields(gate)}
    if option.arg not in defaults:
        raise TypeError(f"no option {option.arg}")
    try:
        return ast.literal_eval(option.value)
    except (ValueError, TypeError) as error:
        default = defaults[option.arg]
        raise UserError(
            f"{option.arg} of gate {gate.name}",
            got=ast.unparse(option.value),
            expected="text in quotes" if isinstance(default, str) else "a Python literal",
            do=f"write {gate.name}({option.arg}={default!r}), say",
        ) from error
