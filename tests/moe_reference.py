"""What gates and a Mixture-of-Experts layer compute, once more and differently: in loops, whole arrays of one
process, plain torch. Only the names and options of gates, and their sigmoid, are the library's.

T  tokens      E  experts      K  choices per token      C  capacity      D  width      F  hidden width

Each rank's tokens are routed on their own (the capacity is per rank), through all experts of all ranks.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lancet_kernels.ops.moe.gate import Gate, sigmoid
from lancet_kernels.ops.moe.gates import BatchPrioritized, ExpertChoice, GShard, Sigmoid, parse_gate
from tests.ops.op_cases import Routing

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Case:
    """One layer and the tokens of each of its ranks."""

    gate: str = "switch"
    options: dict = field(default_factory=dict)
    top_k: int = 1
    capacity_factor: float | None = 1.25
    activation: str = "gelu"
    bias: bool = False
    shared: int | None = None
    ranks: int = 2
    experts: int = 4
    tokens: int = 24
    width: int = 6
    hidden: int = 10
    skewed: bool = False
    step: int = 0

    @property
    def spec(self) -> str:
        """The gate with its options, as MoELayer takes it."""
        return f"{self.gate}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"

    @property
    def capacity(self) -> int:
        """C of one rank."""
        if self.capacity_factor is None:
            return self.tokens
        return max(1, math.ceil(self.capacity_factor * self.tokens * self.top_k / self.experts))


def make_parameters(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """All parameters by the name they have in the layer's state_dict, experts of all ranks one by one."""
    generator = torch.Generator().manual_seed(case.experts * 100 + case.width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(0.5).to(dtype)

    wide = 2 if case.activation == "swiglu" else 1
    parameters = {}
    if case.gate not in ("hash", "random"):
        parameters["router"] = normal(case.experts, case.width)
    for e in range(case.experts):
        parameters[f"experts.{e}.w1"] = normal(case.width, wide * case.hidden)
        parameters[f"experts.{e}.w2"] = normal(case.hidden, case.width)
        if case.bias:
            parameters[f"experts.{e}.b1"] = normal(wide * case.hidden)
            parameters[f"experts.{e}.b2"] = normal(case.width)
    if case.shared is not None:
        parameters["shared_up.weight"] = normal(wide * case.shared, case.width)
        parameters["shared_down.weight"] = normal(case.width, case.shared)
        if case.bias:
            parameters["shared_up.bias"] = normal(wide * case.shared)
            parameters["shared_down.bias"] = normal(case.width)
    return parameters


def make_tokens(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x [W, T, D], the gradient that comes back [W, T, D], token ids [W, T]. Skewed: half of the experts, or
    more, are never the best of any token."""
    generator = torch.Generator().manual_seed(case.tokens + 7 * case.ranks)
    shape = (case.ranks, case.tokens, case.width)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if case.skewed and "router" in (parameters := make_parameters(case)):
        x = 0.3 * x + 2 * parameters["router"][: max(1, case.experts // 4)].mean(0)
    ids = torch.randint(0, 2 if case.skewed else 50, shape[:2], generator=generator)
    return x.to(dtype), torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype), ids


def splitmix(value: int) -> int:
    """The published generator (public domain, S. Vigna), in Python's integers."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def drawn(key: int, experts: int, top_k: int) -> list[int]:
    """The experts of a key: those with the largest signed 64-bit numbers."""
    token = splitmix(key & MASK)
    numbers = [splitmix((token + e) & MASK) for e in range(experts)]
    signed = [n - 2**64 if n >= 2**63 else n for n in numbers]
    return sorted(range(experts), key=lambda e: (-signed[e], e))[:top_k]


def naive_choice(
    gate: Gate, logits_E: Tensor | None, key: int, bias_E: Tensor, top_k: int
) -> tuple[list[int], Tensor]:
    """The experts of a token, best first and of equal ones the lower, and their weights [K]."""
    if logits_E is None:
        return drawn(key + gate.seed * GOLDEN, len(bias_E), top_k), torch.full((top_k,), 1 / top_k)
    by_sigmoid = isinstance(gate, Sigmoid)
    score_E = sigmoid(logits_E) if by_sigmoid else torch.softmax(logits_E, 0)
    ranked_E = score_E + bias_E.to(score_E.dtype) if by_sigmoid else logits_E
    groups, size = getattr(gate, "groups", 1), len(logits_E) // getattr(gate, "groups", 1)
    of_group = [g.sort().values[-2:].sum() if by_sigmoid else g.max() for g in ranked_E.split(size)]
    allowed = sorted(range(groups), key=lambda g: (-of_group[g].item(), g))[: getattr(gate, "top_groups", 1)]
    candidates = [e for e in range(len(logits_E)) if e // size in allowed]
    chosen = sorted(candidates, key=lambda e: (-ranked_E[e].item(), e))[:top_k]
    after = getattr(gate, "softmax", "before") == "after"
    weight_K = torch.softmax(logits_E[chosen], 0) if after else score_E[chosen]
    if isinstance(gate, GShard) or getattr(gate, "renormalize", False):
        weight_K = weight_K / weight_K.sum()
    return chosen, weight_K * getattr(gate, "scale", 1.0)


def naive_gate(
    gate: Gate,
    logits_TE: Tensor | None,
    key_T: Tensor | None,
    used_E: Tensor,
    bias_E: Tensor,
    top_k: int,
    capacity: int,
) -> Routing:
    """Slots token by token; where choices have priority (GShard, batch-prioritized), choice by choice."""
    if isinstance(gate, ExpertChoice):
        return naive_expert_choice(logits_TE, capacity)
    rows = [None] * len(key_T) if logits_TE is None else logits_TE
    keys = [0] * len(rows) if key_T is None else key_T.tolist()
    choices = [naive_choice(gate, row, key, bias_E, top_k) for row, key in zip(rows, keys, strict=True)]
    if not choices:
        nothing, dtype = used_E.new_zeros(0, top_k), torch.float32 if logits_TE is None else logits_TE.dtype
        return Routing(nothing, nothing, nothing.to(dtype), used_E)
    experts, weight_TK = [chosen for chosen, _ in choices], torch.stack([weight_K for _, weight_K in choices])
    tokens, used = list(range(len(choices))), used_E.tolist()
    if isinstance(gate, BatchPrioritized):
        importance_T = (weight_TK.amax(1) if gate.importance == "max" else weight_TK.sum(1)).tolist()
        tokens.sort(key=lambda t: (-importance_T[t], t))
    if isinstance(gate, GShard | BatchPrioritized):
        order = [(t, k) for k in range(top_k) for t in tokens]
    else:
        order = [(t, k) for t in tokens for k in range(top_k)]
    slot_TK = used_E.new_zeros(len(tokens), top_k)
    for t, k in order:
        slot_TK[t, k] = used[experts[t][k]]
        used[experts[t][k]] += 1
    return Routing(torch.tensor(experts), slot_TK, weight_TK, torch.tensor(used))


def naive_expert_choice(logits_TE: Tensor, capacity: int) -> Routing:
    """One expert after the other."""
    num_tokens, num_experts = logits_TE.shape
    probability_TE = torch.softmax(logits_TE, -1)
    slot_TE = torch.full((num_tokens, num_experts), capacity)
    for e, probability_T in enumerate(probability_TE.T.tolist()):
        best = sorted(range(num_tokens), key=lambda t: (-probability_T[t], t))[:capacity]
        slot_TE[best, e] = torch.arange(len(best))
    expert_TE = torch.arange(num_experts).repeat(num_tokens, 1)
    return Routing(expert_TE, slot_TE, probability_TE, torch.full((num_experts,), min(capacity, num_tokens)))


def feed_forward(x: Tensor, up: Tensor, down: Tensor, up_bias, down_bias, activation: str) -> Tensor:
    """One expert: [T, D] -> [T, D]."""
    hidden = x @ up if up_bias is None else x @ up + up_bias
    if activation == "gelu":
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    elif activation == "silu":
        hidden = hidden * torch.sigmoid(hidden)
    else:
        gate, value = hidden.split(hidden.shape[-1] // 2, -1)
        hidden = gate * torch.sigmoid(gate) * value
    return hidden @ down if down_bias is None else hidden @ down + down_bias


def forward(case: Case, parameters: dict[str, Tensor], x_WTD: Tensor, ids_WT: Tensor) -> dict[str, Tensor]:
    """-> y [W, T, D], assigned [W, E], kept [W, E], probability [W, E] (mean), logsumexp2 [W] (mean)."""
    out = {key: [] for key in ("y", "assigned", "kept", "probability", "logsumexp2")}
    for rank, x in enumerate(x_WTD):
        logits = x @ parameters["router"].T if "router" in parameters else None
        index_T = rank * case.tokens + torch.arange(case.tokens) + case.step * 2**40
        key_T = ids_WT[rank] if case.gate == "hash" else index_T
        nothing_E = torch.zeros(case.experts, dtype=torch.int64)
        routing = naive_gate(
            parse_gate(case.spec), logits, key_T, nothing_E, nothing_E, case.top_k, case.capacity
        )
        kept_TK = routing.slot_TK < case.capacity
        y = torch.zeros_like(x)
        for e in range(case.experts):
            token, choice = ((routing.expert_TK == e) & kept_TK).nonzero(as_tuple=True)
            expert = [parameters.get(f"experts.{e}.{name}") for name in ("w1", "w2", "b1", "b2")]
            rows = routing.weight_TK[token, choice, None] * feed_forward(x[token], *expert, case.activation)
            y = y.index_add(0, token, rows.to(y.dtype))
        if case.shared is not None:
            names = ("shared_up.weight", "shared_down.weight", "shared_up.bias", "shared_down.bias")
            up, down, up_bias, down_bias = (parameters.get(name) for name in names)
            y = y + feed_forward(x, up.T, down.T, up_bias, down_bias, case.activation)
        out["y"].append(y)
        out["assigned"].append(routing.used_E)
        out["kept"].append(routing.expert_TK[kept_TK].bincount(minlength=case.experts))
        if logits is not None:
            scores = torch.sigmoid(logits) if case.gate == "sigmoid" else logits.exp()
            out["probability"].append((scores / scores.sum(-1, keepdim=True)).mean(0))
            out["logsumexp2"].append(logits.exp().sum(-1).log().square().mean())
    return {key: torch.stack(values) for key, values in out.items() if values}


def forward_and_backward(case: Case) -> dict[str, Tensor]:
    """`forward` on the case's own parameters and tokens, with `dx` [W, T, D] and `grad.<parameter>`."""
    parameters = {name: p.requires_grad_() for name, p in make_parameters(case).items()}
    x, dy, ids = make_tokens(case)
    x.requires_grad_()
    out = forward(case, parameters, x, ids)
    (out["y"] * dy).sum().backward()
    gradients = {f"grad.{name}": p.grad for name, p in parameters.items()}
    return {key: value.detach() for key, value in out.items()} | {"dx": x.grad} | gradients
