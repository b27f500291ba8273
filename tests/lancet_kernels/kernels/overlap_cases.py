"""Passes through the fused experts: data that any rank can recompute, and the float64 reference.

W  ranks, L experts on each    T  tokens per rank    K  choices    C  capacity    D, F  widths
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lancet_kernels.kernels.overlap import Experts, Routing
from lancet_kernels.ops.expert_activation import activate, input_width
from lancet_kernels.ops.gates.slots import slots_in_token_order


@dataclass(frozen=True)
class Case:
    """Sizes of a pass and how its tokens choose: "random", "one" (all to expert 0), "few" (half empty)."""

    world: int = 2
    local: int = 2
    tokens: int = 13
    choices: int = 2
    capacity: int = 9
    width: int = 24
    hidden: int = 20
    activation: str = "gelu"
    bias: bool = True
    choose: str = "random"
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def experts(self) -> int:
        return self.world * self.local

    def __str__(self) -> str:
        sizes = f"W{self.world}L{self.local}T{self.tokens}K{self.choices}C{self.capacity}"
        return f"{sizes}D{self.width}F{self.hidden}-{self.activation}-{self.choose}-{str(self.dtype)[6:]}"


def _normal(case: Case, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * case.seed + seed)
    return (torch.randn(*shape, generator=generator) * 0.5).to(case.dtype)


def experts_of(case: Case, rank: int) -> Experts:
    """The experts of a rank; an expert's values depend on its global number alone."""
    wide = input_width(case.activation, case.hidden)
    numbers = range(rank * case.local, (rank + 1) * case.local)
    w1 = torch.stack([_normal(case, case.width, wide, seed=10 + e) for e in numbers])
    w2 = torch.stack([_normal(case, case.hidden, case.width, seed=200 + e) for e in numbers])
    b1 = torch.stack([_normal(case, wide, seed=400 + e) for e in numbers]) if case.bias else None
    b2 = torch.stack([_normal(case, case.width, seed=600 + e) for e in numbers]) if case.bias else None
    return Experts(w1, b1, w2, b2, case.activation)


def tokens_of(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """x and the gradient of the output, [T, D] each."""
    x = _normal(case, case.tokens, case.width, seed=800 + rank)
    return x, _normal(case, case.tokens, case.width, seed=900 + rank)


def routing_of(case: Case, rank: int) -> Routing:
    generator = torch.Generator().manual_seed(77 + 1000 * case.seed + rank)
    shape = case.tokens, case.choices
    score = torch.rand(case.tokens, case.experts, generator=generator)
    if case.choose == "few":
        score[:, ::2] -= 2
    expert = score.topk(case.choices).indices if case.choices <= case.experts else None
    if case.choose == "one":
        expert = torch.arange(case.choices).expand(shape).contiguous()
    weight = torch.rand(shape, generator=generator)
    slot, used = slots_in_token_order(expert, torch.zeros(case.experts, dtype=torch.int64))
    return make_routing(expert, slot, weight, used, case.capacity)


def make_routing(expert: Tensor, slot: Tensor, weight: Tensor, used: Tensor, capacity: int) -> Routing:
    """The inverse tables, one row after the other; garbage where no token sits."""
    token = torch.full((used.numel(), capacity), 2**31 - 1, dtype=torch.int32)
    choice = torch.full_like(token, -5)
    for t in range(expert.shape[0]):
        for k in range(expert.shape[1]):
            if slot[t, k] < capacity:
                token[expert[t, k], slot[t, k]] = t
                choice[expert[t, k], slot[t, k]] = k
    return Routing(expert, slot, weight, token, choice, used.clamp(max=capacity))


@dataclass
class Answer:
    """What a rank's pass gives: out, dx, and the gradients of its experts, and of the weights [T, K]."""

    out: Tensor
    dx: Tensor
    dweight: Tensor
    dw1: Tensor
    dw2: Tensor
    db1: Tensor | None
    db2: Tensor | None


def reference(case: Case, dtype: torch.dtype = torch.float64) -> list[Answer]:
    """All ranks' answers in plain torch, in `dtype`, from autograd."""
    parameters = []
    for rank in range(case.world):
        experts = experts_of(case, rank)
        given = experts.w1, experts.b1, experts.w2, experts.b2
        parameters.append([None if p is None else p.to(dtype).requires_grad_() for p in given])
    answers = []
    for rank in range(case.world):
        x, dy = (t.to(dtype) for t in tokens_of(case, rank))
        x.requires_grad_()
        routing = routing_of(case, rank)
        weight = routing.weight.to(dtype).requires_grad_()
        out = torch.zeros_like(x)
        for e in range(case.experts):
            w1, b1, w2, b2 = (None if p is None else p[e % case.local] for p in parameters[e // case.local])
            for k in range(case.choices):
                kept = (routing.expert[:, k] == e) & (routing.slot[:, k] < case.capacity)
                mine = kept.nonzero().view(-1)
                h = x[mine] @ w1
                h = activate(h if b1 is None else h + b1, case.activation) @ w2
                h = h if b2 is None else h + b2
                out = out.index_add(0, mine, h * weight[mine, k, None])
        out.backward(dy)
        answers.append(Answer(out.detach(), x.grad, weight.grad, *[None] * 4))
    for answer, (w1, b1, w2, b2) in zip(answers, parameters, strict=True):
        zero = lambda p: None if p is None else torch.zeros_like(p) if p.grad is None else p.grad  # noqa: E731
        answer.dw1, answer.db1, answer.dw2, answer.db2 = zero(w1), zero(b1), zero(w2), zero(b2)
    return answers
