"""Permute, combine, activations and their gradients against the ops and their references."""

import pytest
import torch
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.kernels import rows as kernels
from lancet_kernels.kernels.config import ACTIVATIONS
from tests.grids import few_of
from tests.poisoned_buffers import poisoned_buffers

# (T, D, E, K, C): none, one, odd, no capacity, all to one expert's buffer, wider than a tile, many choices
SIZES = [
    (0, 5, 2, 1, 3),
    (1, 1, 1, 1, 1),
    (7, 3, 5, 3, 3),
    (7, 8, 4, 2, 0),
    (65, 33, 3, 2, 50),
    (13, 1030, 8, 4, 4),
    (65, 64, 64, 8, 6),
    (9, 40, 12, 12, 9),
    (5, 16, 512, 8, 2),
]
ALL_TO_ONE = SIZES[2:5]  # sizes that are also tried with all tokens alike
DTYPES = list(kernels.DTYPES)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Batch:
    """Tokens, a routing that drops some, and rows from the experts; behind the last one, rows of NaN."""

    def __init__(self, size: tuple[int, ...], dtype: torch.dtype, one: bool = False) -> None:
        tokens, width, experts, top_k, capacity = size
        rng = generator(sum(size))
        logits_TE = torch.randn(tokens, experts, generator=rng)
        logits_TE = logits_TE[:1].repeat(tokens, 1) if one else logits_TE
        used_E = torch.zeros(experts, dtype=torch.int64)
        expert_TK, slot_TK, self.weight_TK, used_E = ops.gate(
            logits_TE, used_E, None, None, "topk", top_k, capacity
        )
        count_WL = ops.kept_counts(used_E, capacity, 1)
        self.row_TK = ops.send_rows(expert_TK, slot_TK, count_WL)
        self.num_rows = int(count_WL.sum())
        self.x_TD = torch.randn(tokens, width, dtype=torch.float64, generator=rng).to(dtype)
        rows_SD = torch.randn(self.num_rows, width, dtype=torch.float64, generator=rng).to(dtype)
        self.rows_SD = torch.nn.functional.pad(rows_SD, (0, 0, 0, 3), value=torch.nan)

    def to(self, device: torch.device) -> "Batch":
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self

    def weight(self, weighted: bool) -> Tensor | None:
        return self.weight_TK if weighted else None


def sum_in_order(batch: Batch, weight_TK: Tensor | None) -> Tensor:
    """combine, written out: products rounded, then added to zero one choice after the other."""
    dtype = torch.promote_types(batch.rows_SD.dtype, torch.float32)
    acc_TD = torch.zeros(batch.x_TD.shape, dtype=dtype)
    for k in range(batch.row_TK.shape[1]):
        kept_T = batch.row_TK[:, k] >= 0
        row_RD = batch.rows_SD[batch.row_TK[kept_T, k]].to(dtype)
        acc_TD[kept_T] += row_RD if weight_TK is None else row_RD * weight_TK[kept_T, k : k + 1]
    return acc_TD.to(batch.rows_SD.dtype)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", few_of(DTYPES))
def test_permute_is_dispatch_and_combine_adds_in_order(
    dtype: torch.dtype, weighted: bool, device: torch.device
) -> None:
    """Bit for bit; rows behind the last one keep what they held. The op combine fuses products into sums of
    float32 rows."""
    for size, one in [*((size, False) for size in SIZES), *((size, True) for size in ALL_TO_ONE)]:
        batch = Batch(size, dtype, one)
        weight_TK = batch.weight(weighted)
        dispatched = ops.dispatch(batch.x_TD, batch.row_TK, weight_TK, batch.num_rows)
        expected = sum_in_order(batch, weight_TK)
        by_op = ops.combine(batch.rows_SD, batch.row_TK, weight_TK)
        sums_TD = ops.combine(batch.rows_SD.abs().double(), batch.row_TK, None)
        batch.to(device)
        weight_TK = batch.weight(weighted)
        with poisoned_buffers():
            rows_SD = kernels.permute(batch.x_TD, batch.row_TK, weight_TK, batch.num_rows + 2)
            out_TD = kernels.combine(batch.rows_SD, batch.row_TK, weight_TK).cpu()
        assert rows_SD[batch.num_rows :].isnan().all()
        assert_same_bits(rows_SD[: batch.num_rows], dispatched)
        assert_same_bits(out_TD, expected)
        if dtype != torch.float32:
            assert_same_bits(by_op, expected)
        allowed_TD = size[3] * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * sums_TD
        assert ((out_TD.double() - by_op.double()).abs() <= allowed_TD).all()


@pytest.mark.parametrize("dtype", few_of(DTYPES))
def test_combine_dweight(dtype: torch.dtype, device: torch.device) -> None:
    """As exact as torch in the same dtype, against float64."""
    for size in SIZES:
        batch = Batch(size, dtype)
        x_TD, rows_SD, row_TK = batch.x_TD, batch.rows_SD, batch.row_TK
        same = ops.combine_dweight(x_TD, rows_SD, row_TK)
        exact = ops.combine_dweight(x_TD.double(), rows_SD.double(), row_TK)
        # Two orders of D additions: each may be off by eps times the sum of magnitudes, in practice far less.
        magnitude = ops.combine_dweight(x_TD.double().abs(), rows_SD.double().abs(), row_TK)
        batch.to(device)
        with poisoned_buffers():
            dweight_TK = kernels.combine_dweight(batch.x_TD, batch.rows_SD, batch.row_TK).cpu()
        assert dweight_TK.dtype == same.dtype
        assert (dweight_TK[row_TK < 0] == 0).all()
        allowed = 4 * torch.finfo(same.dtype).eps * magnitude
        assert ((dweight_TK.double() - exact).abs() <= allowed).all()
        assert ((dweight_TK - same).abs() <= 2 * allowed).all()


def test_parts_give_the_bits_of_the_whole(device: torch.device) -> None:
    """However the batch is cut: no sum depends on where in a tile a token stands."""
    batch = Batch((23, 1100, 4, 3, 12), torch.float32).to(device)
    whole = kernels.combine(batch.rows_SD, batch.row_TK, batch.weight_TK)
    whole_dweight = kernels.combine_dweight(batch.x_TD, batch.rows_SD, batch.row_TK)
    for part in (slice(0, 1), slice(1, 10), slice(10, 23)):
        row_TK, weight_TK = batch.row_TK[part], batch.weight_TK[part]
        assert torch.equal(kernels.combine(batch.rows_SD, row_TK, weight_TK), whole[part])
        dweight_TK = kernels.combine_dweight(batch.x_TD[part], batch.rows_SD, row_TK)
        assert torch.equal(dweight_TK, whole_dweight[part])


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NaN, by intent
def test_rounding_to_bfloat16_is_to_nearest_even(device: torch.device) -> None:
    """Ties, carries into the exponent, subnormals, infinities, and NaN that stays NaN."""
    high = torch.tensor([0x3F80, 0x3F81, 0x7F7F, 0x0000, 0x8000, 0xBFFF, 0x7F80, 0xFF80, 0x7FFF, 0x0001])
    low = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high[:, None] << 16 | low).reshape(1, -1)
    x_TD = torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32)
    # Rows are bf16 going in; the products 1 * weight carry the float32 values, one token each.
    column = x_TD.view(-1, 1)
    index = torch.arange(column.numel(), device=device)[:, None]
    ones = torch.ones(column.numel(), 1, dtype=torch.bfloat16, device=device)
    actual = kernels.permute(ones, index, column.to(device), column.numel()).cpu()
    expected = column.bfloat16()
    assert torch.equal(actual.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(actual[finite].view(torch.int16), expected[finite].view(torch.int16))


@pytest.mark.long
def test_offsets_beyond_32_bits(device: torch.device) -> None:
    """The last of rows with 2^31 + 2^20 elements; memory that nobody touches costs nothing."""
    width = 2**20
    x_TD = torch.arange(width, dtype=torch.float32).remainder(251).half()[None].to(device)
    row_TK = torch.full((1, 1), 2**11, device=device)
    rows_SD = kernels.permute(x_TD, row_TK, None, 2**11 + 1)
    assert torch.equal(rows_SD[-1], x_TD[0])
    assert torch.equal(kernels.combine(rows_SD, row_TK, None), x_TD)


def test_user_errors_name_what_is_wrong() -> None:
    x_TD, rows_SD = torch.zeros(4, 6), torch.zeros(15, 6)
    row_TK, weight_TK = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2)
    gaps_SD, wide_SD, half_SD = torch.zeros(15, 12)[..., ::2], torch.zeros(15, 7), rows_SD.half()
    wrong = [
        ("dtype of x_TD", lambda: kernels.permute(x_TD.long(), row_TK, None, 15)),
        ("layout of x_TD", lambda: kernels.permute(torch.zeros(6, 4).T, row_TK, None, 15)),
        ("shape of row_TK", lambda: kernels.permute(x_TD, row_TK[:3], None, 15)),
        ("dtype of row_TK", lambda: kernels.combine(rows_SD, row_TK.int(), None)),
        ("shape of weight_TK", lambda: kernels.combine(rows_SD, row_TK, weight_TK[:1])),
        ("dtype of weight_TK", lambda: kernels.combine(rows_SD, row_TK, weight_TK.half())),
        ("layout of rows_SD", lambda: kernels.combine(gaps_SD, row_TK, None)),
        ("shape of rows_SD", lambda: kernels.combine_dweight(x_TD, wide_SD, row_TK)),
        ("dtype of rows_SD", lambda: kernels.combine_dweight(x_TD, half_SD, row_TK)),
    ]
    h, count = torch.zeros(3, 5), torch.zeros(1, dtype=torch.int64)
    wrong += [
        ("activation: got 'relu'", lambda: kernels.activation(h, count, "relu")),
        ("width of h_RH: got 5", lambda: kernels.activation(h, count, "swiglu")),
        ("dtype of h_RH", lambda: kernels.activation(h.double(), count, "gelu")),
        ("shape of count", lambda: kernels.activation(h, count[:0], "gelu")),
        ("shape of da_RF", lambda: kernels.activation_backward(h[:, :4].contiguous(), h, count, "gelu")),
    ]
    for message, call in wrong:
        with pytest.raises(UserError, match=message):
            call()


# ---- activations

# (real rows, R, F): nothing, one, odd, no real row, wider than a tile, more rows than a tile
ACTIVATED = [(0, 0, 4), (1, 1, 1), (5, 9, 5), (0, 8, 8), (3, 4, 1030), (557, 600, 7)]


def rows_to_activate(
    size: tuple[int, int, int], kind: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
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
def test_activation_is_as_exact_as_the_op(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    for size in ACTIVATED:
        h, da, count = rows_to_activate(size, kind, dtype)
        with poisoned_buffers():
            a = kernels.activation(h.to(device), count.to(device), kind).cpu()
            dh = kernels.activation_backward(da.to(device), h.to(device), count.to(device), kind).cpu()
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
