"""Capacity passing (Lancet, section 2.3): a gate called part by part routes exactly as in one call.

The property that a partitioned MoE layer stands on: with `used` handed on, experts, slots, weights, drops
and the final `used` are the same bits however the batch was cut.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.ops.moe.gates import GATES
from lancet_kernels.ops.moe.router import RoutingSums
from tests.examples import examples
from tests.ops.op_cases import SEEDS, Routing, assert_same_routing, draw_gate, no_use, skewed_logits

KINDS = ["normal", "ties", "skewed", "one"]


class Case:
    """One batch, one gate, one way to cut it."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.experts = draw(st.integers(1, 16))
        kind = draw(st.sampled_from([gate for gate in GATES.values() if gate.partitionable]))
        self.gate, self.top_k = draw_gate(draw, kind, self.experts)
        self.tokens = draw(st.integers(0, 48))
        self.dtype = draw(st.sampled_from([torch.float32, torch.float64]))
        self.kind, self.seed = draw(st.sampled_from(KINDS)), draw(SEEDS)
        enough = max(1, self.tokens * self.top_k)
        self.capacity = draw(st.integers(0, enough) | st.integers(0, 1 + enough // self.experts))
        self.used_E = torch.tensor(
            draw(st.lists(st.integers(0, 6), min_size=self.experts, max_size=self.experts))
        )
        inner = draw(st.lists(st.integers(0, self.tokens), max_size=7))
        self.cuts = [0, *sorted(inner), self.tokens]

        self.logits_TE = self.key_T = self.bias_E = None
        rng = torch.Generator().manual_seed(self.seed)
        if self.gate.uses_logits:
            self.logits_TE = skewed_logits(self.kind, self.tokens, self.experts, self.dtype, self.seed)
        elif self.kind == "skewed":
            self.key_T = torch.randint(0, 3, (self.tokens,), generator=rng)
        else:
            self.key_T = torch.randint(-(2**62), 2**62, (self.tokens,), generator=rng)
        if self.gate.uses_correction_bias:
            self.bias_E = torch.randn(self.experts, generator=rng)

    def __repr__(self) -> str:
        return (
            f"{self.gate} T={self.tokens} E={self.experts} K={self.top_k} C={self.capacity} {self.dtype} "
            f"{self.kind} seed={self.seed} used={self.used_E.tolist()} cuts={self.cuts}"
        )

    def route(self, start: int, stop: int, used_E: Tensor) -> Routing:
        logits_TE = None if self.logits_TE is None else self.logits_TE[start:stop]
        key_T = None if self.key_T is None else self.key_T[start:stop]
        return Routing(
            *ops.gate(logits_TE, used_E, key_T, self.bias_E, str(self.gate), self.top_k, self.capacity)
        )

    def sums(self, start: int, stop: int, before_E: Tensor, after_E: Tensor) -> RoutingSums:
        logits_TE = None if self.logits_TE is None else self.logits_TE[start:stop]
        return ops.routing_sums(self.gate, logits_TE, before_E, after_E, self.capacity, stop - start)


cases = st.composite(Case)()


@examples(1000)
@given(case=cases)
def test_parts_route_as_the_whole(case: Case) -> None:
    before_E = case.used_E.clone()
    whole = case.route(0, case.tokens, case.used_E)
    assert torch.equal(case.used_E, before_E), "the gate wrote into its input"

    used_E, parts, sums = case.used_E, [], None
    for start, stop in pairwise(case.cuts):
        part = case.route(start, stop, used_E)
        part_sums = case.sums(start, stop, used_E, part.used_E)
        sums = part_sums if sums is None else sums.plus(part_sums)
        parts.append(part)
        used_E = part.used_E
    joined = Routing(*(torch.cat(tensors) for tensors in list(zip(*parts, strict=True))[:3]), used_E)
    assert_same_routing(joined, whole)
    assert torch.equal(joined.slot_TK >= case.capacity, whole.slot_TK >= case.capacity)

    expected = case.sums(0, case.tokens, case.used_E, whole.used_E)
    for name in ("assigned_E", "kept_E", "tokens"):
        assert torch.equal(getattr(sums, name), getattr(expected, name)), name
    rtol = (8 + case.tokens) * torch.finfo(expected.probability_E.dtype).eps
    torch.testing.assert_close(sums.probability_E, expected.probability_E, rtol=rtol, atol=0)
    torch.testing.assert_close(sums.square_logsumexp, expected.square_logsumexp, rtol=rtol, atol=0)
    kept_TK = whole.slot_TK < case.capacity
    assert int(sums.kept_E.sum()) == int(kept_TK.sum())


# Logits [T, 2], capacity 1, cut after the first token: the later token takes the slot in one call.
WHOLE_BATCH_EXAMPLES = {
    # Token 0 prefers expert 0; expert 1 is the first choice of token 1, which goes before its second choice.
    "gshard": (2, [[1.0, 0.0], [0.0, 1.0]]),
    # Token 1 is surer of expert 0 than token 0 is.
    "batch-prioritized": (1, [[1.0, 0.0], [3.0, 0.0]]),
    # Expert 0 takes its best token, which is token 1.
    "expert-choice": (1, [[1.0, 0.0], [3.0, 0.0]]),
}


def test_every_other_gate_has_an_example() -> None:
    assert set(WHOLE_BATCH_EXAMPLES) == {name for name, gate in GATES.items() if not gate.partitionable}


@pytest.mark.parametrize("name", WHOLE_BATCH_EXAMPLES)
def test_gates_that_need_the_whole_batch_route_otherwise_in_parts(name: str) -> None:
    top_k, rows = WHOLE_BATCH_EXAMPLES[name]
    logits_TE = torch.tensor(rows)
    whole = Routing(*ops.gate(logits_TE, no_use(2), None, None, name, top_k, 1))
    first = Routing(*ops.gate(logits_TE[:1], no_use(2), None, None, name, top_k, 1))
    second = Routing(*ops.gate(logits_TE[1:], first.used_E, None, None, name, top_k, 1))
    kept_in_parts = torch.cat([first.slot_TK, second.slot_TK]) < 1
    assert not torch.equal(kept_in_parts, whole.slot_TK < 1)
