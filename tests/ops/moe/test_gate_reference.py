"""Gates against one reference in loops over tokens and choices; keyed routing against published numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.ops.moe.gate import Gate
from lancet_kernels.ops.moe.gates import GATES
from lancet_kernels.ops.random import splitmix64
from tests.grids import few_of
from tests.moe_reference import naive_gate
from tests.ops.op_cases import (
    QUICK,
    SEEDS,
    Routing,
    assert_same_routing,
    draw_gate,
    generator,
    logits_cases,
    no_use,
    used_before,
    weight_rtol,
)


@pytest.mark.parametrize("kind", GATES.values(), ids=GATES)
@QUICK
@given(logits_TE=logits_cases(), data=st.data(), capacity=st.integers(0, 45), seed=SEEDS)
def test_against_reference(
    kind: type[Gate], logits_TE: Tensor, data: st.DataObject, capacity: int, seed: int
) -> None:
    tokens, experts = logits_TE.shape
    gate, top_k = draw_gate(data.draw, kind, experts)
    gate.check(experts, top_k)
    used_E = used_before(experts, seed) if gate.partitionable else no_use(experts)
    key_T = torch.randint(-(2**63), 2**63 - 1, (tokens,), generator=generator(seed)) if gate.key else None
    bias_E = torch.randint(-2, 3, (experts,), generator=generator(seed)) / 4
    given_bias_E = bias_E if gate.uses_correction_bias else None
    logits = logits_TE if gate.uses_logits else None
    actual = Routing(*ops.gate(logits, used_E, key_T, given_bias_E, str(gate), top_k, capacity))
    expected = naive_gate(gate, logits, key_T, used_E, bias_E, top_k, capacity)
    assert_same_routing(actual, expected, weight_rtol(logits))


def test_splitmix64_gives_the_published_numbers() -> None:
    """The first outputs of the generator seeded with 1234567, as Vigna's splitmix64.c prints them."""
    golden = 0x9E3779B97F4A7C15 - 2**64
    states = 1234567 + golden * torch.arange(3)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [int(x) % 2**64 for x in splitmix64(states)] == published


@pytest.mark.parametrize("spec", ["hash", "random", "random(seed=9)"])
@pytest.mark.parametrize("experts", few_of([7, 16]))
def test_experts_are_used_evenly(spec: str, experts: int) -> None:
    """Consecutive keys: chi-squared over the experts below its 99.9 % quantile (about 37.7 at 15 degrees)."""
    tokens = 16_000
    used_E = ops.gate(None, no_use(experts), torch.arange(tokens), None, spec, 1, tokens)[3]
    expected = tokens / experts
    assert float(((used_E - expected) ** 2 / expected).sum()) < 37.7
