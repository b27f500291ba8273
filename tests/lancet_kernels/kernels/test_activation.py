"""The activation of the experts as kernels, against `ops.moe.expert_activation` and float64."""

import pytest
import torch
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.kernels.config import ACTIVATIONS
from lancet_kernels.kernels.rows import ACTIVATION_DTYPES as DTYPES
from lancet_kernels.kernels.rows import activation, activation_backward
from tests.grids import few_of
from tests.poisoned_buffers import poisoned_buffers

# (real rows, R, F): nothing, one, odd, no real row, wider than a tile, more rows than a tile
SIZES = [(0, 0, 4), (1, 1, 1), (5, 9, 5), (0, 8, 8), (3, 4, 1030), (557, 600, 7)]


def inputs(size: tuple[int, int, int], kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """h and da, NaN where a row is not real; how many are."""
    count, rows, hidden = size
    rng = torch.Generator().manual_seed(rows)
    width = 2 * hidden if kind == "swiglu" else hidden
    h = 3 * torch.randn(rows, width, generator=rng, dtype=torch.float64)
    da = torch.randn(rows, hidden, generator=rng, dtype=torch.float64)
    for t in (h, da):
        t[count:] = torch.nan
    return h.to(dtype), da.to(dtype), torch.tensor([count])


@pytest.mark.parametrize("dtype", few_of(DTYPES))
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_as_exact_as_the_op(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    for size in SIZES:
        h, da, count = inputs(size, kind, dtype)
        with poisoned_buffers():
            a = activation(h.to(device), count.to(device), kind).cpu()
            dh = activation_backward(da.to(device), h.to(device), count.to(device), kind).cpu()
        by_op = ops.expert_activation(h, count[None], kind)
        dh_by_op = ops.expert_activation_backward(da, h, count[None], kind)
        exact = ops.expert_activation(h.double(), count[None], kind)
        dh_exact = ops.expert_activation_backward(da.double(), h.double(), count[None], kind)
        real = size[0]
        for mine, theirs, right in ((a, by_op, exact), (dh, dh_by_op, dh_exact)):
            assert mine.dtype == dtype
            # What is not real holds what it held: the poison.
            assert mine[real:].isnan().all()
            if real:
                off, allowed = (float((t - right)[:real].abs().max()) for t in (mine, theirs))
                one_rounding = torch.finfo(dtype).eps * float(right[:real].abs().max())
                assert off <= 2 * allowed + one_rounding, (size, off, allowed)


def test_user_errors_name_what_is_wrong() -> None:
    h, count = torch.zeros(3, 5), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(UserError, match="activation: got 'relu'"):
        activation(h, count, "relu")
    with pytest.raises(UserError, match="width of h_RH: got 5"):
        activation(h, count, "swiglu")
    with pytest.raises(UserError, match="dtype of h_RH"):
        activation(h.double(), count, "gelu")
    with pytest.raises(UserError, match="shape of count"):
        activation(h, count[:0], "gelu")
    with pytest.raises(UserError, match="shape of da_RF"):
        activation_backward(h[:, :4].contiguous(), h, count, "gelu")
