"""Dispatch: rows to where those of their experts lie."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from lancet_kernels import ops
from tests.grids import few_of
from tests.ops.op_cases import QUICK, Batch, batches, routed_batch, transposed_in_memory, with_gaps


def naive_dispatch(x_TD: Tensor, row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """Reference, one row after the other."""
    rows_SD = x_TD.new_zeros(int((row_TK >= 0).sum()), x_TD.shape[1])
    for t in range(row_TK.shape[0]):
        for k in range(row_TK.shape[1]):
            if row_TK[t, k] >= 0:
                row_D = x_TD[t] if weight_TK is None else x_TD[t] * weight_TK[t, k]
                rows_SD[row_TK[t, k]] = row_D.to(x_TD.dtype)
    return rows_SD


@QUICK
@given(batch=batches(), weighted=st.booleans(), gaps=st.booleans())
def test_against_reference(batch: Batch, weighted: bool, gaps: bool) -> None:
    weight_TK = batch.routing.weight_TK if weighted else None
    expected = naive_dispatch(batch.x_TD, batch.row_TK, weight_TK)
    tensors = [batch.x_TD, batch.row_TK, weight_TK]
    if gaps:
        tensors = [None if t is None else with_gaps(t) for t in tensors]
    actual = ops.dispatch(*tensors, batch.row_TK.numel())
    assert actual.shape == (batch.num_rows, batch.x_TD.shape[1])
    assert torch.equal(actual, expected)


@QUICK
@given(batch=batches())
def test_dropped_tokens_are_not_read(batch: Batch) -> None:
    """A token none of whose choices is kept may hold anything."""
    dropped_T = (batch.row_TK < 0).all(1)
    x_TD = batch.x_TD.masked_fill(dropped_T[:, None], torch.nan)
    expected = ops.dispatch(batch.x_TD, batch.row_TK, None, batch.num_rows)
    assert torch.equal(ops.dispatch(x_TD, batch.row_TK, None, batch.num_rows), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
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
        lambda x, weight: ops.dispatch(x, batch.row_TK, weight, batch.num_rows), (x_TD, weight_TK)
    )


@pytest.mark.parametrize("relayout", [torch.clone, transposed_in_memory])
@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck(relayout, weighted: bool) -> None:
    batch = routed_batch(7, 3, 2, 2, 2, 2)
    weight_TK = relayout(batch.routing.weight_TK).requires_grad_() if weighted else None
    x_TD, row_TK = relayout(batch.x_TD).requires_grad_(), relayout(batch.row_TK)
    # What a caller does not know is a symbol; what it knows, a number.
    opcheck(torch.ops.lancet.dispatch.default, (x_TD, row_TK, weight_TK, row_TK.numel()))
    opcheck(torch.ops.lancet.dispatch.default, (x_TD, row_TK, weight_TK, row_TK.numel(), batch.num_rows))


def test_no_rows_and_no_tokens() -> None:
    nothing = torch.zeros(0, 2, dtype=torch.int64)
    rows = ops.dispatch(torch.zeros(0, 3), nothing, None, 0)
    assert rows.shape == (0, 3)
    assert ops.combine(rows, nothing, None).shape == (0, 3)
    dropped = torch.full((4, 2), -1)
    assert ops.dispatch(torch.ones(4, 3), dropped, None, 8).shape == (0, 3)
    assert ops.combine(rows, dropped, None).tolist() == [[0, 0, 0]] * 4
