"""Weights of the choices and their gradient; scores that do not depend on where a token stands."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.ops.moe.gate import normalized_scores, scores, sigmoid
from lancet_kernels.ops.moe.gates import Gate, Hash, Sigmoid, TopK
from tests.ops.op_cases import QUICK, SEEDS, generator, no_use


@dataclass(frozen=True)
class Weighted(Gate):
    """With every option for weights."""

    name: ClassVar[str] = "weighted"
    score: str = "softmax"
    normalized: bool = False
    scale: float = 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigmoid_is_sigmoid(dtype: torch.dtype) -> None:
    x = torch.linspace(-60, 60, 999, dtype=dtype)
    torch.testing.assert_close(sigmoid(x), torch.sigmoid(x), rtol=8 * torch.finfo(dtype).eps, atol=0)
    ends = torch.tensor([-torch.finfo(dtype).max, -1e3, torch.finfo(dtype).max, torch.nan], dtype=dtype)
    at_ends = sigmoid(ends.requires_grad_())
    (slopes,) = torch.autograd.grad(at_ends.sum(), ends)
    assert at_ends[:-1].tolist() == [0.0, 0.0, 1.0]
    assert slopes[:-1].tolist() == [0.0, 0.0, 0.0]
    assert bool(at_ends[-1].isnan())
    assert bool(slopes[-1].isnan())


@QUICK
@given(
    function=st.sampled_from(["softmax", "sigmoid", "normalized softmax", "normalized sigmoid"]),
    tokens=st.integers(1, 70),
    experts=st.integers(1, 33),
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=SEEDS,
)
def test_scores_of_a_part_are_those_of_the_whole(
    function: str, tokens: int, experts: int, data: st.DataObject, dtype: torch.dtype, seed: int
) -> None:
    start = data.draw(st.integers(0, tokens))
    stop = data.draw(st.integers(start, tokens))
    logits_TE = 4 * torch.randn(tokens, experts, dtype=dtype, generator=generator(seed))
    kind = function.split()[-1]
    compute = normalized_scores if "normalized" in function else scores
    assert torch.equal(compute(logits_TE[start:stop], kind), compute(logits_TE, kind)[start:stop])


def autograd_weights(
    logits_TE: Tensor, expert_TK: Tensor, score: str, normalized: bool, scale: float
) -> Tensor:
    """The formula of `Gate.weights`, left to autograd."""
    score_TE = torch.softmax(logits_TE, -1) if score == "softmax" else torch.sigmoid(logits_TE)
    weight_TK = score_TE.gather(1, expert_TK)
    if normalized:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return weight_TK * scale


@QUICK
@given(
    tokens=st.integers(0, 9),
    experts=st.integers(1, 9),
    data=st.data(),
    score=st.sampled_from(["softmax", "sigmoid"]),
    normalized=st.booleans(),
    seed=SEEDS,
)
def test_weights_and_gradient_against_autograd(
    tokens: int, experts: int, data: st.DataObject, score: str, normalized: bool, seed: int
) -> None:
    top_k, scale, rng = data.draw(st.integers(1, experts)), 1.5, generator(seed)
    logits_TE = torch.randn(tokens, experts, dtype=torch.float64, generator=rng).requires_grad_()
    expert_TK = torch.rand(tokens, experts, generator=rng).argsort(-1)[:, :top_k]
    grad_TK = torch.randn(tokens, top_k, dtype=torch.float64, generator=rng)
    expected_TK = autograd_weights(logits_TE, expert_TK, score, normalized, scale)
    (expected_TE,) = torch.autograd.grad(expected_TK, logits_TE, grad_TK)
    gate = Weighted(score, normalized, scale)
    with torch.no_grad():
        actual_TK = gate.weights(logits_TE, expert_TK, torch.float64)
        actual_TE = gate.weights_backward(grad_TK, logits_TE, expert_TK)
    torch.testing.assert_close(actual_TK, expected_TK, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(actual_TE, expected_TE, rtol=1e-12, atol=1e-14)


def test_without_logits_the_choices_share_equally() -> None:
    expert_TK = torch.zeros(3, 4, dtype=torch.int64)
    weight_TK = Hash().weights(None, expert_TK, torch.float64)
    assert weight_TK.tolist() == [[0.25] * 4] * 3
    assert weight_TK.dtype == torch.float64


@pytest.mark.parametrize("softmax", ["before", "after"])
def test_extreme_logits_give_finite_weights(softmax: str) -> None:
    logits_TE = torch.tensor([[-300.0, 300, 299, -300], [-3e38, -3e38, -3e38, 0]])
    gate = TopK(softmax=softmax, renormalize=True)
    _, _, weight_TK, _ = ops.gate(logits_TE, no_use(4), None, None, str(gate), 3, 4)
    torch.testing.assert_close(weight_TK.sum(-1), torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_very_negative_logits_are_finite(dtype: torch.dtype) -> None:
    """All sigmoids of a token underflow to 0; the ratio is still e : 1, and so is its gradient."""
    logits_TE = torch.tensor([[-1000.0, -1001]], dtype=dtype, requires_grad=True)
    expected_TE = torch.softmax(logits_TE, -1)
    _, _, weight_TK, _ = ops.gate(logits_TE, no_use(2), None, None, "sigmoid", 2, 4)
    torch.testing.assert_close(weight_TK, expected_TE)
    grad = torch.autograd.grad(weight_TK[0, 0], logits_TE)[0]
    torch.testing.assert_close(grad, torch.autograd.grad(expected_TE[0, 0], logits_TE)[0])
    torch.testing.assert_close(Sigmoid().probabilities(logits_TE), expected_TE)
