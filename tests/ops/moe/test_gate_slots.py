"""Slots of long batches, and the order of equal scores; slots by priority: test_gate_reference."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lancet_kernels.ops.moe.gates.base import (
    slots_in_order,
    top_k_stable,
)
from tests.ops.op_cases import QUICK, SEEDS, generator


@QUICK
@given(tokens=st.integers(0, 9), experts=st.integers(1, 70), data=st.data(), seed=SEEDS)
def test_equal_scores_go_to_the_lower_index(
    tokens: int, experts: int, data: st.DataObject, seed: int
) -> None:
    k = data.draw(st.integers(1, experts))
    score_TE = torch.randint(0, 3, (tokens, experts), generator=generator(seed)).float()
    expected = [sorted(range(experts), key=lambda e: (-row[e], e))[:k] for row in score_TE.tolist()]
    assert top_k_stable(score_TE, k).tolist() == expected


def test_equal_scores_in_a_long_row() -> None:
    """Beyond 16 elements torch's unstable sort really reorders ties."""
    assert top_k_stable(torch.zeros(2, 5000), 4999).tolist() == [list(range(4999))] * 2
    assert top_k_stable(torch.zeros(2, 5000), 1).tolist() == [[0], [0]]


def test_slots_of_a_long_batch_keep_their_order() -> None:
    """20,000 choices of two experts: an unstable sort would number them in another order."""
    choices = (torch.arange(20_000) % 2).tolist()
    slot_N, _ = slots_in_order(torch.tensor(choices), torch.zeros(2, dtype=torch.int64))
    assert slot_N.tolist() == [i // 2 for i in range(20_000)]


def test_special_values_rank_as_in_a_stable_sort() -> None:
    """Zeros of both signs are equal, NaN of either sign is the largest, subnormal numbers are told apart."""
    special = [0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, -1e-45, 3e38, -3e38]
    picked = torch.randint(len(special), (400, 9), generator=generator(1))
    for dtype in (torch.float32, torch.float64):
        score_TE = torch.tensor(special, dtype=dtype)[picked]
        expected = torch.sort(score_TE, dim=-1, descending=True, stable=True).indices
        for k in (1, 4, 9):
            assert torch.equal(top_k_stable(score_TE, k), expected[:, :k])
