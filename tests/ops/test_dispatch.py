"""Dispatch: rows into the experts' buffers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lancet_kernels import ops
from lancet_kernels.ops.dispatch import buffer_rows, naive_dispatch
from tests.grids import few_of
from tests.ops.op_cases import QUICK, Batch, batches, poisoned, routed_batch, transposed_in_memory, with_gaps


def test_by_hand() -> None:
    """C = 1, two experts: token 1's choice of expert 0 comes too late; its second one is kept."""
    x_TD = torch.tensor([[1.0, 2], [3, 4]])
    expert_TK, slot_TK = torch.tensor([[0], [0]]), torch.tensor([[0], [1]])
    buffer = ops.dispatch(x_TD, expert_TK, slot_TK, None, 1, 2, 1)
    assert buffer.tolist() == [[[[1, 2]], [[0, 0]]]]
    expert_TK, slot_TK = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0, 1], [1, 0]])
    weight_TK = torch.tensor([[2.0, 9], [9, 0.5]])
    buffer = ops.dispatch(x_TD, expert_TK, slot_TK, weight_TK, 2, 2, 1)
    assert buffer.tolist() == [[[[2, 4]]], [[[1.5, 2]]]]


def test_buffer_rows_by_hand() -> None:
    row_TK, kept_TK = buffer_rows(torch.tensor([[2, 0]]), torch.tensor([[1, 4]]), 4)
    assert row_TK.tolist() == [[9, 0]]
    assert kept_TK.tolist() == [[True, False]]


@QUICK
@given(batch=batches(), weighted=st.booleans(), gaps=st.booleans())
def test_against_reference(batch: Batch, weighted: bool, gaps: bool) -> None:
    weight_TK = batch.routing.weight_TK if weighted else None
    expected = naive_dispatch(batch.x_TD, *batch.args, weight_TK, *batch.sizes)
    tensors = [batch.x_TD, *batch.args, weight_TK]
    if gaps:
        tensors = [None if t is None else with_gaps(t) for t in tensors]
    actual = ops.dispatch(*tensors, *batch.sizes)
    assert actual.shape == (
        batch.ranks,
        batch.num_experts // batch.ranks,
        batch.capacity,
        batch.x_TD.shape[1],
    )
    assert torch.equal(actual, expected)


@QUICK
@given(batch=batches())
def test_dropped_tokens_are_not_read(batch: Batch) -> None:
    """A token none of whose choices is kept may hold anything."""
    dropped_T = (batch.routing.slot_TK >= batch.capacity).all(1)
    x_TD = batch.x_TD.masked_fill(dropped_T[:, None], torch.nan)
    expected = ops.dispatch(batch.x_TD, *batch.args, None, *batch.sizes)
    assert torch.equal(ops.dispatch(x_TD, *batch.args, None, *batch.sizes), expected)


@QUICK
@given(batch=batches())
def test_gradient_does_not_read_padding(batch: Batch) -> None:
    x_TD = batch.x_TD.clone().requires_grad_()
    weight_TK = batch.routing.weight_TK.clone().requires_grad_()
    buffer = ops.dispatch(x_TD, *batch.args, weight_TK, *batch.sizes)
    grad = torch.sin(torch.arange(buffer.numel(), dtype=torch.float64)).view_as(buffer)
    clean = torch.autograd.grad(buffer, (x_TD, weight_TK), grad, retain_graph=True)
    dirty = torch.autograd.grad(buffer, (x_TD, weight_TK), poisoned(grad, batch.count_WL))
    assert all(torch.equal(a, b) for a, b in zip(dirty, clean, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    """Without weights a copy, bit for bit; with float32 weights one rounding of the exact product."""
    batch = routed_batch(23, 7, 2, 2, 2, 8, dtype=dtype)
    copied = ops.dispatch(batch.x_TD, *batch.args, None, *batch.sizes)
    assert copied.dtype == dtype
    assert torch.equal(copied, naive_dispatch(batch.x_TD, *batch.args, None, *batch.sizes))
    weight_TK = batch.routing.weight_TK.float()
    actual = ops.dispatch(batch.x_TD, *batch.args, weight_TK, *batch.sizes)
    exact = naive_dispatch(batch.x_TD.double(), *batch.args, weight_TK.double(), *batch.sizes)
    # 2^-24: float32 rounds the product once more before the dtype of x does.
    torch.testing.assert_close(
        actual.double(), exact, rtol=torch.finfo(dtype).eps / 2 * (1 + 2**-12), atol=torch.finfo(dtype).tiny
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "sizes",
    few_of(
        map(pytest.param, [(7, 3, 2, 2, 2, 2), (1, 1, 1, 1, 1, 1), (5, 2, 1, 3, 3, 0), (0, 2, 1, 2, 1, 1)])
    ),
)
def test_gradcheck(sizes: tuple[int, ...], weighted: bool) -> None:
    batch = routed_batch(*sizes)
    x_TD = batch.x_TD.requires_grad_()
    weight_TK = batch.routing.weight_TK.requires_grad_() if weighted else None
    torch.autograd.gradcheck(
        lambda x, weight: ops.dispatch(x, *batch.args, weight, *batch.sizes), (x_TD, weight_TK)
    )


@pytest.mark.parametrize("relayout", [torch.clone, transposed_in_memory])
@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck(relayout, weighted: bool) -> None:
    batch = routed_batch(7, 3, 2, 2, 2, 2)
    weight_TK = relayout(batch.routing.weight_TK).requires_grad_() if weighted else None
    expert_TK, slot_TK = map(relayout, batch.args)
    x_TD = relayout(batch.x_TD).requires_grad_()
    torch.library.opcheck(ops.dispatch, (x_TD, expert_TK, slot_TK, weight_TK, *batch.sizes))


def test_no_capacity_and_no_tokens() -> None:
    """A dropless layer that gets no token: C = 0."""
    nothing = torch.zeros(0, 2, dtype=torch.int64)
    buffer = ops.dispatch(torch.zeros(0, 3), nothing, nothing, None, 2, 4, 0)
    assert buffer.shape == (2, 2, 0, 3)
    assert ops.combine(buffer, nothing, nothing, None).shape == (0, 3)
