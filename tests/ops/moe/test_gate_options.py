"""Options of gates that cannot be, and extreme logits; what gates choose: test_gate_reference."""

import math

import pytest
import torch

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.ops.moe.gates import BatchPrioritized, ExpertChoice, GShard, Sigmoid, Switch, TopK
from tests.ops.op_cases import no_use


@pytest.mark.parametrize("softmax", ["before", "after"])
def test_extreme_logits_give_finite_weights(softmax: str) -> None:
    logits_TE = torch.tensor([[-300.0, 300, 299, -300], [-3e38, -3e38, -3e38, 0]])
    gate = TopK(softmax=softmax, renormalize=True)
    _, _, weight_TK, _ = ops.gate(logits_TE, no_use(4), None, None, str(gate), 3, 4)
    torch.testing.assert_close(weight_TK.sum(-1), torch.ones(2))


def test_options_of_topk() -> None:
    TopK().check(4, 4)
    for top_k in (0, 5, -1):
        with pytest.raises(UserError, match=f"got {top_k}, expected 1 to num_experts"):
            TopK().check(4, top_k)
    with pytest.raises(UserError, match="got 'between', expected one of before, after"):
        TopK(softmax="between").check(4, 2)
    with pytest.raises(UserError, match="got 2, expected 1"):
        Switch().check(4, 2)


def test_options_of_gshard() -> None:
    GShard().check(4, 2)
    with pytest.raises(UserError, match="got 1, expected 2"):
        GShard().check(4, 1)
    with pytest.raises(UserError, match="got 2, expected 1 to num_experts"):
        GShard().check(1, 2)


def test_options_of_batch_prioritized() -> None:
    with pytest.raises(UserError, match="got 'mean', expected one of max, sum"):
        BatchPrioritized(importance="mean").check(4, 2)
    with pytest.raises(UserError, match="top_k"):
        BatchPrioritized().check(4, 5)


def test_options_of_expert_choice() -> None:
    assert ExpertChoice().num_choices(8, 2) == 8
    ExpertChoice().check_capacity_factor(1.0)
    with pytest.raises(UserError, match="capacity_factor of gate expert-choice: got None"):
        ExpertChoice().check_capacity_factor(None)


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


def test_options_of_sigmoid() -> None:
    Sigmoid(groups=4, top_groups=2).check(8, 4)
    for gate, top_k, what in (
        (Sigmoid(groups=3), 2, "groups of gate sigmoid: got 3, expected a divisor"),
        (Sigmoid(groups=0), 2, "groups of gate sigmoid: got 0, expected a divisor"),
        (Sigmoid(groups=4, top_groups=5), 2, "top_groups of gate sigmoid: got 5"),
        (Sigmoid(groups=4, top_groups=0), 2, "top_groups of gate sigmoid: got 0"),
        (Sigmoid(groups=4, top_groups=1), 3, "at least top_k .3. experts"),
        (Sigmoid(scale=0.0), 2, "scale of gate sigmoid: got 0.0"),
        (Sigmoid(scale=math.inf), 2, "scale of gate sigmoid: got inf"),
        (Sigmoid(scale=math.nan), 2, "scale of gate sigmoid: got nan"),
        (Sigmoid(), 9, "top_k"),
    ):
        with pytest.raises(UserError, match=what):
            gate.check(8, top_k)
