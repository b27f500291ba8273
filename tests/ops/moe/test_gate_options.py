"""Options of gates that cannot be, and extreme logits; what gates choose: test_gate_reference."""

import math

import pytest
import torch

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.ops.moe.gates import BatchPrioritized, Gate, GShard, Sigmoid, Switch, TopK
from tests.ops.op_cases import no_use


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


@pytest.mark.parametrize(
    ("gate", "experts", "top_k", "message"),
    [
        *((TopK(), 4, top_k, f"got {top_k}, expected 1 to num_experts") for top_k in (0, 5, -1)),
        (TopK(softmax="between"), 4, 2, "got 'between', expected one of before, after"),
        (Switch(), 4, 2, "got 2, expected 1"),
        (GShard(), 4, 1, "got 1, expected 2"),
        (GShard(), 1, 2, "got 2, expected 1 to num_experts"),
        (BatchPrioritized(importance="mean"), 4, 2, "got 'mean', expected one of max, sum"),
        (BatchPrioritized(), 4, 5, "top_k"),
        (Sigmoid(groups=3), 8, 2, "groups of gate sigmoid: got 3, expected a divisor"),
        (Sigmoid(groups=0), 8, 2, "groups of gate sigmoid: got 0, expected a divisor"),
        (Sigmoid(groups=4, top_groups=5), 8, 2, "top_groups of gate sigmoid: got 5"),
        (Sigmoid(groups=4, top_groups=0), 8, 2, "top_groups of gate sigmoid: got 0"),
        (Sigmoid(groups=4, top_groups=1), 8, 3, "at least top_k .3. experts"),
        *((Sigmoid(scale=x), 8, 2, f"scale of gate sigmoid: got {x}") for x in (0.0, math.inf, math.nan)),
        (Sigmoid(), 8, 9, "top_k"),
    ],
    ids=str,
)
def test_what_cannot_be(gate: Gate, experts: int, top_k: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        gate.check(experts, top_k)
