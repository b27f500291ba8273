"""Gates against one reference in loops over tokens and choices; by keys: test_gate_counter."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.ops.moe.gate import Gate, sigmoid
from lancet_kernels.ops.moe.gates import BatchPrioritized, GShard, Sigmoid, Switch, TopK
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


def naive_choice(gate: Gate, logits_E: Tensor, bias_E: Tensor, top_k: int) -> tuple[list[int], Tensor]:
    """The experts of a token, best first and of equal ones the lower, and their weights [K]."""
    by_sigmoid = isinstance(gate, Sigmoid)
    score_E = sigmoid(logits_E) if by_sigmoid else torch.softmax(logits_E, 0)
    ranked_E = score_E + bias_E.to(score_E.dtype) if by_sigmoid else logits_E
    groups, size = getattr(gate, "groups", 1), len(logits_E) // getattr(gate, "groups", 1)
    of_group = [g.sort().values[-2:].sum() if by_sigmoid else g.max() for g in ranked_E.split(size)]
    allowed = sorted(range(groups), key=lambda g: (-of_group[g].item(), g))[: getattr(gate, "top_groups", 1)]
    candidates = [e for e in range(len(logits_E)) if e // size in allowed]
    chosen = sorted(candidates, key=lambda e: (-ranked_E[e].item(), e))[:top_k]
    after = getattr(gate, "softmax", "before") == "after"
    weight_K = torch.softmax(logits_E[chosen], 0) if after else score_E[chosen]
    if isinstance(gate, GShard) or getattr(gate, "renormalize", False):
        weight_K = weight_K / weight_K.sum()
    return chosen, weight_K * getattr(gate, "scale", 1.0)


def naive_gate(gate: Gate, logits_TE: Tensor, used_E: Tensor, bias_E: Tensor, top_k: int) -> Routing:
    """Slots token by token; where choices have priority (GShard, batch-prioritized), choice by choice."""
    experts, weights = zip(*(naive_choice(gate, row, bias_E, top_k) for row in logits_TE), strict=True)
    weight_TK, used = torch.stack(weights), used_E.tolist()
    tokens = list(range(len(experts)))
    if isinstance(gate, BatchPrioritized):
        importance_T = (weight_TK.amax(1) if gate.importance == "max" else weight_TK.sum(1)).tolist()
        tokens.sort(key=lambda t: (-importance_T[t], t))
    if isinstance(gate, GShard | BatchPrioritized):
        order = [(t, k) for k in range(top_k) for t in tokens]
    else:
        order = [(t, k) for t in tokens for k in range(top_k)]
    slot_TK = torch.zeros(len(tokens), top_k, dtype=torch.int64)
    for t, k in order:
        slot_TK[t, k] = used[experts[t][k]]
        used[experts[t][k]] += 1
    return Routing(torch.tensor(experts), slot_TK, weight_TK, torch.tensor(used))


def drawn_gate(data: st.DataObject, kind: type[Gate], experts: int) -> tuple[Gate, int]:
    """A gate of this kind for so many experts, and its top_k."""
    if kind in (Switch, GShard):
        assume(kind is Switch or experts > 1)
        return kind(), 1 if kind is Switch else 2
    if kind is BatchPrioritized:
        return kind(data.draw(st.sampled_from(["max", "sum"]))), data.draw(st.integers(1, experts))
    groups = data.draw(st.sampled_from([g for g in range(1, experts + 1) if experts % g == 0]))
    top_groups = data.draw(st.integers(1, groups))
    options = {
        "groups": groups,
        "top_groups": top_groups,
        "renormalize": data.draw(st.booleans()),
        "scale": data.draw(st.sampled_from([1.0, 2.5])),
    }
    if kind is TopK:
        options["softmax"] = data.draw(st.sampled_from(["before", "after"]))
    return kind(**options), data.draw(st.integers(1, top_groups * experts // groups))


@pytest.mark.parametrize("kind", [Switch, TopK, Sigmoid, GShard, BatchPrioritized])
@QUICK
@given(logits_TE=logits_cases(), data=st.data(), seed=SEEDS)
def test_against_reference(kind: type[Gate], logits_TE: Tensor, data: st.DataObject, seed: int) -> None:
    tokens, experts = logits_TE.shape
    gate, top_k = drawn_gate(data, kind, experts)
    gate.check(experts, top_k)
    used_E = used_before(experts, seed) if gate.partitionable else no_use(experts)
    bias_E = torch.randint(-2, 3, (experts,), generator=generator(seed)) / 4
    own_bias = bias_E if kind is Sigmoid else None
    actual = Routing(*ops.gate(logits_TE, used_E, None, own_bias, str(gate), top_k, 3))
    expected = empty_routing(used_E, top_k, logits_TE.dtype)
    if tokens:
        naive = naive_gate(gate, logits_TE, used_E, bias_E, top_k)
        expected = reference_routing(naive, logits_TE.dtype)
    assert_same_routing(actual, expected, weight_rtol(logits_TE))


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
def test_expert_choice_against_reference(logits_TE: Tensor, capacity: int) -> None:
    tokens, experts = logits_TE.shape
    actual = Routing(*ops.gate(logits_TE, no_use(experts), None, None, "expert-choice", 1, capacity))
    expected = empty_routing(no_use(experts), experts, logits_TE.dtype)
    if tokens:
        expected = reference_routing(naive_expert_choice(logits_TE, capacity), logits_TE.dtype)
    assert_same_routing(actual, expected, weight_rtol(logits_TE))
    taken_E = (actual.slot_TK < capacity).sum(0)
    assert taken_E.tolist() == [min(capacity, tokens)] * experts
