"""`router_logits` against linear in float64, and what it keeps for the backward."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lancet_kernels.ops import router_logits as router_logits_op
from lancet_kernels.ops.moe import router as module
from tests.grids import few_of


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
        got = run(router_logits_op, x, router, grad)
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
        router_logits_op(x, router)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), router.data_ptr()}
