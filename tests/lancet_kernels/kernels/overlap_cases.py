"""Passes through the fused experts: data that any rank can recompute, and the float64 reference.

W  ranks, L experts on each    T  tokens per rank    K  choices    C  capacity    D, F  widths
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.overlap_data import Experts, Routing
from lancet_kernels.ops.moe.expert_activation import activate, input_width
from lancet_kernels.ops.moe.gates.base import slots_in_token_order


@dataclass(frozen=True)
class Case:
    """Sizes of a pass and how its tokens choose: "random", "one" (all to expert 0), "few" (half empty).

    uneven: the odd ranks have no tokens.
    """

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
    uneven: bool = False

    @property
    def experts(self) -> int:
        return self.world * self.local

    @property
    def send_rows(self) -> int:
        return self.tokens * self.choices

    @property
    def receive_rows(self) -> int:
        return self.world * self.tokens * min(self.choices, self.local)

    def tokens_of(self, rank: int) -> int:
        return 0 if self.uneven and rank % 2 else self.tokens

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
    shape = case.tokens_of(rank), case.width
    return _normal(case, *shape, seed=800 + rank), _normal(case, *shape, seed=900 + rank)


def routing_of(case: Case, rank: int) -> Routing:
    generator = torch.Generator().manual_seed(77 + 1000 * case.seed + rank)
    shape = case.tokens_of(rank), case.choices
    score = torch.rand(shape[0], case.experts, generator=generator)
    if case.choose == "few":
        score[:, ::2] -= 2
    expert = score.topk(case.choices).indices if case.choices <= case.experts else None
    if case.choose == "one":
        expert = torch.arange(case.choices).expand(shape).contiguous()
    weight = torch.rand(shape, generator=generator)
    slot, used = slots_in_token_order(expert, torch.zeros(case.experts, dtype=torch.int64))
    return make_routing(expert, slot, weight, used, case.capacity)


def make_routing(expert: Tensor, slot: Tensor, weight: Tensor, used: Tensor, capacity: int) -> Routing:
    """Rows to send by expert, then slot; garbage behind the last one."""
    count = used.clamp(max=capacity)
    first = count.cumsum(0) - count
    row = torch.full_like(expert, -1)
    choice = torch.full((expert.numel() + 1,), 2**31 - 1, dtype=torch.int32)
    for t in range(expert.shape[0]):
        for k in range(expert.shape[1]):
            if slot[t, k] < capacity:
                row[t, k] = first[expert[t, k]] + slot[t, k]
                choice[row[t, k]] = t * expert.shape[1] + k
    return Routing(expert, row, weight, choice, count)


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


def reference(case: Case, dtype: torch.dtype = torch.float64, tokens: Case | None = None) -> list[Answer]:
    """All ranks' answers in plain torch, in `dtype`, from autograd. tokens: the case with their tokens."""
    parameters = []
    for rank in range(case.world):
        experts = experts_of(case, rank)
        given = experts.w1, experts.b1, experts.w2, experts.b2
        parameters.append([None if p is None else p.to(dtype).requires_grad_() for p in given])
    answers = []
    for rank in range(case.world):
        x, dy = (t.to(dtype) for t in tokens_of(tokens or case, rank))
        x.requires_grad_()
        routing = routing_of(tokens or case, rank)
        weight = routing.weight.to(dtype).requires_grad_()
        out = torch.zeros_like(x)
        for e in range(case.experts):
            w1, b1, w2, b2 = (None if p is None else p[e % case.local] for p in parameters[e // case.local])
            for k in range(case.choices):
                kept = (routing.expert[:, k] == e) & (routing.row[:, k] >= 0)
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


def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values as a kernel stores them in `dtype`: rounded to nearest, once.

    Except bfloat16 in Triton's interpreter, which cuts the low half of the word off (3.6 to 3.9).
    """
    if runtime.INTERPRETED and dtype == torch.bfloat16:
        values = (values.contiguous().view(torch.int32) & -(2**16)).view(torch.float32)
    return values.to(dtype)


def same_dtype(case: Case, tokens: Case | None = None) -> list[Answer]:
    """All ranks' answers in plain torch with what a pass stores rounded to its dtype, and nothing else.

    Stored are the value before the activation, the one after it (in the backward made from the former,
    rounded, and weighted), results, dh, dx by slot, and the answers. Products and sums are float32, as torch
    accumulates 16-bit matrix products.
    """
    round_ = lambda t: stored(t, case.dtype).float()  # noqa: E731
    experts = [experts_of(case, rank) for rank in range(case.world)]
    zero = lambda p: None if p is None else torch.zeros_like(p, dtype=torch.float32)  # noqa: E731
    sums = [[zero(p) for p in (e.w1, e.b1, e.w2, e.b2)] for e in experts]
    answers = []
    for rank in range(case.world):
        x, dy = (t.float() for t in tokens_of(tokens or case, rank))
        routing = routing_of(tokens or case, rank)
        out, dx = torch.zeros_like(x), torch.zeros_like(x)
        dweight = torch.zeros_like(routing.weight)
        for k in range(case.choices):
            for e in range(case.experts):
                kept = (routing.expert[:, k] == e) & (routing.row[:, k] >= 0)
                mine, owner, local = kept.nonzero().view(-1), e // case.local, e % case.local
                given = experts[owner]
                w1, b1, w2, b2 = (
                    None if p is None else p[local].float() for p in (given.w1, given.b1, given.w2, given.b2)
                )
                weight = routing.weight[mine, k, None]
                pre = x[mine] @ w1 if b1 is None else x[mine] @ w1 + b1
                hidden = round_(activate(pre, case.activation))
                y = hidden @ w2 if b2 is None else hidden @ w2 + b2
                out[mine] += round_(y) * weight
                h = round_(pre).requires_grad_()
                again, d_again = activate(h, case.activation), dy[mine] @ w2.T
                dh = round_(torch.autograd.grad(again, h, d_again * weight)[0])
                again = again.detach()
                dweight[mine, k] = (d_again * again).sum(1) + (0 if b2 is None else dy[mine] @ b2)
                dw2 = round_(again * weight).T @ dy[mine]
                dx[mine] += round_(dh @ w1.T)
                for sum_, rows in zip(
                    sums[owner], (x[mine].T @ dh, dh.sum(0), dw2, (dy[mine] * weight).sum(0)), strict=True
                ):
                    if sum_ is not None:
                        sum_[local] += rows
        answers.append(Answer(stored(out, case.dtype), stored(dx, case.dtype), dweight, *[None] * 4))
    for answer, made in zip(answers, sums, strict=True):
        answer.dw1, answer.db1, answer.dw2, answer.db2 = (
            None if p is None else stored(p, case.dtype) for p in made
        )
    return answers


def check_accuracy(answers: list[Answer], case: Case, say: str = "", tokens: Case | None = None) -> None:
    """Each tensor's greatest error: at most twice that of `same_dtype`, and two in the last place.

    The latter because torch's own error of a tensor of a few numbers can be next to nothing, by luck.
    On a GPU, which adds and rounds exponentials in ways of its own: three times that, and about one in the
    last place.
    """
    exact, same = reference(case, tokens=tokens), same_dtype(case, tokens)
    for rank in range(case.world):
        for field in fields(Answer):
            check_close(
                *(getattr(of[rank], field.name) for of in (answers, exact, same)),
                f"{say} {case} rank {rank}: {field.name}",
            )


def check_close(got: Tensor | None, exact: Tensor | None, same: Tensor | None, say: str) -> None:
    if exact is None:
        assert got is None, say
        return
    assert got.shape == exact.shape, say
    assert got.isfinite().all(), f"{say}: not finite"
    if got.numel():
        error, allowed = ((t.cpu().double() - exact).abs().max().item() for t in (got, same))
        eps = torch.finfo(got.dtype).eps
        times, last_places = (3, eps + 1e-6) if got.is_cuda else (2, 2 * eps)
        most = times * allowed + last_places * exact.abs().max().item()
        assert error <= most, f"{say}: error {error:.3e}, same dtype {allowed:.3e}"
