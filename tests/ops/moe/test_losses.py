"""Sums over parts, and the loss formulas applied to them once."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lancet_kernels import ops
from lancet_kernels.ops.moe.gates import Hash, Sigmoid, Switch, TopK
from lancet_kernels.ops.moe.losses import moe_losses, routing_sums
from tests.ops.op_cases import QUICK, SEEDS, generator, no_use, skewed_logits


@QUICK
@given(
    tokens=st.integers(1, 30),
    experts=st.integers(1, 8),
    gate=st.sampled_from([Switch(), TopK(), Sigmoid()]),
    capacity=st.integers(1, 10),
    seed=SEEDS,
)
def test_losses_against_their_definitions(
    tokens: int, experts: int, gate: Switch, capacity: int, seed: int
) -> None:
    """balance = E * sum_e f_e P_e and z = mean logsumexp^2, from routing and logits directly."""
    logits_TE = skewed_logits("skewed", tokens, experts, torch.float64, seed)
    top_k = 1 if gate == Switch() else min(2, experts)
    used_E = no_use(experts)
    expert_TK, slot_TK, _, after_E = ops.gate(logits_TE, used_E, None, None, str(gate), top_k, capacity)
    losses = moe_losses([routing_sums(gate, logits_TE, used_E, after_E, capacity, tokens)], "")
    score_TE = torch.sigmoid(logits_TE) if gate == Sigmoid() else torch.softmax(logits_TE, -1)
    mean_E = (score_TE / score_TE.sum(-1, keepdim=True)).mean(0)
    share_E = torch.stack([(expert_TK == e).double().mean() for e in range(experts)])
    torch.testing.assert_close(losses.balance[0], experts * (share_E * mean_E).sum())
    torch.testing.assert_close(losses.z[0], torch.logsumexp(logits_TE, -1).square().mean())
    assert losses.dropped.item() == pytest.approx((slot_TK >= capacity).double().mean().item(), abs=1e-6)


@QUICK
@given(tokens=st.integers(0, 20), cut=st.integers(0, 20), seed=SEEDS)
def test_parts_add_up_with_their_gradient(tokens: int, cut: int, seed: int) -> None:
    """Losses of two parts added up equal those of one call, and so do the gradients of the logits."""
    cut = min(cut, tokens)
    base_TE = torch.randn(tokens, 5, dtype=torch.float64, generator=generator(seed))

    def losses_and_gradient(bounds: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_TE, used_E, total = base_TE.clone().requires_grad_(), no_use(5), None
        for start, stop in pairwise(bounds):
            part_TE = logits_TE[start:stop]
            after_E = ops.gate(part_TE.detach(), used_E, None, None, "topk", 2, 4)[3]
            part = routing_sums(TopK(), part_TE, used_E, after_E, 4, stop - start)
            total, used_E = part if total is None else total.plus(part), after_E
        losses = moe_losses([total], "")
        (gradient,) = torch.autograd.grad((losses.balance + 0.1 * losses.z).sum(), logits_TE)
        return losses.balance, losses.z, gradient

    whole, parts = losses_and_gradient([0, tokens]), losses_and_gradient([0, cut, tokens])
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_gates_that_learn_nothing_and_no_tokens_have_no_loss() -> None:
    sums = routing_sums(Hash(), None, no_use(3), torch.tensor([2, 0, 4]), 3, 6)
    losses = moe_losses([sums], "")
    assert losses.balance.tolist() == losses.z.tolist() == [0.0]
    assert losses.dropped.item() == pytest.approx(1 / 6)
    # Without tokens, zero and not NaN.
    losses = moe_losses([routing_sums(Switch(), torch.zeros(0, 3), no_use(3), no_use(3), 1, 0)], "")
    assert losses.balance.tolist() == losses.z.tolist() == [0.0]


def test_sum_over_ranks_of_one() -> None:
    counts = torch.tensor([[1, 2], [3, 4]])
    total = ops.sum_over_ranks(counts, "")
    assert torch.equal(total, counts)
    assert total.data_ptr() != counts.data_ptr()
    torch.library.opcheck(ops.sum_over_ranks, (counts, ""))
    torch.library.opcheck(ops.sum_over_ranks, (counts.T, ""))
