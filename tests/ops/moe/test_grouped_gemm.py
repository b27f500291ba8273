"""Grouped GEMM with its input and weight gradients, on torch's fast path (rows of a multiple of 16 bytes) and
off it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.ops.moe.expert_ops import _for_fast_path
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

# Expert 1 has rows from no rank, expert 0 from one of two; expert 3 from both.
COUNTS = torch.tensor([[0, 0, 3, 4], [2, 0, 1, 4]])
WIDTHS = st.sampled_from([1, 3, 5, 8])


def naive_grouped_gemm(x_RA: Tensor, count_WL: Tensor, weight_LAB: Tensor, bias_LB: Tensor | None) -> Tensor:
    """Reference, one row after the other."""
    y_RB = x_RA.new_zeros(x_RA.shape[0], weight_LAB.shape[2])
    row = 0
    for e in range(weight_LAB.shape[0]):
        for _ in range(int(count_WL[:, e].sum())):
            row_B = x_RA[row] @ weight_LAB[e]
            y_RB[row] = row_B if bias_LB is None else row_B + bias_LB[e]
            row += 1
    return y_RB


def operands(
    count_WL: Tensor, width_in: int, width_out: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_RA, weight_LAB, bias_LB, dy_RB: float64."""
    rng, local, rows = generator(seed), count_WL.shape[1], int(count_WL.sum())

    shapes = (rows, width_in), (local, width_in, width_out), (local, width_out), (rows, width_out)
    return tuple(torch.randn(shape, dtype=torch.float64, generator=rng) for shape in shapes)


def naive_all(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, count: Tensor) -> list[Tensor]:
    """y; dx, dw, dbias by torch's own GEMMs, one expert after the other, in the dtype given."""
    dx, dw, dbias = torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(weight[:, 0])
    begin = 0
    for e, n in enumerate(count.sum(0).tolist()):
        rows = slice(begin, begin + n)
        dx[rows] = dy[rows] @ weight[e].T
        dw[e], dbias[e] = x[rows].T @ dy[rows], dy[rows].sum(0)
        begin += n
    return [naive_grouped_gemm(x, count, weight, bias), dx, dw, dbias]


def run_all(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, count: Tensor) -> tuple[Tensor, ...]:
    return (
        ops.grouped_gemm(x, count, weight, bias),
        ops.grouped_gemm_dx(dy, count, weight),
        ops.grouped_gemm_dw(x, dy, count),
        ops.grouped_gemm_dbias(dy, count),
    )


@QUICK
@given(
    count=counts(),
    width_in=WIDTHS,
    width_out=WIDTHS,
    biased=st.booleans(),
    gaps=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=SEEDS,
)
def test_against_reference(
    count: Tensor, width_in: int, width_out: int, biased: bool, gaps: bool, dtype: torch.dtype, seed: int
) -> None:
    x, weight, bias, dy = operands(count, width_in, width_out, seed)
    given = x, weight, bias if biased else None, dy, count
    expected = naive_all(*given)
    given = [t if t is None or t is count else t.to(dtype) for t in given]
    if gaps:
        given = [t if t is None else with_gaps(t) for t in given]
    # The allocator hands out memory full of NaN next: experts without rows have gradients of zero.
    for _ in [torch.full_like(weight, torch.nan, dtype=dtype) for _ in range(8)]:
        pass
    actual = run_all(*given)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b.to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("widths", [(64, 40), (37, 29)])
def test_as_exact_as_torch(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    count = torch.tensor([[0, 0, 30, 40], [21, 0, 11, 40]])
    given = [t.to(dtype) for t in operands(count, *widths)]
    exact = naive_all(*(t.double() for t in given), count)
    for _ in [torch.full_like(given[1], torch.nan) for _ in range(8)]:
        pass  # as above, for an expert without rows
    for a, b, c in zip(run_all(*given, count), naive_all(*given, count), exact, strict=True):
        assert_as_exact_as_torch(a, b, c)


@pytest.mark.parametrize(
    ("dtype", "widths", "fast"),
    [
        (torch.bfloat16, (8, 16), True),
        (torch.bfloat16, (8, 5), False),
        (torch.float32, (8, 4), True),
        (torch.float32, (8, 3), False),
        (torch.float64, (8, 16), False),
    ],
)
def test_which_path_runs(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, widths: tuple[int, int], fast: bool
) -> None:
    calls = []
    grouped_mm = torch.nn.functional.grouped_mm

    def spy(*args: Tensor, **kwargs: Tensor) -> Tensor:
        calls.append(args)
        return grouped_mm(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", spy)
    x, weight, _, dy = (t.to(dtype) for t in operands(COUNTS, *widths))
    run_all(x, weight, None, dy, COUNTS)
    assert len(calls) == (3 if fast else 0)


WEIGHT_LAYOUTS = {
    "transposed": lambda w: w.transpose(1, 2).contiguous().transpose(1, 2),
    "experts inside": lambda w: w.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "slice of odd rows": lambda w: torch.nn.functional.pad(w, (1, 2), value=torch.nan)[..., 1:-2],
    "slice of aligned rows": lambda w: torch.nn.functional.pad(w, (3, 5), value=torch.nan)[..., 3:-5],
    "one for all": lambda w: w[:1].expand_as(w),
    "equal rows": lambda w: w[:, :1].expand_as(w),
}


@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("dtype", few_of([torch.bfloat16, torch.float32]))
def test_layout_of_the_weight_does_not_matter(layout: str, dtype: torch.dtype) -> None:
    """grouped_mm refuses strides that are no multiple of 16 bytes."""
    x, weight, _, dy = (t.to(dtype) for t in operands(COUNTS, 8, 16))
    weight = WEIGHT_LAYOUTS[layout](weight)
    assert not weight.is_contiguous()
    for op, buffer in ((ops.grouped_gemm, x), (ops.grouped_gemm_dx, dy)):
        extra = (None,) if op is ops.grouped_gemm else ()
        expected = op(buffer, COUNTS, weight.contiguous(), *extra)
        torch.testing.assert_close(op(buffer, COUNTS, weight, *extra), expected)


def test_copy_for_the_fast_path_only_where_needed() -> None:
    weight = torch.zeros(3, 8, 16, dtype=torch.bfloat16)
    assert _for_fast_path(weight) is weight
    transposed = weight.transpose(1, 2)
    assert _for_fast_path(transposed) is transposed
    odd = torch.zeros(3, 8, 17, dtype=torch.bfloat16)[..., 1:]
    assert _for_fast_path(odd).is_contiguous()


@pytest.mark.parametrize("count", few_of([COUNTS, torch.tensor([[0, 1]]), torch.tensor([[0]])]))
@pytest.mark.parametrize("biased", few_of([False, True], 1))
def test_gradcheck(count: Tensor, biased: bool) -> None:
    x, weight, bias, _ = operands(count, 3, 2)
    leaves = [t.requires_grad_() for t in ((x, weight, bias) if biased else (x, weight))]
    torch.autograd.gradcheck(lambda x, weight, bias=None: ops.grouped_gemm(x, count, weight, bias), leaves)


@pytest.mark.parametrize(
    ("relayout", "dtype"), few_of([(torch.clone, torch.float64), (transposed_in_memory, torch.bfloat16)])
)
def test_opcheck(relayout, dtype: torch.dtype) -> None:
    x, weight, bias, dy = (relayout(t.to(dtype)) for t in operands(COUNTS, 8, 8))
    count = relayout(COUNTS)
    torch.library.opcheck(torch.ops.lancet.grouped_gemm_dx.default, (dy, count, weight))
    torch.library.opcheck(torch.ops.lancet.grouped_gemm_dw.default, (x, dy, count))
    torch.library.opcheck(torch.ops.lancet.grouped_gemm_dbias.default, (dy, count))
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    torch.library.opcheck(torch.ops.lancet.grouped_gemm.default, (leaves[0], count, leaves[1], leaves[2]))
    torch.library.opcheck(torch.ops.lancet.grouped_gemm.default, (x, count, weight, None))


def test_empty_groups_that_grouped_mm_leaves_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the dw of an expert without rows is whatever memory held; here NaN stands for it."""
    grouped_mm = torch.nn.functional.grouped_mm

    def unwritten(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        out = grouped_mm(a, b, offs=offs)
        if out.dim() == 3:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", unwritten)
    x, _, _, dy = (t.bfloat16() for t in operands(COUNTS, 8, 16))
    dw_LAB = ops.grouped_gemm_dw(x, dy, COUNTS)
    assert torch.isfinite(dw_LAB).all()
    assert not dw_LAB[1].any()


def test_bias_gradient_of_many_rows_is_summed_in_float32() -> None:
    """600 ones: a bfloat16 sum taken row by row stops at 256."""
    dy_RB = torch.ones(600, 1, dtype=torch.bfloat16)
    assert ops.grouped_gemm_dbias(dy_RB, torch.tensor([[600]])).item() == 600


@pytest.mark.parametrize("widths", [(8, 16), (5, 3)], ids=["grouped_mm", "expert by expert"])
def test_rows_behind_the_last_one_are_not_read(widths: tuple[int, int]) -> None:
    x, weight, bias, dy = (t.float() for t in operands(COUNTS, *widths))
    x_more, dy_more = (torch.nn.functional.pad(t, (0, 0, 0, 2), value=torch.nan) for t in (x, dy))
    actual = run_all(x_more, weight, bias, dy_more, COUNTS)
    for a, expected in zip(actual, run_all(x, weight, bias, dy, COUNTS), strict=True):
        torch.testing.assert_close(a[: len(expected)], expected)


@pytest.mark.parametrize("width", [3, 8])
def test_gradient_of_a_transposed_weight_lies_as_the_weight(width: int) -> None:
    """Weights as torch.nn.Linear has them, [L, out, in]: their gradients lie alike without a copy."""
    x, weight, _, dy = operands(COUNTS, width, 5)
    linear = weight.transpose(1, 2).contiguous().requires_grad_()
    ops.grouped_gemm(x, COUNTS, linear.transpose(1, 2), None).backward(dy)
    expected = ops.grouped_gemm_dw(x, dy, COUNTS)
    torch.testing.assert_close(linear.grad, expected.transpose(1, 2))
    assert linear.grad.is_contiguous()
    torch.library.opcheck(torch.ops.lancet.grouped_gemm_dw.default, (x, dy, COUNTS, True))
