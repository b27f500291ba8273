"""GShard's top-2 gate against its reference, and by hand."""

import pytest
import torch
from hypothesis import given
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.ops.moe.gates import GShard
from tests.ops.op_cases import (
    QUICK,
    Routing,
    assert_same_routing,
    empty_routing,
    logits_cases,
    no_use,
    reference_routing,
    weight_rtol,
)


def naive_gshard(logits_TE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference in two passes over the tokens. -> expert_T2, slot_T2, weight_T2, used'_E."""
    num_tokens, num_experts = logits_TE.shape
    used = [0] * num_experts
    experts = torch.zeros(num_tokens, 2, dtype=torch.int64)
    slots = torch.zeros(num_tokens, 2, dtype=torch.int64)
    weights = torch.zeros(num_tokens, 2, dtype=logits_TE.dtype)
    for choice in (0, 1):
        for t in range(num_tokens):
            ranked = sorted(range(num_experts), key=lambda e: (-logits_TE[t, e].item(), e))
            e = ranked[choice]
            experts[t, choice] = e
            slots[t, choice] = used[e]
            used[e] += 1
            probability_E = torch.softmax(logits_TE[t], 0)
            weights[t, choice] = probability_E[e] / (probability_E[ranked[0]] + probability_E[ranked[1]])
    return experts, slots, weights, torch.tensor(used)


@QUICK
@given(logits_TE=logits_cases(min_experts=2))
def test_against_reference(logits_TE: Tensor) -> None:
    used_E = no_use(logits_TE.shape[1])
    actual = Routing(*ops.gate(logits_TE, used_E, None, None, "gshard", 2, 3))
    expected = empty_routing(used_E, 2, logits_TE.dtype)
    if len(logits_TE):
        expected = reference_routing(naive_gshard(logits_TE), logits_TE.dtype)
    assert_same_routing(actual, expected, weight_rtol(logits_TE))


def test_by_hand() -> None:
    """Token 1's first choice (expert 0) goes before token 0's second choice (also expert 0)."""
    three, nine = torch.tensor([3.0, 9.0], dtype=torch.float64).log().tolist()
    logits_TE = torch.tensor([[three, nine, 0], [three, -10, 0]], dtype=torch.float64)
    routing = Routing(*ops.gate(logits_TE, no_use(3), None, None, "gshard", 2, 1))
    assert routing.expert_TK.tolist() == [[1, 0], [0, 2]]
    assert routing.slot_TK.tolist() == [[0, 1], [0, 0]]
    assert routing.used_E.tolist() == [2, 1, 1]
    expected = torch.tensor([[0.75, 0.25], [0.75, 0.25]], dtype=torch.float64)
    torch.testing.assert_close(routing.weight_TK, expected)


def test_check() -> None:
    GShard().check(4, 2)
    with pytest.raises(UserError, match="got 1, expected 2"):
        GShard().check(4, 1)
    with pytest.raises(UserError, match="got 2, expected 1 to num_experts"):
        GShard().check(1, 2)
