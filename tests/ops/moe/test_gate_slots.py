"""Slots of long batches, and the order of equal scores; slots by priority: test_gate_reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lancet_kernels import ops
from lancet_kernels.ops.moe.gate import slots_in_order, top_k_stable
from tests.ops.op_cases import QUICK, SEEDS, generator, no_use


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


# Tokens [T, E] to their k experts, of whom each takes `capacity`; (token, expert, slot) of what is kept. The
# figures are those of DeepSpeed's TestTopkGate with drop_policy="position" and with drop_tokens=False.
DEEPSPEED = [
    (
        [[0.11, 0.2, 0.1, 0.3], [0.3, 0.4, 0.11, 0.1], [0.11, 0.1, 0.6, 0.5], [0.1, 0.11, 0.7, 0.8]],
        2, 2, {(0, 1, 0), (0, 3, 0), (1, 0, 0), (1, 1, 1), (2, 2, 0), (2, 3, 1), (3, 2, 1)},
    ),
    (
        [
            [0.5858, 0.4801, 0.6269, 0.5397, 0.9722, 0.7034],
            [0.5445, 0.6332, 0.4519, 0.6308, 0.0519, 0.6450],
            [0.4874, 0.8110, 0.7467, 0.8474, 0.0277, 0.3068],
            [0.8570, 0.6714, 0.5310, 0.3274, 0.4836, 0.9892],
        ],
        3, 2,
        {
            (0, 2, 0), (0, 4, 0), (0, 5, 0), (1, 1, 0), (1, 3, 0), (1, 5, 1), (2, 1, 1), (2, 2, 1), (2, 3, 1),
            (3, 0, 0),
        },
    ),
    (
        [[0.95, 0.85, 0.9, 0.8], [0.7, 0.65, 0.75, 0.6], [0.5, 0.55, 0.45, 0.4], [0.35, 0.3, 0.25, 0.2]],
        2, 4, {(0, 0, 0), (0, 2, 0), (1, 0, 1), (1, 2, 1), (2, 0, 2), (2, 1, 0), (3, 0, 3), (3, 1, 1)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("logits", "top_k", "capacity", "kept"), DEEPSPEED)
def test_slots_are_those_of_deepspeed(logits, top_k, capacity, kept) -> None:
    """Its rule that drops by probability has no gate here: `batch-prioritized` ranks tokens, not choices."""
    logits_TE = torch.tensor(logits)
    used_E = no_use(logits_TE.shape[1])
    expert_TK, slot_TK, *_ = ops.gate(logits_TE, used_E, None, None, "topk", top_k, capacity)
    choices = zip(expert_TK.tolist(), slot_TK.tolist(), strict=True)
    ours = {(t, *c) for t, pair in enumerate(choices) for c in zip(*pair, strict=True) if c[1] < capacity}
    assert ours == kept
