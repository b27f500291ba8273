"""The grouped GEMM kernels against float64, within twice the error of the same torch ops in the same dtype.

Every buffer has guard bands, rows beyond the counts and outputs are poisoned with NaN: what a kernel must not
read shows up in its result, what it must not write shows up in the poison.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import gemm_operands
from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.grouped_gemm_kernel import grouped_gemm_dw, grouped_gemm_dx, grouped_gemm_forward
from lancet_kernels.ops.expert_activation import activate
from tests.grids import few_of
from tests.lancet_kernels.kernels.guarded import Guarded

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS = ["none", "gelu", "silu", "swiglu"]
# Small, so that small shapes have several tiles and bands of more than one row of tiles.
CONFIG = GemmConfig(32, 32, 32, 4, 2, group_m=2)

# name -> rows of each expert
COUNTS = {
    "several experts": [20, 41, 33],
    "no rows": [0, 0],
    "one row": [1],
    "all in one expert": [0, 66, 0],
    "many experts": [1, 0, 2, 9, 0, 3, 1],
}
# (A, B): rows of 16 bytes, so tensor descriptors; odd, so masks; and hardly anything
WIDTHS = [(48, 40), (33, 17), (1, 3)]


@dataclass
class Rows:
    """Where the real rows are: indices per expert, and what the launchers take. Two more belong to nobody."""

    number: int
    offset: Tensor
    by_expert: list[Tensor]

    @staticmethod
    def of_case(case: str, device: torch.device) -> "Rows":
        counts = COUNTS[case]
        offset = torch.tensor([0, *counts]).cumsum(0)
        by_expert = [torch.arange(offset[e], offset[e + 1]).to(device) for e in range(len(counts))]
        return Rows(int(offset[-1]) + 2, offset.to(device), by_expert)

    def buffer(self, width: int, dtype: torch.dtype, misalign: int = 0) -> Guarded:
        """Random in the real rows, NaN in the others."""
        flat = torch.full((self.number, width), float("nan"), dtype=dtype)
        for rows in self.by_expert:
            flat[rows.cpu()] = torch.randn(len(rows), width).to(dtype)
        return Guarded(flat.to(self.offset.device), misalign)

    def of(self, expert: int, buffer: Tensor) -> Tensor:
        return buffer[self.by_expert[expert]]

    def assert_others_are_poison(self, buffer: Tensor) -> None:
        flat = buffer.clone()
        for rows in self.by_expert:
            flat[rows] = float("nan")
        assert flat.isnan().all(), "a row that belongs to nobody was written"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def weights(num_experts: int, a: int, b: int, like: Rows, dtype: torch.dtype) -> Guarded:
    weight = torch.randn(num_experts, a, b) / max(a, 1) ** 0.5
    return Guarded(weight.to(like.offset.device, dtype))


def assert_as_good_as_torch(got: Tensor, exact: Tensor, torch_result: Tensor) -> None:
    """max |got - exact| <= 2 max |torch - exact|, plus one rounding of the largest value."""
    if exact.numel() == 0:
        return
    assert not got.isnan().any(), "poison was read, or a result is missing"
    error = (got.double() - exact).abs().max().item()
    allowed = 2 * (torch_result.double() - exact).abs().max().item()
    one_rounding = torch.finfo(got.dtype).eps / 2 * exact.abs().max().item()
    assert error <= allowed + one_rounding


def forward_reference(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    h = x @ weight if bias is None else x @ weight + bias
    return h, h if kind == "none" else activate(h, kind)


def check_forward(
    rows: Rows, a: int, b: int, kind: str, dtype: torch.dtype, *, bias: bool, save_pre: bool,
    misalign: int = 0, config: GemmConfig | None = CONFIG, num_programs: int | None = None,
) -> Tensor:  # fmt: skip
    num_experts, wide = len(rows.by_expert), b * (2 if kind == "swiglu" else 1)
    x, weight = rows.buffer(a, dtype, misalign), weights(num_experts, a, wide, rows, dtype)
    b_LB = Guarded(torch.randn(num_experts, wide).to(rows.offset.device, dtype)) if bias else None
    out = Guarded.poisoned((rows.number, b), dtype, rows.offset.device)
    pre = Guarded.poisoned((rows.number, wide), dtype, rows.offset.device) if save_pre else None
    result = grouped_gemm_forward(
        x.tensor, rows.offset, weight.tensor, b_LB and b_LB.tensor, activation=kind,
        out=out.tensor, pre=pre and pre.tensor, config=config, num_programs=num_programs,
    )  # fmt: skip
    assert result[0] is out.tensor
    assert result[1] is (pre and pre.tensor)
    for e in range(num_experts):
        operands = rows.of(e, x.tensor), weight.tensor[e], b_LB and b_LB.tensor[e]
        h64, y64 = forward_reference(*(t if t is None else t.double() for t in operands), kind)
        h, y = forward_reference(*operands, kind)
        assert_as_good_as_torch(rows.of(e, out.tensor), y64, y)
        if pre:
            assert_as_good_as_torch(rows.of(e, pre.tensor), h64, h)
    for output in filter(None, (out, pre)):
        rows.assert_others_are_poison(output.tensor)
        output.assert_guards_unchanged()
    for operand in filter(None, (x, weight, b_LB)):
        operand.assert_unchanged()
    return out.tensor


def check_dx(rows: Rows, a: int, b: int, dtype: torch.dtype, config: GemmConfig | None = CONFIG) -> None:
    num_experts = len(rows.by_expert)
    dy, weight = rows.buffer(b, dtype), weights(num_experts, a, b, rows, dtype)
    out = Guarded.poisoned((rows.number, a), dtype, rows.offset.device)
    grouped_gemm_dx(dy.tensor, rows.offset, weight.tensor, out=out.tensor, config=config)
    for e in range(num_experts):
        dy_e, w_e = rows.of(e, dy.tensor), weight.tensor[e]
        assert_as_good_as_torch(rows.of(e, out.tensor), dy_e.double() @ w_e.double().T, dy_e @ w_e.T)
    rows.assert_others_are_poison(out.tensor)
    out.assert_guards_unchanged()
    for operand in (dy, weight):
        operand.assert_unchanged()


def check_dw(rows: Rows, a: int, b: int, dtype: torch.dtype, config: GemmConfig | None = CONFIG) -> None:
    num_experts = len(rows.by_expert)
    x, dy = rows.buffer(a, dtype), rows.buffer(b, dtype)
    dw = Guarded.poisoned((num_experts, a, b), dtype, rows.offset.device)
    grouped_gemm_dw(x.tensor, dy.tensor, rows.offset, dw=dw.tensor, config=config)
    for e in range(num_experts):
        x_e, dy_e = rows.of(e, x.tensor), rows.of(e, dy.tensor)
        assert_as_good_as_torch(dw.tensor[e], x_e.double().T @ dy_e.double(), x_e.T @ dy_e)
    dw.assert_guards_unchanged()
    for operand in (x, dy):
        operand.assert_unchanged()


@pytest.mark.parametrize("case", COUNTS)
@pytest.mark.parametrize(("a", "b"), few_of(WIDTHS, 1))
def test_every_count_and_width(case: str, a: int, b: int, device: torch.device) -> None:
    rows = Rows.of_case(case, device)
    check_forward(rows, a, b, "none", torch.float16, bias=True, save_pre=False)
    check_dx(rows, a, b, torch.float16)
    check_dw(rows, a, b, torch.float16)


@pytest.mark.parametrize("dtype", few_of(DTYPES))
@pytest.mark.parametrize("kind", few_of(ACTIVATIONS, 0, -1))
def test_epilogues(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    rows = Rows.of_case("several experts", device)
    check_forward(rows, 48, 40, kind, dtype, bias=True, save_pre=True)


@pytest.mark.parametrize("kind", ACTIVATIONS[1:])
def test_epilogues_of_odd_width(kind: str, device: torch.device) -> None:
    rows = Rows.of_case("all in one expert", device)
    check_forward(rows, 33, 17, kind, torch.float16, bias=True, save_pre=True)


@pytest.mark.parametrize("dtype", few_of(DTYPES))
def test_gradients(dtype: torch.dtype, device: torch.device) -> None:
    check_dw(Rows.of_case("several experts", device), 48, 40, dtype)
    check_dw(Rows.of_case("several experts", device), 33, 17, dtype)
    check_dx(Rows.of_case("several experts", device), 48, 40, dtype)
    check_dx(Rows.of_case("all in one expert", device), 17, 33, dtype)


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_without_bias_and_without_pre(kind: str, device: torch.device) -> None:
    check_forward(
        Rows.of_case("several experts", device), 48, 40, kind, torch.float16, bias=False, save_pre=False
    )


def test_rows_that_no_descriptor_may_start_at(device: torch.device) -> None:
    """Rows 2 bytes off a multiple of 16: the launcher must fall back to plain loads."""
    rows = Rows.of_case("several experts", device)
    check_forward(rows, 48, 40, "none", torch.float16, bias=False, save_pre=False, misalign=1)


def test_default_configurations(device: torch.device) -> None:
    rows = Rows.of_case("several experts", device)
    for dtype in (torch.float16, torch.float32):
        check_forward(rows, 48, 40, "swiglu", dtype, bias=True, save_pre=True, config=None)
        check_dx(rows, 48, 40, dtype, config=None)
        check_dw(rows, 48, 40, dtype, config=None)


def test_many_experts_most_of_them_empty(device: torch.device) -> None:
    """600 experts with up to 5 rows, of which 1 in 40 has any, against one gather of weights."""
    count = torch.randint(1, 6, (600,)) * (torch.rand(600) < 1 / 40)
    offset = torch.cat([count.new_zeros(1), count.cumsum(0)])
    x, weight = torch.randn(int(offset[-1]), 8), torch.randn(600, 8, 8)
    of_row = weight[torch.arange(600).repeat_interleave(count)]
    exact = (x.double()[:, None] @ of_row.double())[:, 0]
    out = Guarded.poisoned(tuple(x.shape), torch.float32, device)
    grouped_gemm_forward(
        x.to(device), offset.to(device), weight.to(device), out=out.tensor, config=CONFIG, num_programs=3
    )
    torch.testing.assert_close(out.tensor.cpu().double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_how_many_programs_share_the_tiles_changes_nothing(device: torch.device) -> None:
    results = []
    for num_programs in (1, 3, 1000):
        torch.manual_seed(1)
        rows = Rows.of_case("several experts", device)
        out = check_forward(
            rows, 48, 72, "none", torch.float16, bias=False, save_pre=False, num_programs=num_programs
        )
        results.append(out.nan_to_num())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_offsets_beyond_the_rows_stay_within_the_buffer(device: torch.device) -> None:
    x = torch.randn(8, 16, device=device)
    weight = torch.randn(2, 16, 16, device=device)
    offset = torch.tensor([0, 4, 13], device=device)
    out = Guarded.poisoned((8, 16), torch.float32, device)
    grouped_gemm_forward(x, offset, weight, out=out.tensor, config=CONFIG)
    out.assert_guards_unchanged()
    torch.testing.assert_close(out.tensor, (x.view(2, 4, 16) @ weight).view(8, 16))
    dw = grouped_gemm_dw(x, x, offset, config=CONFIG)
    torch.testing.assert_close(dw[1], x[4:].T @ x[4:])


def test_only_the_descriptors_conditions_decide(device: torch.device) -> None:
    aligned, odd = torch.zeros(4, 8, dtype=torch.float16), torch.zeros(4, 9, dtype=torch.float16)
    assert gemm_operands.can_use_tma(90, aligned)
    assert not gemm_operands.can_use_tma(80, aligned)
    assert not gemm_operands.can_use_tma(90, aligned.float())
    assert not gemm_operands.can_use_tma(90, aligned, odd)
    assert not gemm_operands.can_use_tma(90, torch.zeros(33, dtype=torch.float16)[1:].view(4, 8))
    assert not gemm_operands.can_use_tma(90, aligned[:0])


def test_nothing_to_do(device: torch.device) -> None:
    offset = torch.zeros(3, dtype=torch.int64, device=device)
    x, weight = torch.zeros(0, 8, device=device), torch.ones(2, 8, 4, device=device)
    out, pre = grouped_gemm_forward(x, offset, weight)
    assert out.shape == (0, 4)
    assert pre is None
    assert grouped_gemm_dx(out, offset, weight).shape == x.shape
    assert torch.equal(grouped_gemm_dw(x, out, offset), torch.zeros(2, 8, 4, device=device))


def test_what_the_user_gets_wrong_is_named(device: torch.device) -> None:
    x = torch.zeros(24, 8, device=device)
    offset = torch.zeros(4, dtype=torch.int64, device=device)
    weight = torch.zeros(3, 8, 6, device=device)
    wrong = {
        "activation": lambda: grouped_gemm_forward(x, offset, weight, activation="relu"),
        "torch.int32": lambda: grouped_gemm_forward(x, offset.int(), weight),
        "shape of .*weight": lambda: grouped_gemm_forward(x, offset, weight[0]),
        "shape of .*offset": lambda: grouped_gemm_forward(x, offset[1:], weight),
        "shape of .*rows: got .*2, 12": lambda: grouped_gemm_forward(x.view(2, 12, 8), offset, weight),
        r"offset: got \[1\], expected \[2\]": lambda: grouped_gemm_dw(x, x, offset[:1]),
        "weight: got .*float16": lambda: grouped_gemm_forward(x, offset, weight.half()),
        "expected torch.bfloat16 or": lambda: grouped_gemm_forward(x.double(), offset, weight.double()),
        "x: got .*7": lambda: grouped_gemm_forward(x[..., :7].contiguous(), offset, weight),
        "contiguous": lambda: grouped_gemm_forward(x, offset, torch.zeros(3, 6, 8, device=device).mT),
        "bias": lambda: grouped_gemm_forward(x, offset, weight, torch.zeros(3, 5, device=device)),
        "is_valid": lambda: grouped_gemm_forward(x, offset, weight, config=GemmConfig(48, 32, 16, 4, 2)),
        "dy: got .*7": lambda: grouped_gemm_dx(x[..., :7].contiguous(), offset, weight),
        "dy": lambda: grouped_gemm_dw(x, x[:1], offset),
    }
    for message, call in wrong.items():
        with pytest.raises(UserError, match=message):
            call()
