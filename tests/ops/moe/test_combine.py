"""Combine: rows back from the experts, and the gradient of their weights."""

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
@given(batch=batches(), weighted=st.booleans(), gaps=st.booleans(), seed=SEEDS)
def test_against_reference(batch: Batch, weighted: bool, gaps: bool, seed: int) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropped_choices_read_nothing(dtype: torch.dtype) -> None:
    """Not even a row 0 that is infinite."""
    rows_SD = torch.tensor([[torch.inf], [2.0]], dtype=dtype)
    row_TK, weight_TK = torch.tensor([[1, -1], [-1, -1]]), torch.ones(2, 2)
    assert ops.combine(rows_SD, row_TK, weight_TK).tolist() == [[2], [0]]
    assert ops.combine(rows_SD, row_TK, None).tolist() == [[2], [0]]
    assert ops.combine_dweight(rows_SD[1:].repeat(2, 1), rows_SD, row_TK).tolist() == [[4, 0], [0, 0]]


@QUICK
@given(batch=batches())
def test_dispatch_and_combine_are_adjoint(batch: Batch) -> None:
    """<dispatch(x), rows> = <x, combine(rows)>."""
    weight_TK, rows_SD, row_TK = batch.routing.weight_TK, random_rows(batch), batch.row_TK
    left = (ops.dispatch(batch.x_TD, row_TK, weight_TK, batch.num_rows) * rows_SD).sum()
    right = (batch.x_TD * ops.combine(rows_SD, row_TK, weight_TK)).sum()
    torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_exact_as_torch(dtype: torch.dtype) -> None:
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
    rows = random_rows(batch).requires_grad_()
    weight_TK = batch.routing.weight_TK.requires_grad_() if weighted else None
    torch.autograd.gradcheck(lambda r, weight: ops.combine(r, batch.row_TK, weight), (rows, weight_TK))


@pytest.mark.parametrize("relayout", [torch.clone, transposed_in_memory])
@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck(relayout, weighted: bool) -> None:
    batch = routed_batch(7, 3, 2, 2, 2, 2)
    rows, row_TK = relayout(random_rows(batch)), relayout(batch.row_TK)
    weight_TK = relayout(batch.routing.weight_TK).requires_grad_() if weighted else None
    opcheck(torch.ops.lancet.combine.default, (rows.clone().requires_grad_(), row_TK, weight_TK))
    opcheck(torch.ops.lancet.combine_dweight.default, (relayout(batch.x_TD), rows, row_TK))
