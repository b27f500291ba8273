"""GShard's top-2 gate against its reference, and by hand."""

import pytest
import torch
from hypothesis import given
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.ops.gates import GShard
from lancet_kernels.ops.gates.gshard import naive_gshard
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
