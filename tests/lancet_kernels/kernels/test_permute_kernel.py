"""Permute, combine and their gradients against `ops.dispatch`, `ops.combine` and their references."""

import pytest
import torch
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.kernels import permute as kernels
from lancet_kernels.kernels.permute import RowConfig
from tests.grids import few_of
from tests.guarded_memory import guarded_memory

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
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Batch:
    """Rows, a routing that drops some, and expert outputs that are NaN wherever nobody sits."""

    def __init__(self, size: tuple[int, ...], dtype: torch.dtype, one: bool = False) -> None:
        tokens, width, self.experts, top_k, self.capacity = size
        rng = generator(sum(size))
        logits_TE = torch.randn(tokens, self.experts, generator=rng)
        logits_TE = logits_TE[:1].repeat(tokens, 1) if one else logits_TE
        used_E = torch.zeros(self.experts, dtype=torch.int64)
        routing = ops.gate(logits_TE, used_E, None, None, "topk", top_k, self.capacity)
        self.expert_TK, self.slot_TK, self.weight_TK, used_E = routing
        self.x_TD = torch.randn(tokens, width, dtype=torch.float64, generator=rng).to(dtype)
        shape = (self.experts, self.capacity, width)
        self.buffer_ECD = torch.randn(shape, dtype=torch.float64, generator=rng).to(dtype)
        self.empty_EC = torch.arange(self.capacity) >= used_E[:, None]
        poison_rows = self.empty_EC[..., None]
        self.buffer_ECD.masked_fill_(poison_rows, torch.nan)

    def to(self, device: torch.device) -> "Batch":
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self

    @property
    def routing(self) -> tuple[Tensor, Tensor]:
        return self.expert_TK, self.slot_TK

    def weight(self, weighted: bool) -> Tensor | None:
        if not weighted:
            return None
        return self.weight_TK.double() if self.x_TD.dtype == torch.float64 else self.weight_TK


def sum_in_order(batch: Batch, weight_TK: Tensor | None) -> Tensor:
    """combine, written out: products rounded, then added to zero one choice after the other."""
    dtype = torch.promote_types(batch.buffer_ECD.dtype, torch.float32)
    acc_TD = torch.zeros(batch.x_TD.shape, dtype=dtype)
    for k in range(batch.expert_TK.shape[1]):
        kept_T = batch.slot_TK[:, k] < batch.capacity
        row_RD = batch.buffer_ECD[batch.expert_TK[kept_T, k], batch.slot_TK[kept_T, k]].to(dtype)
        acc_TD[kept_T] += row_RD if weight_TK is None else row_RD * weight_TK[kept_T, k : k + 1]
    return acc_TD.to(batch.buffer_ECD.dtype)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", few_of(DTYPES))
def test_permute_is_dispatch(dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
    """Bit for bit where a row sits; all other rows keep what they held."""
    for size in SIZES:
        for one in (False, True) if size in ALL_TO_ONE else (False,):
            batch = Batch(size, dtype, one)
            expected = ops.dispatch(
                batch.x_TD, *batch.routing, batch.weight(weighted), 1, batch.experts, batch.capacity
            )[0]
            batch.to(device)
            with guarded_memory():
                buffer_ECD = kernels.permute(
                    batch.x_TD, *batch.routing, batch.weight(weighted), batch.experts, batch.capacity
                )
            assert buffer_ECD[batch.empty_EC].isnan().all()
            assert_same_bits(buffer_ECD[~batch.empty_EC], expected[~batch.empty_EC.cpu()])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", few_of(DTYPES))
def test_combine_adds_in_order(dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
    """Bit for bit the sum k = 0, 1, ...; with K <= 4 that of the op; NaN in the padding is not read."""
    for size in SIZES:
        for one in (False, True) if size in ALL_TO_ONE else (False,):
            batch = Batch(size, dtype, one)
            expected = sum_in_order(batch, batch.weight(weighted))
            by_op = ops.combine(batch.buffer_ECD[None], *batch.routing, batch.weight(weighted))
            batch.to(device)
            with guarded_memory():
                out_TD = kernels.combine(batch.buffer_ECD, *batch.routing, batch.weight(weighted)).cpu()
            assert_same_bits(out_TD, expected)
            if size[3] <= 4:
                assert_same_bits(out_TD, by_op)
            # Two orders of K additions, and then perhaps the two neighbours of a tie.
            size_ECD, (expert_TK, slot_TK) = (
                batch.buffer_ECD.cpu()[None].abs(),
                Batch(size, dtype, one).routing,
            )
            sums_TD = ops.combine(size_ECD.double(), expert_TK, slot_TK, None)
            acc_eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
            allowed_TD = (size[3] * acc_eps + torch.finfo(dtype).eps) * sums_TD
            assert ((out_TD.double() - by_op.double()).abs() <= allowed_TD).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_dweight(dtype: torch.dtype, device: torch.device) -> None:
    """As exact as torch in the same dtype, against float64."""
    for size in SIZES:
        batch = Batch(size, dtype)
        same = ops.combine_dweight(batch.x_TD, batch.buffer_ECD[None], *batch.routing)
        exact = ops.combine_dweight(batch.x_TD.double(), batch.buffer_ECD[None].double(), *batch.routing)
        batch.to(device)
        with guarded_memory():
            dweight_TK = kernels.combine_dweight(batch.x_TD, batch.buffer_ECD, *batch.routing).cpu()
        assert dweight_TK.dtype == same.dtype
        assert (dweight_TK[batch.slot_TK.cpu() >= batch.capacity] == 0).all()
        # Two orders of D additions: each may be off by eps times the sum of magnitudes, in practice far less.
        magnitude = ops.combine_dweight(
            batch.x_TD.cpu().double().abs(), batch.buffer_ECD.cpu()[None].double().abs(),
            *(x.cpu() for x in batch.routing),
        )  # fmt: skip
        allowed = 4 * torch.finfo(same.dtype).eps * magnitude
        if dtype != torch.float64:
            assert ((dweight_TK.double() - exact).abs() <= allowed).all()
        assert ((dweight_TK - same).abs() <= 2 * allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_is_the_gradient_of_the_other(dtype: torch.dtype, device: torch.device) -> None:
    """What autograd computes through the ops is what the kernels compute from the gradient of the output."""
    batch = Batch((37, 24, 5, 3, 15), dtype)
    buffer_ECD = batch.buffer_ECD.nan_to_num(0.0)[None].requires_grad_()
    weight_TK = batch.weight_TK.clone().requires_grad_()
    ops.combine(buffer_ECD, *batch.routing, weight_TK).backward(batch.x_TD)
    with guarded_memory():
        inputs = [x.to(device) for x in (batch.x_TD, *batch.routing, batch.weight_TK)]
        dbuffer_ECD = kernels.permute(*inputs, batch.experts, batch.capacity).cpu()
        dweight_TK = kernels.combine_dweight(inputs[0], buffer_ECD[0].detach().to(device), *inputs[1:3])
    assert_same_bits(dbuffer_ECD[~batch.empty_EC], buffer_ECD.grad[0][~batch.empty_EC])
    torch.testing.assert_close(dweight_TK.cpu(), weight_TK.grad, rtol=1e-5, atol=1e-5)

    x_TD, weight_TK = batch.x_TD.clone().requires_grad_(), batch.weight_TK.clone().requires_grad_()
    sizes = (1, batch.experts, batch.capacity)
    grad = batch.buffer_ECD[None]  # NaN where nobody sits, which no gradient may see
    ops.dispatch(x_TD, *batch.routing, weight_TK, *sizes).backward(grad)
    with guarded_memory():
        dx_TD = kernels.combine(grad[0].to(device), *inputs[1:])
        dweight_TK = kernels.combine_dweight(inputs[0], grad[0].to(device), *inputs[1:3])
    assert_same_bits(dx_TD, x_TD.grad)
    torch.testing.assert_close(dweight_TK.cpu(), weight_TK.grad, rtol=1e-5, atol=1e-5)


def test_parts_give_the_bits_of_the_whole(device: torch.device) -> None:
    """However the batch is cut: no sum depends on where in a tile a token stands."""
    batch = Batch((23, 1100, 4, 3, 12), torch.float32).to(device)
    whole = kernels.combine(batch.buffer_ECD, *batch.routing, batch.weight_TK)
    whole_dweight = kernels.combine_dweight(batch.x_TD, batch.buffer_ECD, *batch.routing)
    for part in (slice(0, 1), slice(1, 10), slice(10, 23)):
        routing = [x[part] for x in (*batch.routing, batch.weight_TK)]
        assert torch.equal(kernels.combine(batch.buffer_ECD, *routing), whole[part])
        dweight_TK = kernels.combine_dweight(batch.x_TD[part], batch.buffer_ECD, *routing[:2])
        assert torch.equal(dweight_TK, whole_dweight[part])


def test_every_configuration_moves_the_same_rows(device: torch.device) -> None:
    batch = Batch((11, 700, 4, 2, 4), torch.bfloat16).to(device)
    args = (batch.x_TD, *batch.routing, batch.weight_TK, batch.experts, batch.capacity)
    expected = [kernels.permute(*args), kernels.combine(batch.buffer_ECD, *args[1:4])]
    assert all(config.is_valid() for config in RowConfig.candidates(700))
    assert not RowConfig(3, 64).is_valid()
    assert not RowConfig(64, 1024).is_valid()
    for config in (RowConfig(1, 256), RowConfig(4, 1024), RowConfig(16, 256, 8)):
        buffer_ECD = kernels.permute(*args, config=config)
        assert torch.equal(buffer_ECD[~batch.empty_EC], expected[0][~batch.empty_EC])
        assert torch.equal(kernels.combine(batch.buffer_ECD, *args[1:4], config=config), expected[1])
        kernels.combine_dweight(batch.x_TD, batch.buffer_ECD, *batch.routing, config=config)


def test_permute_into_a_given_buffer(device: torch.device) -> None:
    """As a region of symmetric memory is: rows that nobody takes are not touched."""
    batch = Batch((9, 6, 3, 2, 5), torch.float32).to(device)
    out = torch.full((3, 5, 6), 7.0, device=device)
    result = kernels.permute(batch.x_TD, *batch.routing, None, 3, 5, out=out)
    assert result is out
    assert (out[batch.empty_EC] == 7).all()
    assert not (out[~batch.empty_EC] == 7).any()


def test_by_hand(device: torch.device) -> None:
    """Token 0 sums two rows with weights 2 and 10; token 1 has one choice dropped."""
    buffer_ECD = torch.tensor([[[1.0], [2]], [[3], [4]]], device=device)
    expert_TK = torch.tensor([[0, 1], [1, 0]], device=device)
    slot_TK = torch.tensor([[0, 1], [0, 2]], device=device)
    weight_TK = torch.tensor([[2.0, 10], [100, 1000]], device=device)
    assert kernels.combine(buffer_ECD, expert_TK, slot_TK, weight_TK).tolist() == [[42], [300]]
    x_TD = torch.tensor([[1.0], [7]], device=device)
    assert kernels.combine_dweight(x_TD, buffer_ECD, expert_TK, slot_TK).tolist() == [[1, 4], [21, 0]]
    out = torch.zeros(2, 2, 1, device=device)
    kernels.permute(x_TD, expert_TK, slot_TK, weight_TK, 2, 2, out=out)
    assert out.tolist() == [[[2], [0]], [[700], [10]]]


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
    experts = torch.zeros_like(index)
    actual = kernels.permute(ones, experts, index, column.to(device), 1, column.numel())[0].cpu()
    expected = column.bfloat16()
    assert torch.equal(actual.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(actual[finite].view(torch.int16), expected[finite].view(torch.int16))


@pytest.mark.long
def test_offsets_beyond_32_bits(device: torch.device) -> None:
    """The last slot of a buffer of 2^31 + 2^20 elements; memory that nobody touches costs nothing."""
    width = 2**20
    x_TD = torch.arange(width, dtype=torch.float32).remainder(251).half()[None].to(device)
    buffer_ECD = torch.empty(1, 2**11 + 1, width, dtype=torch.float16, device=device)
    expert_TK = torch.zeros(1, 1, dtype=torch.int64, device=device)
    slot_TK = torch.full_like(expert_TK, 2**11)
    kernels.permute(x_TD, expert_TK, slot_TK, None, 1, 2**11 + 1, out=buffer_ECD)
    assert torch.equal(buffer_ECD[0, -1], x_TD[0])
    assert torch.equal(kernels.combine(buffer_ECD, expert_TK, slot_TK, None), x_TD)


def test_user_errors_name_what_is_wrong() -> None:
    x_TD, buffer_ECD = torch.zeros(4, 6), torch.zeros(3, 5, 6)
    expert_TK = torch.zeros(4, 2, dtype=torch.int64)
    slot_TK, weight_TK = expert_TK, torch.zeros(4, 2)
    gaps_ECD, wide_ECD, half_ECD = torch.zeros(3, 5, 12)[..., ::2], torch.zeros(3, 5, 7), buffer_ECD.half()
    wrong = [
        ("dtype of x_TD", lambda: kernels.permute(x_TD.long(), expert_TK, slot_TK, None, 3, 5)),
        ("layout of x_TD", lambda: kernels.permute(torch.zeros(6, 4).T, expert_TK, slot_TK, None, 3, 5)),
        ("shape of out", lambda: kernels.permute(x_TD, expert_TK, slot_TK, None, 3, 5, out=buffer_ECD[:2])),
        ("dtype of out", lambda: kernels.permute(x_TD, expert_TK, slot_TK, None, 3, 5, out=half_ECD)),
        ("shape of expert_TK", lambda: kernels.permute(x_TD, expert_TK[:3], slot_TK, None, 3, 5)),
        ("shape of slot_TK", lambda: kernels.combine(buffer_ECD, expert_TK, slot_TK[:, :1], None)),
        ("dtype of slot_TK", lambda: kernels.combine(buffer_ECD, expert_TK, slot_TK.int(), None)),
        ("shape of weight_TK", lambda: kernels.combine(buffer_ECD, expert_TK, slot_TK, weight_TK[:1])),
        ("dtype of weight_TK", lambda: kernels.combine(buffer_ECD, expert_TK, slot_TK, weight_TK.half())),
        ("layout of buffer_ECD", lambda: kernels.combine(gaps_ECD, expert_TK, slot_TK, None)),
        ("shape of buffer_ECD", lambda: kernels.combine_dweight(x_TD, wide_ECD, expert_TK, slot_TK)),
        ("dtype of buffer_ECD", lambda: kernels.combine_dweight(x_TD, half_ECD, expert_TK, slot_TK)),
        ("row config", lambda: kernels.combine(buffer_ECD, expert_TK, slot_TK, None, config=RowConfig(3, 4))),
    ]  # fmt: skip
    for message, call in wrong:
        with pytest.raises(UserError, match=message):
            call()
