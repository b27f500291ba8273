"""`router_logits` against linear in float64; losses of parts that are added up, and of nothing.

The formulas of the losses: lancet_kernels/layer/test_layer.py.
"""

from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lancet_kernels import ops
from lancet_kernels.ops.moe import router as module
from lancet_kernels.ops.moe.gates import Hash, Switch, TopK
from lancet_kernels.ops.moe.router import moe_losses, routing_sums
from tests.grids import few_of
from tests.ops.op_cases import QUICK, SEEDS, generator, no_use


def naive_router_logits(x_TD: Tensor, router_ED: Tensor) -> Tensor:
    """-> [T, E] in float32, in float64 for a float64 router."""
    dtype = torch.promote_types(router_ED.dtype, torch.float32)
    return nn.functional.linear(x_TD.to(dtype), router_ED.to(dtype))


def run(function, x, router, grad):
    x, router = x.clone().requires_grad_(), router.clone().requires_grad_()
    logits = function(x, router)
    logits.backward(grad.to(logits.dtype))
    return logits.detach(), x.grad, router.grad


@pytest.mark.parametrize(
    ("tokens", "dtype", "at_once"),
    few_of(
        [(37, torch.bfloat16, 16), (37, torch.float16, 4096), (0, torch.bfloat16, 16), (9, torch.float32, 4)]
    ),
)
def test_as_good_as_a_float32_copy(tokens, dtype, at_once) -> None:
    generator = torch.Generator().manual_seed(1)
    x, router = (torch.randn(n, 24, generator=generator).to(dtype) for n in (tokens, 6))
    grad = torch.randn(tokens, 6, generator=generator)
    exact = run(naive_router_logits, x.double(), router.double(), grad)
    plain = run(naive_router_logits, x, router, grad)
    with mock.patch.object(module, "TOKENS_AT_ONCE", at_once):
        got = run(ops.router_logits, x, router, grad)
    for mine, theirs, right in zip(got, plain, exact, strict=True):
        assert mine.dtype == theirs.dtype
        if right.numel():
            off, allowed = ((t.double() - right).abs().max() for t in (mine, theirs))
            assert off <= 2 * allowed + torch.finfo(mine.dtype).eps * right.abs().max()


def test_no_float32_copy_is_kept() -> None:
    x = torch.ones(50, 24, dtype=torch.bfloat16, requires_grad=True)
    router = torch.ones(6, 24, dtype=torch.bfloat16, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ops.router_logits(x, router)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), router.data_ptr()}


@QUICK
@given(tokens=st.integers(0, 20), cut=st.integers(0, 20), seed=SEEDS)
def test_parts_add_up_with_their_gradient(tokens: int, cut: int, seed: int) -> None:
    """Losses of two parts added up equal those of one call, and so do the gradients of the logits."""
    cut = min(cut, tokens)
    base_TE = torch.randn(tokens, 5, dtype=torch.float64, generator=generator(seed))

    def losses_and_gradient(bounds: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_TE, used_E, total = base_TE.clone().requires_grad_(), no_use(5), None
        for start, stop in pairwise(bounds):
            part_TE = logits_TE[start:stop]
            after_E = ops.gate(part_TE.detach(), used_E, None, None, "topk", 2, 4)[3]
            part = routing_sums(TopK(), part_TE, used_E, after_E, 4, stop - start)
            total, used_E = part if total is None else total.plus(part), after_E
        losses = moe_losses([total], "")
        (gradient,) = torch.autograd.grad((losses.balance + 0.1 * losses.z).sum(), logits_TE)
        return losses.balance, losses.z, gradient

    whole, parts = losses_and_gradient([0, tokens]), losses_and_gradient([0, cut, tokens])
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_gates_that_learn_nothing_and_no_tokens_have_no_loss() -> None:
    sums = routing_sums(Hash(), None, no_use(3), torch.tensor([2, 0, 4]), 3, 6)
    losses = moe_losses([sums], "")
    assert losses.balance.tolist() == losses.z.tolist() == [0.0]
    assert losses.dropped.item() == pytest.approx(1 / 6)
    # Without tokens, zero and not NaN.
    losses = moe_losses([routing_sums(Switch(), torch.zeros(0, 3), no_use(3), no_use(3), 1, 0)], "")
    assert losses.balance.tolist() == losses.z.tolist() == [0.0]


def test_sum_over_ranks_of_one() -> None:
    counts = torch.tensor([[1, 2], [3, 4]])
    total = ops.sum_over_ranks(counts, "")
    assert torch.equal(total, counts)
    assert total.data_ptr() != counts.data_ptr()
    torch.library.opcheck(torch.ops.lancet.sum_over_ranks, (counts, ""))
    torch.library.opcheck(torch.ops.lancet.sum_over_ranks, (counts.T, ""))
