"""The sigmoid gate (groups, correction bias) against its reference, and by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.ops.moe.gates import Sigmoid
from lancet_kernels.ops.moe.gates.weights import sigmoid
from tests.ops.op_cases import (
    QUICK,
    SEEDS,
    Routing,
    assert_same_routing,
    empty_routing,
    generator,
    logits_cases,
    no_use,
    reference_routing,
    used_before,
    weight_rtol,
)


def naive_sigmoid(
    logits_TE: Tensor, used_E: Tensor, bias_E: Tensor, top_k: int, gate: Sigmoid
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference, one token after the other. -> expert_TK, slot_TK, weight_TK, used'_E."""
    num_experts = logits_TE.shape[1]
    size = num_experts // gate.groups
    used = used_E.tolist()
    experts: list[list[int]] = []
    slots: list[list[int]] = []
    weights: list[Tensor] = []
    for logits_E in logits_TE:
        biased_E = sigmoid(logits_E) + bias_E.to(logits_E.dtype)
        best = [group.sort().values[-2:] for group in biased_E.split(size)]
        group_score, biased = [two.sum().item() for two in best], biased_E.tolist()
        groups = sorted(range(gate.groups), key=lambda g: (-group_score[g], g))[: gate.top_groups]
        candidates = [e for e in range(num_experts) if e // size in groups]
        chosen = sorted(candidates, key=lambda e: (-biased[e], e))[:top_k]
        weight_K = sigmoid(logits_E[chosen])
        weights.append((weight_K / weight_K.sum() if gate.renormalize else weight_K) * gate.scale)
        experts.append(chosen)
        slots.append([])
        for e in chosen:
            slots[-1].append(used[e])
            used[e] += 1
    return torch.tensor(experts), torch.tensor(slots), torch.stack(weights), torch.tensor(used)


@QUICK
@given(logits_TE=logits_cases(), data=st.data(), renormalize=st.booleans(), seed=SEEDS)
def test_against_reference(logits_TE: Tensor, data: st.DataObject, renormalize: bool, seed: int) -> None:
    tokens, experts = logits_TE.shape
    groups = data.draw(st.sampled_from([g for g in range(1, experts + 1) if experts % g == 0]))
    top_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, top_groups * experts // groups))
    gate = Sigmoid(groups=groups, top_groups=top_groups, renormalize=renormalize, scale=2.5)
    gate.check(experts, top_k)
    bias_E = torch.randint(-2, 3, (experts,), generator=generator(seed)) / 4
    used_E = used_before(experts, seed)
    actual = Routing(*ops.gate(logits_TE, used_E, None, bias_E, str(gate), top_k, 3))
    expected = empty_routing(used_E, top_k, logits_TE.dtype)
    if tokens:
        naive = naive_sigmoid(logits_TE, used_E, bias_E, top_k, gate)
        expected = reference_routing(naive, logits_TE.dtype)
    assert_same_routing(actual, expected, weight_rtol(logits_TE))


def test_by_hand() -> None:
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


def test_check() -> None:
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
