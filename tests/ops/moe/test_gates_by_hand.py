"""Gates by hand: who gets which slot with which weight, extreme logits, and options that cannot be."""

import math

import pytest
import torch

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.ops.moe.gates import BatchPrioritized, ExpertChoice, GShard, Sigmoid, Switch, TopK
from tests.ops.op_cases import Routing, no_use

# ---- topk


@pytest.mark.parametrize(
    ("spec", "weights"),
    [
        # Probabilities of token 0 are 1/7, 2/7, 4/7; of token 1, 4/7, 1/7, 2/7.
        ("topk", [[4 / 7, 2 / 7], [4 / 7, 2 / 7]]),
        ("topk(renormalize=True)", [[4 / 6, 2 / 6], [4 / 6, 2 / 6]]),
        ("topk(softmax='after')", [[4 / 6, 2 / 6], [4 / 6, 2 / 6]]),
    ],
)
def test_topk_by_hand(spec: str, weights: list[list[float]]) -> None:
    log2, log4 = math.log(2), math.log(4)
    logits_TE = torch.tensor([[0, log2, log4], [log4, 0, log2]], dtype=torch.float64)
    routing = Routing(*ops.gate(logits_TE, torch.tensor([0, 5, 0]), None, None, spec, 2, 4))
    assert routing.expert_TK.tolist() == [[2, 1], [0, 2]]
    assert routing.slot_TK.tolist() == [[0, 5], [0, 1]]
    assert routing.used_E.tolist() == [1, 6, 2]
    torch.testing.assert_close(routing.weight_TK, torch.tensor(weights, dtype=torch.float64))


def test_groups_by_hand() -> None:
    """Groups (0, 1) and (2, 3): the first has the largest logit, so the second and third largest are out."""
    probability_TE = torch.tensor([[0.4, 0.05, 0.3, 0.25]], dtype=torch.float64)
    spec = "topk(groups=2,top_groups=1,scale=2.0)"
    routing = Routing(*ops.gate(probability_TE.log(), no_use(4), None, None, spec, 2, 4))
    assert routing.expert_TK.tolist() == [[0, 1]]
    torch.testing.assert_close(routing.weight_TK, torch.tensor([[0.8, 0.1]], dtype=torch.float64))


def test_switch_by_hand() -> None:
    """A tie goes to the lower expert; the weight is the probability over all experts, not 1."""
    logits_TE = torch.tensor([[0.0, 0.0], [0.0, math.log(3)], [0.0, 0.0]], dtype=torch.float64)
    routing = Routing(*ops.gate(logits_TE, no_use(2), None, None, "switch", 1, 1))
    assert routing.expert_TK.tolist() == [[0], [1], [0]]
    assert routing.slot_TK.tolist() == [[0], [0], [1]]
    torch.testing.assert_close(routing.weight_TK, torch.tensor([[0.5], [0.75], [0.5]], dtype=torch.float64))


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


# ---- gshard


def test_gshard_by_hand() -> None:
    """Token 1's first choice (expert 0) goes before token 0's second choice (also expert 0)."""
    three, nine = torch.tensor([3.0, 9.0], dtype=torch.float64).log().tolist()
    logits_TE = torch.tensor([[three, nine, 0], [three, -10, 0]], dtype=torch.float64)
    routing = Routing(*ops.gate(logits_TE, no_use(3), None, None, "gshard", 2, 1))
    assert routing.expert_TK.tolist() == [[1, 0], [0, 2]]
    assert routing.slot_TK.tolist() == [[0, 1], [0, 0]]
    assert routing.used_E.tolist() == [2, 1, 1]
    expected = torch.tensor([[0.75, 0.25], [0.75, 0.25]], dtype=torch.float64)
    torch.testing.assert_close(routing.weight_TK, expected)


def test_options_of_gshard() -> None:
    GShard().check(4, 2)
    with pytest.raises(UserError, match="got 1, expected 2"):
        GShard().check(4, 1)
    with pytest.raises(UserError, match="got 2, expected 1 to num_experts"):
        GShard().check(1, 2)


# ---- batch-prioritized


def test_batch_prioritized_by_hand() -> None:
    """Token 1 is surest (.75) and takes expert 1 before token 0, which prefers it too but comes first."""
    probability_TE = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.75, 0.15], [0.6, 0.3, 0.1]], dtype=torch.float64)
    routing = Routing(*ops.gate(probability_TE.log(), no_use(3), None, None, "batch-prioritized", 2, 2))
    assert routing.expert_TK.tolist() == [[1, 2], [1, 2], [0, 1]]
    assert routing.slot_TK.tolist() == [[1, 1], [0, 0], [0, 2]]
    assert routing.used_E.tolist() == [1, 3, 2]
    expected = torch.tensor([[0.5, 0.3], [0.75, 0.15], [0.6, 0.3]], dtype=torch.float64)
    torch.testing.assert_close(routing.weight_TK, expected)


def test_the_two_importances_differ() -> None:
    """Token 0 has the larger maximum, token 1 the larger sum of two; both choose expert 0 first."""
    logits_TE = torch.tensor([[0.5, 0.1, 0.2, 0.2], [0.45, 0.45, 0.05, 0.05]], dtype=torch.float64).log()
    slots = {}
    for importance in ("max", "sum"):
        spec = str(BatchPrioritized(importance=importance))
        slots[importance] = ops.gate(logits_TE, no_use(4), None, None, spec, 2, 1)[1][:, 0].tolist()
    assert slots == {"max": [0, 1], "sum": [1, 0]}


def test_options_of_batch_prioritized() -> None:
    with pytest.raises(UserError, match="got 'mean', expected one of max, sum"):
        BatchPrioritized(importance="mean").check(4, 2)
    with pytest.raises(UserError, match="top_k"):
        BatchPrioritized().check(4, 5)


# ---- expert-choice


def test_expert_choice_by_hand() -> None:
    """Each expert takes its two best of three tokens, the best into slot 0; token 1 is left by expert 0."""
    probability_TE = torch.tensor([[0.6, 0.4], [0.2, 0.8], [0.7, 0.3]], dtype=torch.float64)
    routing = Routing(*ops.gate(probability_TE.log(), no_use(2), None, None, "expert-choice", 1, 2))
    assert routing.expert_TK.tolist() == [[0, 1]] * 3
    assert routing.slot_TK.tolist() == [[1, 1], [2, 0], [0, 2]]
    assert routing.used_E.tolist() == [2, 2]
    torch.testing.assert_close(routing.weight_TK, probability_TE)


def test_options_of_expert_choice() -> None:
    assert ExpertChoice().num_choices(8, 2) == 8
    ExpertChoice().check_capacity_factor(1.0)
    with pytest.raises(UserError, match="capacity_factor of gate expert-choice: got None"):
        ExpertChoice().check_capacity_factor(None)


# ---- sigmoid


def test_sigmoid_by_hand() -> None:
    """Scores 3/4, 1/4 | 1/2, 1/2; the bias lifts expert 1 to 5/4, but its weight stays 1/4.

    Group 0 then sums to 2 and group 1 to 1, so both choices are in group 0, expert 1 first.
    """
    log3 = math.log(3)
    logits_TE = torch.tensor([[log3, -log3, 0, 0]], dtype=torch.float64)
    bias_E = torch.tensor([0.0, 1.0, 0.0, 0.0])
    for spec, weights in (
        ("sigmoid(groups=2)", [0.25, 0.75]),
        ("sigmoid(groups=2,renormalize=False,scale=2.0)", [0.5, 1.5]),
    ):
        routing = Routing(*ops.gate(logits_TE, no_use(4), None, bias_E, spec, 2, 4))
        assert routing.expert_TK.tolist() == [[1, 0]]
        torch.testing.assert_close(routing.weight_TK, torch.tensor([weights], dtype=torch.float64))
    without_bias = ops.gate(logits_TE, no_use(4), None, None, "sigmoid(groups=2)", 2, 4)
    assert without_bias[0].tolist() == [[0, 1]], "equal groups: the lower one"


def test_group_limit_excludes_the_best_expert() -> None:
    """Expert 0 scores best, but its group's two best sum to less than group 1's."""
    logits_TE = torch.tensor([[2.0, -9, 1.5, 1.5]])
    assert ops.gate(logits_TE, no_use(4), None, None, "sigmoid", 2, 4)[0].tolist() == [[0, 2]]
    assert ops.gate(logits_TE, no_use(4), None, None, "sigmoid(groups=2)", 2, 4)[0].tolist() == [[2, 3]]


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
