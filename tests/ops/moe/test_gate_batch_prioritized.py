"""Batch-prioritized routing against its reference, and by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.ops.moe.gates import BatchPrioritized
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


def naive_batch_prioritized(
    logits_TE: Tensor, top_k: int, importance: str = "max"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference: loops as in the paper's Algorithm 2. -> expert_TK, slot_TK, weight_TK, used'_E."""
    num_tokens, num_experts = logits_TE.shape
    probability_TE = torch.softmax(logits_TE, -1)
    ranked = [
        sorted(range(num_experts), key=lambda e: (-logits_TE[t, e].item(), e))[:top_k]
        for t in range(num_tokens)
    ]
    chosen_TK = torch.stack([probability_TE[t, ranked[t]] for t in range(num_tokens)])
    importance_T = (chosen_TK.max(-1).values if importance == "max" else chosen_TK.sum(-1)).tolist()
    used = [0] * num_experts
    slot_TK = torch.zeros(num_tokens, top_k, dtype=torch.int64)
    for k in range(top_k):
        for t in sorted(range(num_tokens), key=lambda t: (-importance_T[t], t)):
            slot_TK[t, k] = used[ranked[t][k]]
            used[ranked[t][k]] += 1
    return torch.tensor(ranked), slot_TK, chosen_TK, torch.tensor(used)


@QUICK
@given(logits_TE=logits_cases(), importance=st.sampled_from(["max", "sum"]), data=st.data())
def test_against_reference(logits_TE: Tensor, importance: str, data: st.DataObject) -> None:
    tokens, experts = logits_TE.shape
    top_k, used_E = data.draw(st.integers(1, experts)), no_use(experts)
    gate = BatchPrioritized(importance=importance)
    actual = Routing(*ops.gate(logits_TE, used_E, None, None, str(gate), top_k, 3))
    expected = empty_routing(used_E, top_k, logits_TE.dtype)
    if tokens:
        naive = naive_batch_prioritized(logits_TE, top_k, importance)
        expected = reference_routing(naive, logits_TE.dtype)
    assert_same_routing(actual, expected, weight_rtol(logits_TE))


def test_by_hand() -> None:
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


def test_check() -> None:
    with pytest.raises(UserError, match="got 'mean', expected one of max, sum"):
        BatchPrioritized(importance="mean").check(4, 2)
    with pytest.raises(UserError, match="top_k"):
        BatchPrioritized().check(4, 5)
