"""Combine: rows back from the experts, and the gradient of their weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.ops.combine import naive_combine
from tests.grids import few_of
from tests.ops.op_cases import (
    QUICK,
    SEEDS,
    Batch,
    assert_as_exact_as_torch,
    batches,
    generator,
    poisoned,
    routed_batch,
    transposed_in_memory,
    with_gaps,
)


def random_buffer(batch: Batch, seed: int = 7) -> Tensor:
    """Expert outputs [W, L, C, D], float64; padding is noise, not zero."""
    shape = (*batch.count_WL.shape, batch.capacity, batch.x_TD.shape[1])
    return torch.randn(shape, dtype=torch.float64, generator=generator(seed))


def naive_dweight(x_TD: Tensor, buffer_WLCD: Tensor, expert_TK: Tensor, slot_TK: Tensor) -> Tensor:
    buffer_ECD = buffer_WLCD.flatten(0, 1)
    out_TK = torch.zeros(expert_TK.shape, dtype=x_TD.dtype)
    for t, k in torch.cartesian_prod(*(torch.arange(n) for n in expert_TK.shape)).tolist():
        if slot_TK[t, k] < buffer_ECD.shape[1]:
            out_TK[t, k] = x_TD[t] @ buffer_ECD[expert_TK[t, k], slot_TK[t, k]]
    return out_TK


def test_by_hand() -> None:
    """Token 0 sums two rows with weights 2 and 10; token 1 has one choice dropped."""
    buffer_WLCD = torch.tensor([[[[1.0], [2]], [[3], [4]]]])
    expert_TK, slot_TK = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0, 1], [0, 2]])
    weight_TK = torch.tensor([[2.0, 10], [100, 1000]])
    assert ops.combine(buffer_WLCD, expert_TK, slot_TK, weight_TK).tolist() == [[42], [300]]
    assert ops.combine(buffer_WLCD, expert_TK, slot_TK, None).tolist() == [[5], [3]]
    x_TD = torch.tensor([[1.0], [7]])
    dweight_TK = ops.combine_dweight(x_TD, buffer_WLCD, expert_TK, slot_TK)
    assert dweight_TK.tolist() == [[1, 4], [21, 0]]


@QUICK
@given(batch=batches(), weighted=st.booleans(), gaps=st.booleans(), seed=SEEDS)
def test_against_reference(batch: Batch, weighted: bool, gaps: bool, seed: int) -> None:
    weight_TK = batch.routing.weight_TK if weighted else None
    buffer_WLCD = random_buffer(batch, seed)
    expected = naive_combine(buffer_WLCD, *batch.args, weight_TK)
    expected_dweight = naive_dweight(batch.x_TD, buffer_WLCD, *batch.args)
    relayout = with_gaps if gaps else torch.clone
    expert_TK, slot_TK = map(relayout, batch.args)
    buffer_WLCD, x_TD = relayout(buffer_WLCD), relayout(batch.x_TD)
    actual = ops.combine(buffer_WLCD, expert_TK, slot_TK, None if weight_TK is None else relayout(weight_TK))
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)
    actual = ops.combine_dweight(x_TD, buffer_WLCD, expert_TK, slot_TK)
    torch.testing.assert_close(actual, expected_dweight, rtol=1e-14, atol=1e-14)


@QUICK
@given(batch=batches())
def test_padding_is_not_read(batch: Batch) -> None:
    """NaN in rows that hold nothing changes no output and no gradient."""
    results = []
    for spoil in (lambda buffer, count: buffer, poisoned):
        buffer = spoil(random_buffer(batch), batch.count_WL).requires_grad_()
        weight_TK = batch.routing.weight_TK.clone().requires_grad_()
        out_TD = ops.combine(buffer, *batch.args, weight_TK)
        grads = torch.autograd.grad(out_TD, (buffer, weight_TK), batch.x_TD)
        dweight_TK = ops.combine_dweight(batch.x_TD, buffer.detach(), *batch.args)
        results.append((out_TD, *grads, dweight_TK))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not any(torch.isnan(t).any() for t in results[1])


@QUICK
@given(batch=batches())
def test_dispatch_and_combine_are_adjoint(batch: Batch) -> None:
    """<dispatch(x), b> = <x, combine(b)>."""
    weight_TK, buffer_WLCD = batch.routing.weight_TK, random_buffer(batch)
    left = (ops.dispatch(batch.x_TD, *batch.args, weight_TK, *batch.sizes) * buffer_WLCD).sum()
    right = (batch.x_TD * ops.combine(buffer_WLCD, *batch.args, weight_TK)).sum()
    torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_exact_as_torch(dtype: torch.dtype) -> None:
    batch = routed_batch(41, 7, 2, 2, 3, 20)
    weight_TK = batch.routing.weight_TK.float()
    buffer, x_TD = random_buffer(batch).to(dtype), batch.x_TD.to(dtype)
    assert_as_exact_as_torch(
        ops.combine(buffer, *batch.args, weight_TK),
        naive_combine(buffer, *batch.args, weight_TK),
        naive_combine(buffer.double(), *batch.args, weight_TK.double()),
    )
    dweight_TK = ops.combine_dweight(x_TD, buffer, *batch.args)
    assert dweight_TK.dtype == torch.float32
    assert_as_exact_as_torch(
        dweight_TK,
        naive_dweight(x_TD.float(), buffer.float(), *batch.args),
        naive_dweight(x_TD.double(), buffer.double(), *batch.args),
    )


def test_gradients_keep_the_dtypes_of_their_tensors() -> None:
    batch = routed_batch(9, 4, 1, 3, 2, 4)
    buffer = random_buffer(batch).bfloat16().requires_grad_()
    weight_TK = batch.routing.weight_TK.float().requires_grad_()
    ops.combine(buffer, *batch.args, weight_TK).sum().backward()
    assert (buffer.grad.dtype, weight_TK.grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "sizes",
    few_of(
        map(pytest.param, [(7, 3, 2, 2, 2, 2), (1, 1, 1, 1, 1, 1), (5, 2, 1, 3, 3, 0), (0, 2, 1, 2, 1, 1)])
    ),
)
def test_gradcheck(sizes: tuple[int, ...], weighted: bool) -> None:
    batch = routed_batch(*sizes)
    buffer = random_buffer(batch).requires_grad_()
    weight_TK = batch.routing.weight_TK.requires_grad_() if weighted else None
    torch.autograd.gradcheck(lambda b, weight: ops.combine(b, *batch.args, weight), (buffer, weight_TK))


@pytest.mark.parametrize("relayout", [torch.clone, transposed_in_memory])
@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck(relayout, weighted: bool) -> None:
    batch = routed_batch(7, 3, 2, 2, 2, 2)
    buffer, (expert_TK, slot_TK) = relayout(random_buffer(batch)), map(relayout, batch.args)
    weight_TK = relayout(batch.routing.weight_TK).requires_grad_() if weighted else None
    torch.library.opcheck(ops.combine, (buffer.clone().requires_grad_(), expert_TK, slot_TK, weight_TK))
    torch.library.opcheck(ops.combine_dweight, (relayout(batch.x_TD), buffer, expert_TK, slot_TK))
