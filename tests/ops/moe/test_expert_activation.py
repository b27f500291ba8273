"""The activation of the experts' rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.kernels.config import ALL_ACTIVATIONS, GATED, check_activation
from lancet_kernels.ops.moe.expert_ops import EXPRESSIONS, activate, input_width
from tests.grids import few_of
from tests.ops.op_cases import (
    QUICK,
    SEEDS,
    assert_as_exact_as_torch,
    counts,
    generator,
    transposed_in_memory,
    with_gaps,
)

COUNTS = torch.tensor([[0, 3], [4, 1]])


def naive_expert_activation(h_RF: Tensor, count_WL: Tensor, kind: str) -> Tensor:
    """Reference, one row after the other; differentiable."""
    rows = [activate(h_F, kind) for h_F in h_RF[: int(count_WL.sum())]]
    return torch.stack(rows) if rows else activate(h_RF, kind)


def hidden(count_WL: Tensor, width: int, kind: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """h_RF (as wide as the kind needs) and the gradient of the output, float64."""
    rng, rows = generator(seed), int(count_WL.sum())
    h = 3 * torch.randn(rows, input_width(kind, width), dtype=torch.float64, generator=rng)
    return h, torch.randn(rows, width, dtype=torch.float64, generator=rng)


@QUICK
@given(
    count=counts(),
    width=st.sampled_from([1, 3, 8]),
    kind=st.sampled_from(ALL_ACTIVATIONS),
    gaps=st.booleans(),
    seed=SEEDS,
)
def test_against_reference(count: Tensor, width: int, kind: str, gaps: bool, seed: int) -> None:
    h, da = hidden(count, width, kind, seed)
    h.requires_grad_()
    expected = naive_expert_activation(h, count, kind)
    (expected_dh,) = torch.autograd.grad(expected, h, da)
    h = h.detach()
    if gaps:
        h, da, count = map(with_gaps, (h, da, count))
    torch.testing.assert_close(ops.expert_activation(h, count, kind), expected, rtol=1e-14, atol=1e-15)
    dh = ops.expert_activation_backward(da, h, count, kind)
    torch.testing.assert_close(dh, expected_dh, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("kind", ALL_ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_as_exact_as_torch(kind: str, dtype: torch.dtype) -> None:
    h, da = (t.to(dtype) for t in hidden(COUNTS, 64, kind))
    h64 = h.double().requires_grad_()
    exact = naive_expert_activation(h64, COUNTS, kind)
    (exact_dh,) = torch.autograd.grad(exact, h64, da.double())
    leaf = h.clone().requires_grad_()
    same_dtype = naive_expert_activation(leaf, COUNTS, kind)
    (same_dtype_dh,) = torch.autograd.grad(same_dtype, leaf, da)
    assert_as_exact_as_torch(ops.expert_activation(h, COUNTS, kind), same_dtype, exact)
    dh = ops.expert_activation_backward(da, h, COUNTS, kind)
    assert_as_exact_as_torch(dh, same_dtype_dh, exact_dh)


@pytest.mark.parametrize("kind", ALL_ACTIVATIONS)
def test_gradient_is_finite_at_extreme_inputs(kind: str) -> None:
    h = torch.tensor([-1e4, -100, 0, 100, 1e4]).repeat_interleave(2).view(5, 2)
    width = 1 if kind in GATED else 2
    dh = ops.expert_activation_backward(torch.ones(5, width), h, torch.tensor([[5]]), kind)
    assert torch.isfinite(dh).all()


@pytest.mark.parametrize("kind", ALL_ACTIVATIONS)
def test_gradcheck(kind: str) -> None:
    h = hidden(COUNTS, 3, kind)[0].requires_grad_()
    torch.autograd.gradcheck(lambda h: ops.expert_activation(h, COUNTS, kind), h)


@pytest.mark.parametrize("relayout", few_of([torch.clone, transposed_in_memory]))
@pytest.mark.parametrize("kind", ALL_ACTIVATIONS)
def test_opcheck(kind: str, relayout) -> None:
    h, da = map(relayout, hidden(COUNTS, 3, kind))
    count = relayout(COUNTS)
    opcheck(torch.ops.lancet.expert_activation.default, (h.clone().requires_grad_(), count, kind))
    opcheck(torch.ops.lancet.expert_activation_backward.default, (da, h, count, kind))


def test_names() -> None:
    for kind in ALL_ACTIVATIONS:
        check_activation(kind, supported=ALL_ACTIVATIONS)
        assert activate(torch.zeros(2, input_width(kind, 6)), kind).shape == (2, 6)
    with pytest.raises(UserError, match="got 'relu', expected one of gelu, silu, swiglu"):
        check_activation("relu")


def softcapped(h_RH: Tensor) -> Tensor:
    gate, up = h_RH.chunk(2, -1)
    return 4 * torch.tanh(gate / 4) * up


def test_expressions() -> None:
    EXPRESSIONS["softcapped"] = softcapped
    h, da = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    h.requires_grad_()
    ours = ops.expert_activation(h, COUNTS, "softcapped")
    torch.testing.assert_close(ours, softcapped(h))
    (dh,) = torch.autograd.grad(ours, h, da)
    torch.testing.assert_close(dh, torch.autograd.grad(softcapped(h), h, da)[0])
    opcheck(torch.ops.lancet.expert_activation.default, (h, COUNTS, "softcapped"))
    opcheck(torch.ops.lancet.expert_activation_backward.default, (da, h.detach(), COUNTS, "softcapped"))
    del EXPRESSIONS["softcapped"]
