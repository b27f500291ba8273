"""Hash and random gates: routing computed from keys, against Python integers and published numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.ops.moe.gates import Hash, Random
from lancet_kernels.ops.random import GOLDEN, splitmix64
from tests.grids import few_of
from tests.moe_reference import drawn
from tests.ops.op_cases import QUICK, SEEDS, Routing, assert_same_routing, empty_routing, no_use, used_before

KEYS = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5)


def naive_counter(
    key_T: Tensor, used_E: Tensor, top_k: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference in Python integers. -> expert_TK, slot_TK, weight_TK, used'_E."""
    used = used_E.tolist()
    experts: list[list[int]] = []
    slots: list[list[int]] = []
    for key in key_T.tolist():
        experts.append(drawn(key + seed * GOLDEN, len(used), top_k))
        slots.append([])
        for e in experts[-1]:
            slots[-1].append(used[e])
            used[e] += 1
    weight_TK = torch.full((len(experts), top_k), 1.0 / top_k, dtype=dtype)
    return torch.tensor(experts), torch.tensor(slots), weight_TK, torch.tensor(used)


@QUICK
@given(keys=st.lists(KEYS, max_size=30), experts=st.integers(1, 16), data=st.data(), used=SEEDS)
def test_against_reference(keys: list[int], experts: int, data: st.DataObject, used: int) -> None:
    top_k, seed = data.draw(st.integers(1, experts)), data.draw(st.integers(-5, 2**64))
    gate = data.draw(st.sampled_from([Hash, Random]))(seed=seed)
    key_T, used_E = torch.tensor(keys, dtype=torch.int64), used_before(experts, used)
    actual = Routing(*ops.gate(None, used_E, key_T, None, str(gate), top_k, 3))
    expected = empty_routing(used_E, top_k, torch.float32)
    if keys:
        expected = Routing(*naive_counter(key_T, used_E, top_k, seed))
    assert_same_routing(actual, expected)


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
