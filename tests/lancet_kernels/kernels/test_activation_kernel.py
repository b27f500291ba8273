"""The activation of the experts as kernels, against `ops.expert_activation` and float64."""

import pytest
import torch
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.kernels.activation import DTYPES, activation, activation_backward
from lancet_kernels.kernels.activation_names import ACTIVATIONS
from tests.grids import few_of
from tests.guarded_memory import guarded_memory

# (counts of the groups, C, F): nothing, one, odd, no row at all, wider than a tile, more rows than a tile
SIZES = [
    ([], 3, 4),
    ([1], 1, 1),
    ([0, 3, 2], 3, 5),
    ([0, 0], 4, 8),
    ([2, 1], 2, 1030),
    ([300, 0, 257], 300, 7),
]


def buffers(size: tuple, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h and da, NaN where a row is not real; counts; which rows are real."""
    counts, capacity, hidden = size
    rng = torch.Generator().manual_seed(capacity)
    count_G = torch.tensor(counts, dtype=torch.int64)
    width = 2 * hidden if kind == "swiglu" else hidden
    h = 3 * torch.randn(len(counts), capacity, width, generator=rng, dtype=torch.float64)
    da = torch.randn(len(counts), capacity, hidden, generator=rng, dtype=torch.float64)
    real_GC = torch.arange(capacity) < count_G[:, None]
    h, da = (t.to(dtype).masked_fill(~real_GC[..., None], torch.nan) for t in (h, da))
    return h, da, count_G, real_GC


@pytest.mark.parametrize("dtype", few_of(DTYPES))
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_as_exact_as_the_op(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    for size in SIZES:
        h, da, count_G, real_GC = buffers(size, kind, dtype)
        with guarded_memory():
            a = activation(h.to(device), count_G.to(device), kind).cpu()
            dh = activation_backward(da.to(device), h.to(device), count_G.to(device), kind).cpu()
        by_op = ops.expert_activation(h[None], count_G[None], kind)[0]
        dh_by_op = ops.expert_activation_backward(da[None], h[None], count_G[None], kind)[0]
        h64, da64 = h.double(), da.double()
        exact = ops.expert_activation(h64[None], count_G[None], kind)[0]
        dh_exact = ops.expert_activation_backward(da64[None], h64[None], count_G[None], kind)[0]
        for mine, theirs, right in ((a, by_op, exact), (dh, dh_by_op, dh_exact)):
            assert mine.dtype == dtype
            # What is not real holds what it held: the poison.
            assert mine[~real_GC].isnan().all()
            if real_GC.any():
                off, allowed = (float((t - right)[real_GC].abs().max()) for t in (mine, theirs))
                assert off <= 2 * allowed + torch.finfo(dtype).eps


def test_by_hand(device: torch.device) -> None:
    count = torch.tensor([1], device=device)
    h = torch.tensor([[[0.0, 4.0]]], device=device)
    two = torch.full((1, 1, 1), 2.0, device=device)
    assert activation(h, count, "swiglu").item() == 0.0
    assert activation_backward(two, h, count, "swiglu").flatten().tolist() == [4.0, 0.0]
    assert activation_backward(two, h[..., :1].contiguous(), count, "silu").item() == 1.0
    assert activation_backward(two, h[..., :1].contiguous(), count, "gelu").item() == 1.0


def test_user_errors_name_what_is_wrong() -> None:
    h, count = torch.zeros(2, 3, 5), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(UserError, match="activation: got 'relu'"):
        activation(h, count, "relu")
    with pytest.raises(UserError, match="width of h_GCH: got 5"):
        activation(h, count, "swiglu")
    with pytest.raises(UserError, match="dtype of h_GCH"):
        activation(h.double(), count, "gelu")
    with pytest.raises(UserError, match="shape of count_G"):
        activation(h, count[:1], "gelu")
    with pytest.raises(UserError, match="shape of da_GCF"):
        activation_backward(h[..., :4].contiguous(), h, count, "gelu")
