"""Dispatch and combine: rows to where those of their experts lie, and back; the gradient of their weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from lancet_kernels import ops
from tests.grids import few_of
from tests.ops.op_cases import (
    QUICK,
    SEEDS,
    Batch,
    assert_as_exact_as_torch,
    batches,
    generator,
    routed_batch,
    transposed_in_memory,
    with_gaps,
)


def naive_dispatch(x_TD: Tensor, row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """Reference, one row after the other."""
    rows_SD = x_TD.new_zeros(int((row_TK >= 0).sum()), x_TD.shape[1])
    for t in range(row_TK.shape[0]):
        for k in range(row_TK.shape[1]):
            if row_TK[t, k] >= 0:
                row_D = x_TD[t] if weight_TK is None else x_TD[t] * weight_TK[t, k]
                rows_SD[row_TK[t, k]] = row_D.to(x_TD.dtype)
    return rows_SD


def naive_combine(rows_SD: Tensor, row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """Reference, one row after the other."""
    out_TD = rows_SD.new_zeros(row_TK.shape[0], rows_SD.shape[1])
    for t in range(row_TK.shape[0]):
        for k in range(row_TK.shape[1]):
            if row_TK[t, k] >= 0:
                row_D = rows_SD[row_TK[t, k]]
                out_TD[t] += row_D if weight_TK is None else row_D * weight_TK[t, k]
    return out_TD


def random_rows(batch: Batch, seed: int = 7) -> Tensor:
    """Expert outputs [S, D], float64."""
    shape = batch.num_rows, batch.x_TD.shape[1]
    return torch.randn(shape, dtype=torch.float64, generator=generator(seed))


def naive_dweight(x_TD: Tensor, rows_SD: Tensor, row_TK: Tensor) -> Tensor:
    out_TK = torch.zeros(row_TK.shape, dtype=x_TD.dtype)
    for t, k in torch.cartesian_prod(*(torch.arange(n) for n in row_TK.shape)).tolist():
        if row_TK[t, k] >= 0:
            out_TK[t, k] = x_TD[t] @ rows_SD[row_TK[t, k]]
    return out_TK


@QUICK
@given(batch=batches(), weighted=st.booleans(), gaps=st.booleans())
def test_dispatch_against_reference(batch: Batch, weighted: bool, gaps: bool) -> None:
    weight_TK = batch.routing.weight_TK if weighted else None
    expected = naive_dispatch(batch.x_TD, batch.row_TK, weight_TK)
    tensors = [batch.x_TD, batch.row_TK, weight_TK]
    if gaps:
        tensors = [None if t is None else with_gaps(t) for t in tensors]
    actual = ops.dispatch(*tensors, batch.row_TK.numel())
    assert actual.shape == (batch.num_rows, batch.x_TD.shape[1])
    assert torch.equal(actual, expected)


@QUICK
@given(batch=batches(), weighted=st.booleans(), gaps=st.booleans(), seed=SEEDS)
def test_combine_against_reference(batch: Batch, weighted: bool, gaps: bool, seed: int) -> None:
    weight_TK = batch.routing.weight_TK if weighted else None
    rows_SD, row_TK = random_rows(batch, seed), batch.row_TK
    expected = naive_combine(rows_SD, row_TK, weight_TK)
    expected_dweight = naive_dweight(batch.x_TD, rows_SD, row_TK)
    relayout = with_gaps if gaps else torch.clone
    rows_SD, row_TK, x_TD = relayout(rows_SD), relayout(row_TK), relayout(batch.x_TD)
    weight_TK = None if weight_TK is None else relayout(weight_TK)
    torch.testing.assert_close(ops.combine(rows_SD, row_TK, weight_TK), expected, rtol=1e-14, atol=1e-14)
    narrow = None if weight_TK is None else weight_TK.float()
    torch.testing.assert_close(ops.combine(rows_SD.float(), row_TK, narrow), expected.float())
    actual = ops.combine_dweight(x_TD, rows_SD, row_TK)
    torch.testing.assert_close(actual, expected_dweight, rtol=1e-14, atol=1e-14)


@QUICK
@given(batch=batches())
def test_dropped_tokens_are_not_read(batch: Batch) -> None:
    """A token none of whose choices is kept may hold anything."""
    dropped_T = (batch.row_TK < 0).all(1)
    x_TD = batch.x_TD.masked_fill(dropped_T[:, None], torch.nan)
    expected = ops.dispatch(batch.x_TD, batch.row_TK, None, batch.num_rows)
    assert torch.equal(ops.dispatch(x_TD, batch.row_TK, None, batch.num_rows), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropped_choices_read_nothing(dtype: torch.dtype) -> None:
    """Not even a row 0 that is infinite."""
    rows_SD = torch.tensor([[torch.inf], [2.0]], dtype=dtype)
    row_TK, weight_TK = torch.tensor([[1, -1], [-1, -1]]), torch.ones(2, 2)
    assert ops.combine(rows_SD, row_TK, weight_TK).tolist() == [[2], [0]]
    assert ops.combine(rows_SD, row_TK, None).tolist() == [[2], [0]]
    assert ops.combine_dweight(rows_SD[1:].repeat(2, 1), rows_SD, row_TK).tolist() == [[4, 0], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dispatch_in_low_precision(dtype: torch.dtype) -> None:
    """Without weights a copy, bit for bit; with float32 weights one rounding of the exact product."""
    batch = routed_batch(23, 7, 2, 2, 2, 8, dtype=dtype)
    copied = ops.dispatch(batch.x_TD, batch.row_TK, None, batch.num_rows)
    assert copied.dtype == dtype
    assert torch.equal(copied, naive_dispatch(batch.x_TD, batch.row_TK, None))
    weight_TK = batch.routing.weight_TK.float()
    actual = ops.dispatch(batch.x_TD, batch.row_TK, weight_TK, batch.num_rows)
    exact = naive_dispatch(batch.x_TD.double(), batch.row_TK, weight_TK.double())
    # 2^-24: float32 rounds the product once more before the dtype of x does.
    torch.testing.assert_close(
        actual.double(), exact, rtol=torch.finfo(dtype).eps / 2 * (1 + 2**-12), atol=torch.finfo(dtype).tiny
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_combine_is_as_exact_as_torch(dtype: torch.dtype) -> None:
    batch = routed_batch(41, 7, 2, 2, 3, 20)
    weight_TK, row_TK = batch.routing.weight_TK.float(), batch.row_TK
    rows, x_TD = random_rows(batch).to(dtype), batch.x_TD.to(dtype)
    assert_as_exact_as_torch(
        ops.combine(rows, row_TK, weight_TK),
        naive_combine(rows, row_TK, weight_TK),
        naive_combine(rows.double(), row_TK, weight_TK.double()),
    )
    dweight_TK = ops.combine_dweight(x_TD, rows, row_TK)
    assert dweight_TK.dtype == torch.float32
    assert_as_exact_as_torch(
        dweight_TK,
        naive_dweight(x_TD.float(), rows.float(), row_TK),
        naive_dweight(x_TD.double(), rows.double(), row_TK),
    )


def test_gradients_keep_the_dtypes_of_their_tensors() -> None:
    batch = routed_batch(9, 4, 1, 3, 2, 4)
    rows = random_rows(batch).bfloat16().requires_grad_()
    weight_TK = batch.routing.weight_TK.float().requires_grad_()
    ops.combine(rows, batch.row_TK, weight_TK).sum().backward()
    assert (rows.grad.dtype, weight_TK.grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "sizes",
    few_of(
        map(pytest.param, [(7, 3, 2, 2, 2, 2), (1, 1, 1, 1, 1, 1), (5, 2, 1, 3, 3, 0), (0, 2, 1, 2, 1, 1)])
    ),
)
def test_gradcheck(sizes: tuple[int, ...], weighted: bool) -> None:
    batch = routed_batch(*sizes)
    x_TD, rows_SD = batch.x_TD.requires_grad_(), random_rows(batch).requires_grad_()
    weight_TK = batch.routing.weight_TK.requires_grad_() if weighted else None
    row_TK, num_rows = batch.row_TK, batch.num_rows
    torch.autograd.gradcheck(lambda x, weight: ops.dispatch(x, row_TK, weight, num_rows), (x_TD, weight_TK))
    torch.autograd.gradcheck(lambda rows, weight: ops.combine(rows, row_TK, weight), (rows_SD, weight_TK))


@pytest.mark.parametrize("relayout", [torch.clone, transposed_in_memory])
@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck(relayout, weighted: bool) -> None:
    batch = routed_batch(7, 3, 2, 2, 2, 2)
    weight_TK = relayout(batch.routing.weight_TK).requires_grad_() if weighted else None
    x_TD, row_TK, rows_SD = relayout(batch.x_TD), relayout(batch.row_TK), relayout(random_rows(batch))
    opcheck(torch.ops.lancet.combine.default, (rows_SD.clone().requires_grad_(), row_TK, weight_TK))
    opcheck(torch.ops.lancet.combine_dweight.default, (x_TD, rows_SD, row_TK))
    x_TD = x_TD.requires_grad_()
    # What a caller does not know is a symbol; what it knows, a number.
    opcheck(torch.ops.lancet.dispatch.default, (x_TD, row_TK, weight_TK, row_TK.numel()))
    opcheck(torch.ops.lancet.dispatch.default, (x_TD, row_TK, weight_TK, row_TK.numel(), batch.num_rows))
