"""Passes through the fused experts: data that any rank can recompute, and the float64 reference.

W  ranks, L experts on each    T  tokens per rank    K  choices    C  capacity    D, F  widths
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product

import torch
from torch import Tensor

from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.overlap import Experts, Routing
from lancet_kernels.ops.moe.expert_ops import activate, input_width
from lancet_kernels.ops.moe.gate import slots_in_token_order

SEEDS = {"w1": 10, "w2": 200, "b1": 400, "b2": 600, "x": 800, "dy": 900}


@dataclass(frozen=True)
class Case:
    """Sizes of a pass and how its tokens choose: "random", "one" (all to expert 0), "few" (half empty).

    uneven: the odd ranks have no tokens. favourite: the expert that "one" has instead.
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
    favourite: int = 0

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

    def values(self, what: str, number: int, *shape: int) -> Tensor:
        """Random numbers for an expert or a rank, by its number."""
        generator = torch.Generator().manual_seed(1000 * self.seed + SEEDS[what] + number)
        return (torch.randn(*shape, generator=generator) * 0.5).to(self.dtype)

    def weights(self, *shape: int, generator: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=generator)

    def __str__(self) -> str:
        sizes = f"W{self.world}L{self.local}T{self.tokens}K{self.choices}C{self.capacity}"
        return f"{sizes}D{self.width}F{self.hidden}-{self.activation}-{self.choose}-{str(self.dtype)[6:]}"


def experts_of(case: Case, rank: int) -> Experts:
    """The experts of a rank; an expert's values depend on its global number alone."""
    wide = input_width(case.activation, case.hidden)
    numbers = range(rank * case.local, (rank + 1) * case.local)
    shapes = {"w1": (case.width, wide), "w2": (case.hidden, case.width), "b1": (wide,), "b2": (case.width,)}
    w1, w2, b1, b2 = (
        torch.stack([case.values(name, e, *shape) for e in numbers]) if case.bias or len(shape) == 2 else None
        for name, shape in shapes.items()
    )
    return Experts(w1, b1, w2, b2, case.activation)


def tokens_of(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """x and the gradient of the output, [T, D] each."""
    shape = case.tokens_of(rank), case.width
    return case.values("x", rank, *shape), case.values("dy", rank, *shape)


def routing_of(case: Case, rank: int) -> Routing:
    generator = torch.Generator().manual_seed(77 + 1000 * case.seed + rank)
    shape = case.tokens_of(rank), case.choices
    score = torch.rand(shape[0], case.experts, generator=generator)
    if case.choose == "few":
        score[:, case.favourite % 2 :: 2] -= 2
    expert = score.topk(case.choices).indices
    if case.choose == "one":
        expert = (case.favourite + torch.arange(case.choices)).remainder(case.experts).repeat(shape[0], 1)
    weight = case.weights(*shape, generator=generator)
    slot, used = slots_in_token_order(expert, torch.zeros(case.experts, dtype=torch.int64))
    # Rows to send by expert, then slot; garbage behind the last one.
    count = used.clamp(max=case.capacity)
    row = torch.where(slot < case.capacity, (count.cumsum(0) - count)[expert] + slot, -1)
    choice = torch.full((expert.numel() + 1,), 2**31 - 1, dtype=torch.int32)
    kept = (row >= 0).view(-1).nonzero().view(-1)
    choice[row.view(-1)[kept]] = kept.int()
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


def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values as a kernel stores them in `dtype`: rounded to nearest, once.

    Except bfloat16 in Triton's interpreter, which cuts the low half of the word off (3.6 to 3.9).
    """
    if runtime.INTERPRETED and dtype == torch.bfloat16:
        values = (values.contiguous().view(torch.int32) & -(2**16)).view(torch.float32)
    return values.to(dtype)


def reference(case: Case, tokens: Case | None = None, *, exact: bool = True) -> list[Answer]:
    """All ranks' answers in plain torch. tokens: the case with their tokens.

    In float64; unless `exact`, with what a pass stores rounded to its dtype, and nothing else. Stored are the
    value before the activation, the one after it (in the backward made from the former, rounded, and
    weighted), results, dh, dx by slot, and the answers. Products and sums are float32, as torch accumulates
    16-bit matrix products.
    """
    wide = lambda t: t if t is None else t.double() if exact else t.float()  # noqa: E731
    round_ = lambda t: t if exact or t is None else stored(t, case.dtype).float()  # noqa: E731
    final = lambda t: t if exact or t is None else stored(t, case.dtype)  # noqa: E731
    parameters = []
    for rank in range(case.world):
        experts = experts_of(case, rank)
        parameters.append([wide(p) for p in (experts.w1, experts.b1, experts.w2, experts.b2)])
    sums = [[None if p is None else torch.zeros_like(p) for p in of_rank] for of_rank in parameters]
    answers = []
    for rank in range(case.world):
        x, dy = map(wide, tokens_of(tokens or case, rank))
        routing = routing_of(tokens or case, rank)
        out, dx, dweight = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(wide(routing.weight))
        for k, e in product(range(case.choices), range(case.experts)):
            mine = ((routing.expert[:, k] == e) & (routing.row[:, k] >= 0)).nonzero().view(-1)
            owner, local = divmod(e, case.local)
            w1, b1, w2, b2 = (None if p is None else p[local] for p in parameters[owner])
            weight = wide(routing.weight[mine, k, None])
            pre = x[mine] @ w1 + (0 if b1 is None else b1)
            y = round_(activate(pre, case.activation)) @ w2 + (0 if b2 is None else b2)
            out[mine] += round_(y) * weight
            h = round_(pre).requires_grad_()
            again, d_again = activate(h, case.activation), dy[mine] @ w2.T
            dh = round_(torch.autograd.grad(again, h, d_again * weight)[0])
            again = again.detach()
            dweight[mine, k] = (d_again * again).sum(1) + (0 if b2 is None else dy[mine] @ b2)
            dx[mine] += round_(dh @ w1.T)
            dw2 = round_(again * weight).T @ dy[mine]
            rows = x[mine].T @ dh, dh.sum(0), dw2, (dy[mine] * weight).sum(0)
            for sum_, of_rows in zip(sums[owner], rows, strict=True):
                if sum_ is not None:
                    sum_[local] += of_rows
        answers.append(Answer(final(out), final(dx), dweight, *[None] * 4))
    for answer, of_rank in zip(answers, sums, strict=True):
        answer.dw1, answer.db1, answer.dw2, answer.db2 = map(final, of_rank)
    return answers


def check_accuracy(answers: list[Answer], case: Case, say: str = "", tokens: Case | None = None) -> None:
    """The greatest error of each tensor over all ranks: at most twice that of torch in the same dtype.

    And four in the last place of the greatest number: torch's own error of a few numbers can be next to
    nothing, by luck, and a sum of terms that cancel is small beside them. On a GPU, which adds and rounds
    exponentials in ways of its own: three times torch's, and about one in the last place.
    """
    exact, same = (reference(case, tokens, exact=exact) for exact in (True, False))
    for field in fields(Answer):
        of_ranks = [[getattr(answer, field.name) for answer in each] for each in (answers, exact, same)]
        for rank, (got, expected) in enumerate(zip(*of_ranks[:2], strict=True)):
            at = f"{say} {case} rank {rank}: {field.name}"
            assert (got is None) == (expected is None), at
            assert got is None or got.shape == expected.shape, at
        if of_ranks[0][0] is not None:
            check_close(*(torch.cat(each) for each in of_ranks), f"{say} {case}: {field.name}")


def check_close(got: Tensor, exact: Tensor, same: Tensor, say: str) -> None:
    assert got.shape == exact.shape, say
    assert got.isfinite().all(), f"{say}: not finite"
    if got.numel():
        error, allowed = ((t.cpu().double() - exact).abs().max().item() for t in (got, same))
        eps = torch.finfo(got.dtype).eps
        times, last_places = (3, eps + 1e-6) if got.is_cuda else (2, 4 * eps)
        most = times * allowed + last_places * exact.abs().max().item()
        assert error <= most, f"{say}: error {error:.3e}, same dtype {allowed:.3e}"
