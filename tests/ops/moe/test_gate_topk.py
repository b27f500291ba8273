"""Switch and top-k gates against their reference, and by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.ops.moe.gates import Switch, TopK
from tests.ops.op_cases import (
    QUICK,
    SEEDS,
    Routing,
    assert_same_routing,
    empty_routing,
    logits_cases,
    no_use,
    reference_routing,
    used_before,
    weight_rtol,
)


def naive_topk(
    logits_TE: Tensor, used_E: Tensor, top_k: int, gate: TopK | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reference, one token after the other. -> expert_TK, slot_TK, weight_TK, used'_E."""
    gate = gate or TopK()
    used = used_E.tolist()
    size = len(used) // gate.groups
    experts: list[list[int]] = []
    slots: list[list[int]] = []
    weights: list[Tensor] = []
    for logits_E in logits_TE:
        best = [-max(group.tolist()) for group in logits_E.split(size)]
        groups = sorted(range(gate.groups), key=lambda g: (best[g], g))[: gate.top_groups]
        allowed = [e for e in range(len(used)) if e // size in groups]
        chosen = sorted(allowed, key=lambda e: (-logits_E[e].item(), e))[:top_k]
        probability_E = torch.softmax(logits_E, 0)
        weight_K = torch.softmax(logits_E[chosen], 0) if gate.softmax == "after" else probability_E[chosen]
        experts.append(chosen)
        weights.append((weight_K / weight_K.sum() if gate.renormalize else weight_K) * gate.scale)
        slots.append([])
        for e in chosen:
            slots[-1].append(used[e])
            used[e] += 1
    return torch.tensor(experts), torch.tensor(slots), torch.stack(weights), torch.tensor(used)


@QUICK
@given(
    logits_TE=logits_cases(),
    data=st.data(),
    softmax=st.sampled_from(["before", "after"]),
    renormalize=st.booleans(),
    seed=SEEDS,
)
def test_topk_against_reference(
    logits_TE: Tensor, data: st.DataObject, softmax: str, renormalize: bool, seed: int
) -> None:
    tokens, experts = logits_TE.shape
    top_k = data.draw(st.integers(1, experts))
    groups = data.draw(st.sampled_from([g for g in range(1, experts + 1) if experts % g == 0]))
    top_groups = data.draw(st.integers(-(-top_k * groups // experts), groups))
    scale = data.draw(st.sampled_from([1.0, 2.5]))
    gate, used_E = TopK(softmax, renormalize, groups, top_groups, scale), used_before(experts, seed)
    actual = Routing(*ops.gate(logits_TE, used_E, None, None, str(gate), top_k, 3))
    if tokens == 0:
        assert_same_routing(actual, empty_routing(used_E, top_k, logits_TE.dtype))
        return
    naive = naive_topk(logits_TE, used_E, top_k, gate)
    assert_same_routing(actual, reference_routing(naive, logits_TE.dtype), weight_rtol(logits_TE))


@QUICK
@given(logits_TE=logits_cases(min_tokens=1), seed=SEEDS)
def test_switch_is_top_1(logits_TE: Tensor, seed: int) -> None:
    used_E = used_before(logits_TE.shape[1], seed)
    actual = Routing(*ops.gate(logits_TE, used_E, None, None, "switch", 1, 3))
    naive = naive_topk(logits_TE, used_E, 1)
    assert_same_routing(actual, reference_routing(naive, logits_TE.dtype), weight_rtol(logits_TE))


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


def test_check() -> None:
    TopK().check(4, 4)
    for top_k in (0, 5, -1):
        with pytest.raises(UserError, match=f"got {top_k}, expected 1 to num_experts"):
            TopK().check(4, top_k)
    with pytest.raises(UserError, match="got 'between', expected one of before, after"):
        TopK(softmax="between").check(4, 2)
    with pytest.raises(UserError, match="got 2, expected 1"):
        Switch().check(4, 2)
