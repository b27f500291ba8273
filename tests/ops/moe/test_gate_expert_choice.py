"""Expert choice against its reference, and by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.ops.moe.gates import ExpertChoice
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


def naive_expert_choice(logits_TE: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference, one expert after the other. -> expert_TE, slot_TE, weight_TE, used'_E."""
    num_tokens, num_experts = logits_TE.shape
    probability_TE = torch.softmax(logits_TE, -1)
    slot_TE = torch.full((num_tokens, num_experts), capacity)
    used = []
    for e in range(num_experts):
        best = sorted(range(num_tokens), key=lambda t: (-probability_TE[t, e].item(), t))[:capacity]
        for slot, t in enumerate(best):
            slot_TE[t, e] = slot
        used.append(len(best))
    return torch.arange(num_experts).repeat(num_tokens, 1), slot_TE, probability_TE, torch.tensor(used)


@QUICK
@given(logits_TE=logits_cases(), capacity=st.integers(0, 45))
def test_against_reference(logits_TE: Tensor, capacity: int) -> None:
    tokens, experts = logits_TE.shape
    actual = Routing(*ops.gate(logits_TE, no_use(experts), None, None, "expert-choice", 1, capacity))
    expected = empty_routing(no_use(experts), experts, logits_TE.dtype)
    if tokens:
        expected = reference_routing(naive_expert_choice(logits_TE, capacity), logits_TE.dtype)
    assert_same_routing(actual, expected, weight_rtol(logits_TE))
    taken_E = (actual.slot_TK < capacity).sum(0)
    assert taken_E.tolist() == [min(capacity, tokens)] * experts


def test_by_hand() -> None:
    """Each expert takes its two best of three tokens, the best into slot 0; token 1 is left by expert 0."""
    probability_TE = torch.tensor([[0.6, 0.4], [0.2, 0.8], [0.7, 0.3]], dtype=torch.float64)
    routing = Routing(*ops.gate(probability_TE.log(), no_use(2), None, None, "expert-choice", 1, 2))
    assert routing.expert_TK.tolist() == [[0, 1]] * 3
    assert routing.slot_TK.tolist() == [[1, 1], [2, 0], [0, 2]]
    assert routing.used_E.tolist() == [2, 2]
    torch.testing.assert_close(routing.weight_TK, probability_TE)


def test_check() -> None:
    assert ExpertChoice().num_choices(8, 2) == 8
    ExpertChoice().check_capacity_factor(1.0)
    with pytest.raises(UserError, match="capacity_factor of gate expert-choice: got None"):
        ExpertChoice().check_capacity_factor(None)
