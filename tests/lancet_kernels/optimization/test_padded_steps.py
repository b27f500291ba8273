"""Padded batches that plans cut, against the plain module on the same tokens without the padding."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels import MoELayer, moe_losses
from lancet_kernels.schedules.cut.ranges import positions
from tests.optimized import BOUND, one_capture, optimized
from tests.planned_steps import outcome

B, S, D, E = 6, 4, 8, 4
GATES = {
    "topk": {"gate": "topk", "top_k": 2, "capacity_factor": 0.75},
    "sigmoid": {"gate": "sigmoid", "top_k": 2, "capacity_factor": 0.75},
    "hash": {"gate": "hash", "top_k": 2, "capacity_factor": None},
    "gshard": {"gate": "gshard", "top_k": 2, "capacity_factor": 0.75},
}


class Padded(nn.Module):
    """x[.., D], target[.., D], ids[..], mask[..] -> loss of the real tokens, and assignments.

    Every token is computed alone, but for the experts' slots and the losses of the router.
    """

    def __init__(self, options: dict) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.layers = nn.ModuleList(MoELayer(D, 12, E, **options) for _ in range(2))
        self.double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for layer in self.layers:
                for name, p in layer.named_parameters():
                    shape = p.shape if name == "router" else (E, *p.shape[1:])
                    values = torch.randn(shape, generator=generator).double()
                    p.copy_(values if name == "router" else values[list(layer.expert_ids())])

    def forward(
        self, x: Tensor, target: Tensor, ids: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        sums = []
        for linear, layer in zip(self.linears, self.layers, strict=False):
            y, of_layer = layer(torch.tanh(linear(x)), mask=mask, token_ids=ids, return_sums=True)
            sums.append(of_layer)
            x = x + y
        error = (self.linears[-1](x) - target).square().sum(-1)
        losses = moe_losses(sums)
        error = error if mask is None else error * mask
        return error.sum() + losses.balance.mean() + losses.z.mean(), losses.assigned


def batch(number: int, size: int = B) -> tuple[Tensor, ...]:
    """Another one on every rank, of other lengths."""
    generator = torch.Generator().manual_seed(10 * number + (dist.get_rank() if dist.is_initialized() else 0))
    x, target = (torch.randn(size, S, D, dtype=torch.float64, generator=generator) for _ in range(2))
    ids = torch.randint(50, (size, S), generator=generator)
    lengths = torch.randint(S + 1, (size, 1), generator=generator)
    mask = (torch.arange(S) < lengths).long()
    x[mask == 0] = 3.0
    return x, target, ids, mask


def without_padding(model: Padded, inputs: tuple[Tensor, ...]):
    """What the plain module gives for the real tokens, in the capacity of the padded batch."""
    *tensors, mask = inputs
    capacity = model.layers[0].capacity(mask.numel())
    with mock.patch.object(MoELayer, "capacity", return_value=capacity):
        return outcome(model, model(*(t[mask.bool()] for t in tensors)), reduced=False)


def planned(name: str, strategies: Sequence[str], sizes: tuple[int, ...]) -> dict[str, bool]:
    """By strategy, whether it cuts a gate."""
    cut = {}
    model = Padded(GATES[name])
    with one_capture():
        for strategy in strategies:
            ready = optimized(model, batch(0), strategy)
            for number, size in enumerate(sizes):
                inputs = batch(number, size)
                expected = without_padding(model, inputs)
                assert outcome(model, ready(*inputs), reduced=True).distance(expected) < BOUND, strategy
            assert not ready.fallbacks
            program = ready._step.program
            gates = [n for n, i in enumerate(program.instructions) if i.op == "lancet.gate"]
            ranges = [positions(program, r) for r in ready.plan.ranges]
            cut[strategy] = any(first <= gate <= last for gate in gates for first, last in ranges)
    return cut


@pytest.mark.long
@pytest.mark.parametrize("name", GATES)
def test_strategies_that_cut(pool, name: str) -> None:
    """Routing is that of the whole batch, also in another number of sequences than was planned."""
    strategies = ("lancet",) if name == "gshard" else ("lancet", "duplex")
    for cut in pool.run(planned, name, strategies, (B, B, B - 2), ranks=2, timeout_s=500):
        assert cut["lancet"] == (name != "gshard")


def fused() -> None:
    model = Padded(GATES["topk"]).float()
    single = tuple(t.float() if t.is_floating_point() else t for t in batch(0))
    ready = optimized(model, single, "lancet", backend="fused", lowering="fused")
    assert all(group.fused for group in ready.plan.fused)
    for number in range(2):
        inputs = tuple(t.float() if t.is_floating_point() else t for t in batch(number))
        expected = without_padding(model, inputs)
        assert outcome(model, ready(*inputs), reduced=True).distance(expected) < 2e-5
    assert not ready.fallbacks


@pytest.mark.long
def test_in_fused_launches(pool) -> None:
    """In the interpreter."""
    pool.run(fused, ranks=2, timeout_s=500)
