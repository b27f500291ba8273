"""What a Mixture-of-Experts layer computes, once more and differently: whole arrays of one process, plain
torch, float64, no code of the library.

T  tokens      E  experts      K  choices per token      C  capacity      D  width      F  hidden width

Each rank's tokens are routed on their own (the capacity is per rank), through all experts of all ranks.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

MASK = 2**64 - 1


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
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def drawn(key: int, experts: int, top_k: int) -> list[int]:
    """The experts of a key: those with the largest signed 64-bit numbers."""
    token = splitmix(key & MASK)
    numbers = [splitmix((token + e) & MASK) for e in range(experts)]
    signed = [n - 2**64 if n >= 2**63 else n for n in numbers]
    return sorted(range(experts), key=lambda e: (-signed[e], e))[:top_k]


def _best(scores: list[float], top_k: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:top_k]


def _sigmoid_choice(scores: list[float], top_k: int, groups: int, top_groups: int) -> list[int]:
    size = len(scores) // groups
    of_group = [sum(sorted(scores[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    allowed = _best(of_group, top_groups)
    return _best([s if e // size in allowed else -math.inf for e, s in enumerate(scores)], top_k)


def choose(case: Case, logits: Tensor | None, keys: list[int]) -> list[tuple[int, int]]:
    """(token, expert) of every assignment of one rank, by falling priority."""
    tokens, K = range(case.tokens), case.top_k
    if logits is None:
        return [(t, e) for t in tokens for e in drawn(keys[t], case.experts, K)]
    rows = logits.tolist()
    if case.gate == "sigmoid":
        groups = case.options.get("groups", 1), case.options.get("top_groups", 1)
        scores = [[1 / (1 + math.exp(-value)) for value in row] for row in rows]
        return [(t, e) for t in tokens for e in _sigmoid_choice(scores[t], K, *groups)]
    probability = torch.softmax(logits, -1).tolist()
    if case.gate == "expert-choice":
        column = [[probability[t][e] for t in tokens] for e in range(case.experts)]
        return [
            (t, e) for e in range(case.experts) for t in _best(column[e], min(case.capacity, case.tokens))
        ]
    chosen = [_best(row, K) for row in rows]
    if case.gate in ("switch", "topk"):
        return [(t, e) for t in tokens for e in chosen[t]]
    order = list(tokens)
    if case.gate == "batch-prioritized":
        largest = case.options.get("importance", "max") == "max"
        importance = [sum(probability[t][e] for e in chosen[t][: 1 if largest else K]) for t in tokens]
        order = _best(importance, case.tokens)
    return [(t, chosen[t][k]) for k in range(K) for t in order]


def choice_weight(case: Case, logits: Tensor | None, t: int, e: int, chosen: list[int]) -> Tensor | float:
    """What expert e's output for token t is multiplied with; `chosen`: all experts of the token."""
    if logits is None:
        return 1 / case.top_k
    score = torch.sigmoid(logits[t]) if case.gate == "sigmoid" else torch.softmax(logits[t], 0)
    renormalized = {
        "gshard": True,
        "sigmoid": case.options.get("renormalize", True),
        "topk": case.options.get("renormalize", False) or case.options.get("softmax") == "after",
    }.get(case.gate, False)
    return score[e] / (score[chosen].sum() if renormalized else 1) * case.options.get("scale", 1.0)


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
        if case.gate == "hash":
            keys = ids_WT[rank].tolist()
        else:
            keys = [rank * case.tokens + t + case.step * 2**40 for t in range(case.tokens)]
        y, assigned, kept = _through_experts(case, parameters, x, choose(case, logits, keys), logits)
        if case.shared is not None:
            names = ("shared_up.weight", "shared_down.weight", "shared_up.bias", "shared_down.bias")
            up, down, up_bias, down_bias = (parameters.get(name) for name in names)
            y = y + feed_forward(x, up.T, down.T, up_bias, down_bias, case.activation)
        out["y"].append(y)
        out["assigned"].append(assigned)
        out["kept"].append(kept)
        if logits is not None:
            scores = torch.sigmoid(logits) if case.gate == "sigmoid" else logits.exp()
            out["probability"].append((scores / scores.sum(-1, keepdim=True)).mean(0))
            out["logsumexp2"].append(logits.exp().sum(-1).log().square().mean())
    return {key: torch.stack(values) for key, values in out.items() if values}


def _through_experts(case: Case, parameters, x: Tensor, assignments, logits) -> tuple[Tensor, Tensor, Tensor]:
    """-> y [T, D], assigned [E], kept [E] of one rank."""
    assigned = torch.zeros(case.experts, dtype=torch.int64)
    kept = torch.zeros(case.experts, dtype=torch.int64)
    tokens_of, weights_of = [[] for _ in range(case.experts)], [[] for _ in range(case.experts)]
    chosen = {t: [e for token, e in assignments if token == t] for t in range(case.tokens)}
    for t, e in assignments:
        assigned[e] += 1
        if kept[e] < case.capacity:
            kept[e] += 1
            tokens_of[e].append(t)
            weights_of[e].append(choice_weight(case, logits, t, e, chosen[t]))
    # An expert without tokens still has part in the result, with a zero gradient.
    y = torch.zeros_like(x) + 0 * sum(p.sum() for p in parameters.values())
    for e in range(case.experts):
        if tokens_of[e]:
            names = ("w1", "w2", "b1", "b2")
            expert = [parameters.get(f"experts.{e}.{name}") for name in names]
            weight = torch.stack([torch.as_tensor(w, dtype=x.dtype) for w in weights_of[e]])
            rows = weight[:, None] * feed_forward(x[tokens_of[e]], *expert, case.activation)
            y = y.index_add(0, torch.tensor(tokens_of[e]), rows)
    return y, assigned, kept


def forward_and_backward(case: Case) -> dict[str, Tensor]:
    """`forward` on the case's own parameters and tokens, with `dx` [W, T, D] and `grad.<parameter>`."""
    parameters = {name: p.requires_grad_() for name, p in make_parameters(case).items()}
    x, dy, ids = make_tokens(case)
    x.requires_grad_()
    out = forward(case, parameters, x, ids)
    (out["y"] * dy).sum().backward()
    gradients = {f"grad.{name}": p.grad for name, p in parameters.items()}
    return {key: value.detach() for key, value in out.items()} | {"dx": x.grad} | gradients
