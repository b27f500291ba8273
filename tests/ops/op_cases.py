"""Inputs that several op tests share: routings that overflow, counts with holes, gaps full of NaN.

Tensors come from a drawn seed, shapes and the kind of difficulty from hypothesis itself, so that a failing
example shrinks to a small shape quickly and is printed as a few numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.ops.moe.gate import Gate
from lancet_kernels.ops.moe.gates import BatchPrioritized, GShard, Hash, Random, Sigmoid, Switch, TopK
from tests.examples import examples

QUICK = examples(200)
SEEDS = st.integers(0, 2**32 - 1)
DTYPES = st.sampled_from([torch.float32, torch.float64])


class Routing(NamedTuple):
    """What a gate returns."""

    expert_TK: Tensor
    slot_TK: Tensor
    weight_TK: Tensor
    used_E: Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def skewed_logits(kind: str, tokens: int, experts: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Router logits [T, E].

    kind: "normal"; "ties" (three values, so most choices are ties); "skewed" (expert e is preferred by
    4 * e, so that some overflow and others stay empty); "one" (all tokens alike).
    """
    rng = generator(seed)
    normal_TE = torch.randn(tokens, experts, dtype=dtype, generator=rng)
    if kind == "ties":
        return torch.randint(-1, 2, (tokens, experts), generator=rng).to(dtype)
    if kind == "skewed":
        order_E = torch.randperm(experts, generator=rng)
        return normal_TE + 4 * order_E.to(dtype)
    return normal_TE[:1].repeat(tokens, 1) if kind == "one" else normal_TE


@st.composite
def logits_cases(draw: st.DrawFn) -> Tensor:
    """Router logits of 0 to 40 tokens and 1 to 16 experts, in all kinds and both dtypes."""
    return skewed_logits(
        draw(st.sampled_from(["normal", "ties", "skewed", "one"])),
        draw(st.integers(0, 40)),
        draw(st.integers(1, 16)),
        draw(DTYPES),
        draw(SEEDS),
    )


def draw_gate(draw: Callable[[st.SearchStrategy], Any], kind: type[Gate], experts: int) -> tuple[Gate, int]:
    """A gate of this kind for so many experts, with its options, and a K that it allows."""
    top_k = draw(st.integers(1, experts))
    if kind in (Hash, Random):
        return kind(seed=draw(st.integers(-5, 2**64))), top_k
    if kind is BatchPrioritized:
        return kind(draw(st.sampled_from(["max", "sum"]))), top_k
    if kind not in (TopK, Sigmoid):
        assume(kind is not GShard or experts > 1)
        return kind(), {Switch: 1, GShard: 2}.get(kind, top_k)
    groups = draw(st.sampled_from([g for g in range(1, experts + 1) if experts % g == 0]))
    options = {
        "groups": groups,
        "top_groups": draw(st.integers(-(-top_k * groups // experts), groups)),
        "renormalize": draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 2.5])),
    }
    if kind is TopK:
        options["softmax"] = draw(st.sampled_from(["before", "after"]))
    return kind(**options), top_k


def used_before(experts: int, seed: int) -> Tensor:
    """Assignments of imaginary earlier parts, int64 [E]."""
    return torch.randint(0, 5, (experts,), generator=generator(seed))


def no_use(experts: int) -> Tensor:
    return torch.zeros(experts, dtype=torch.int64)


def assert_same_routing(actual: Routing, expected: Routing, rtol: float = 0.0) -> None:
    """Integers identical; weights identical, or within `rtol` of each."""
    for name in ("expert_TK", "slot_TK", "used_E"):
        got, wanted = getattr(actual, name), getattr(expected, name)
        assert got.dtype == torch.int64
        assert torch.equal(got, wanted), f"{name}: {got.tolist()} instead of {wanted.tolist()}"
    assert actual.weight_TK.dtype == expected.weight_TK.dtype
    if rtol:
        torch.testing.assert_close(actual.weight_TK, expected.weight_TK, rtol=rtol, atol=0)
    else:
        assert torch.equal(actual.weight_TK, expected.weight_TK)


def weight_rtol(logits: Tensor | None) -> float:
    """Rounding of exp(x): its argument is off by an eps of x, and a few operations more."""
    if logits is None:
        return 0.0
    largest = float(logits.abs().max()) if logits.numel() else 0.0
    return (8 + 2 * largest) * torch.finfo(logits.dtype).eps


@dataclass
class Batch:
    """A routed batch, with all that dispatch and combine need."""

    x_TD: Tensor
    routing: Routing
    ranks: int
    num_experts: int
    capacity: int

    @property
    def count_WL(self) -> Tensor:
        return self.routing.used_E.clamp(max=self.capacity).view(self.ranks, -1)

    @property
    def row_TK(self) -> Tensor:
        return ops.send_rows(self.routing.expert_TK, self.routing.slot_TK, self.count_WL)

    @property
    def num_rows(self) -> int:
        return int(self.count_WL.sum())


def routed_batch(
    tokens: int,
    width: int,
    ranks: int,
    local_experts: int,
    top_k: int,
    capacity: int,
    *,
    kind: str = "skewed",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Batch:
    """Tokens routed by a top-k gate. Capacity small against T * K / E drops some."""
    experts = ranks * local_experts
    logits_TE = skewed_logits(kind, tokens, experts, torch.float64, seed)
    routing = Routing(*ops.gate(logits_TE, no_use(experts), None, None, "topk", top_k, capacity))
    x_TD = torch.randn(tokens, width, dtype=torch.float64, generator=generator(seed + 1)).to(dtype)
    return Batch(x_TD, routing, ranks, experts, capacity)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Odd sizes, one token, none, several experts per rank, all to one expert, capacity from 0 to enough."""
    ranks, local_experts = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    tokens = draw(st.sampled_from([0, 1, 2, 3, 7, 13]))
    return routed_batch(
        tokens,
        draw(st.sampled_from([1, 3, 5, 8])),
        ranks,
        local_experts,
        draw(st.integers(1, min(3, ranks * local_experts))),
        draw(st.integers(0, max(1, tokens))),
        kind=draw(st.sampled_from(["normal", "ties", "skewed", "one"])),
        seed=draw(SEEDS),
    )


@st.composite
def counts(draw: st.DrawFn, most: int = 5) -> Tensor:
    """counts [W, L] of 1 to 4 ranks with 1 to 8 experts each: many zeros, all rows at one expert, none at
    all."""
    ranks, local_experts = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    if draw(st.booleans()):
        count = torch.zeros(ranks, local_experts, dtype=torch.int64)
        count[:, draw(st.integers(0, local_experts - 1))] = draw(st.integers(0, most))
        return count
    row = st.lists(st.integers(0, most), min_size=local_experts, max_size=local_experts)
    return torch.tensor(draw(st.lists(row, min_size=ranks, max_size=ranks)))


def with_gaps(tensor: Tensor) -> Tensor:
    """The same values, non-contiguous, with NaN (or, in integers, nonsense) between them."""
    wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 0)
    wide.fill_(torch.nan if tensor.is_floating_point() else -(2**40))
    wide[..., ::2] = tensor
    return wide[..., ::2]


def transposed_in_memory(tensor: Tensor) -> Tensor:
    """The same values with the first two dimensions swapped in memory."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def assert_as_exact_as_torch(actual: Tensor, same_dtype: Tensor, exact: Tensor) -> None:
    """`actual` errs at most twice as much as torch in the same dtype, against float64, and no element four
    times as much as the worst of torch: that of few elements depends on the CPU's order of sums."""
    assert actual.dtype == same_dtype.dtype
    assert exact.dtype == torch.float64
    own, theirs = (actual.double() - exact).abs(), (same_dtype.double() - exact).abs()
    assert own.norm() <= 2 * theirs.norm(), f"norm of the error {own.norm():.3g}, torch's {theirs.norm():.3g}"
    assert own.max() <= 4 * theirs.max(), f"largest error {own.max():.3g}, torch's {theirs.max():.3g}"
