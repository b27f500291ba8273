"""`eager_experts` against the ops one by one: results, gradients, experts without rows, weights that do not
train."""

import pytest
import torch
from torch import Tensor

from lancet_kernels import MoELayer, ops
from lancet_kernels.ops.comm.link_group import Pending
from lancet_kernels.ops.moe import eager_experts as module
from lancet_kernels.ops.moe.eager_experts import eager_experts, runs_eagerly

T, D, F, E, K = 24, 8, 12, 4, 2


def operands(hidden: int, experts: int = E) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, expert_TK, weight_TK, w1, w2; choices are among the first `experts`."""
    torch.manual_seed(1)
    expert_TK = torch.rand(T, experts).argsort(1)[:, :K].contiguous()
    floats = torch.randn(T, D), torch.rand(T, K), torch.randn(E, D, hidden), torch.randn(E, F, D)
    x, weight_TK, w1, w2 = (t.requires_grad_() for t in floats)
    return x, expert_TK, weight_TK, w1, w2


def one_by_one(x, expert_TK, weight_TK, w1, w2, activation: str) -> Tensor:
    slot_TK, count_E = ops.assign_slots(expert_TK, torch.zeros(E, dtype=torch.int64))
    count_WL = count_E.view(1, E)
    row_TK = ops.send_rows(expert_TK, slot_TK, count_WL)
    rows = ops.dispatch(x, row_TK, None, T * K, T * K)
    hidden = ops.expert_activation(ops.grouped_gemm(rows, count_WL, w1, None), count_WL, activation)
    return ops.combine(ops.grouped_gemm(hidden, count_WL, w2, None), row_TK, weight_TK)


@pytest.mark.parametrize("activation", ["gelu", "swiglu", "clamped-swiglu"])
@pytest.mark.parametrize("experts", [E, K], ids=["all experts", "some without rows"])
@pytest.mark.parametrize("frozen", [None, 0, 2, 3, 4], ids=["all train", "x", "weights", "w1", "w2"])
def test_same_as_ops(activation: str, experts: int, frozen: int | None) -> None:
    given = operands(F if activation == "gelu" else 2 * F, experts)
    if frozen is not None:
        given[frozen].requires_grad_(False)
    y, count_E = eager_experts(*given, E, activation, "")
    expected = one_by_one(*given, activation)
    torch.testing.assert_close(y, expected)
    assert count_E.tolist() == given[1].flatten().bincount(minlength=E).tolist()
    trained = [t for t in given if t.requires_grad]
    dy = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(result, trained, dy) for result in (y, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_another_dtype(dtype: torch.dtype) -> None:
    """As a router of float64 gives them, or one of transformers in a model of mixed dtypes."""
    x, expert_TK, weight_TK, w1, w2 = operands(F)
    other_TK = weight_TK.detach().to(dtype).requires_grad_()
    y, _ = eager_experts(x, expert_TK, other_TK, w1, w2, E, "gelu", "")
    expected = one_by_one(x, expert_TK, other_TK, w1, w2, "gelu")
    torch.testing.assert_close(y, expected)
    ours, theirs = (torch.autograd.grad(result.sum(), other_TK) for result in (y, expected))
    assert ours[0].dtype == dtype
    torch.testing.assert_close(ours, theirs)


def test_weight_gradients_are_computed_while_rows_travel_back(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    start, weight_gradient = module.start_all_to_all, module._times_rows

    class Travelling(Pending):
        def wait(self) -> Tensor:
            events.append("arrived")
            return super().wait()

    def logged_start(*call):
        events.append("sent")
        return Travelling.here(start(*call).wait())

    def logged_gradient(*call):
        events.append("weight gradient")
        return weight_gradient(*call)

    monkeypatch.setattr(module, "start_all_to_all", logged_start)
    monkeypatch.setattr(module, "_times_rows", logged_gradient)
    y, _ = eager_experts(*operands(F), E, "gelu", "")
    y.sum().backward()
    assert events == ["sent", "arrived", "sent", *["weight gradient"] * 2, "arrived"]


def test_which_calls_it_takes() -> None:
    x, _, _, w1, w2 = operands(2 * F)
    assert runs_eagerly(x, w1, w2)
    assert not runs_eagerly(x.double(), w1.double(), w2.double())
    assert runs_eagerly(x[:0], w1, w2)
    assert not runs_eagerly(x, w1[..., :6].contiguous(), w2)  # rows of 24 bytes
    mode = torch._subclasses.FakeTensorMode()
    assert not runs_eagerly(*map(mode.from_tensor, (x, w1, w2)))


def test_a_layer_uses_it_unless_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = MoELayer(D, F, E, top_k=K, gate="topk", capacity_factor=None, activation="swiglu")
    x = torch.randn(T, D)
    expected = layer(x)
    monkeypatch.setattr(MoELayer, "_eager_weights", lambda *_: None)
    torch.testing.assert_close(layer(x), expected)
