"""Ranks with 0, 1, 7 and 64 tokens in one step, against one process that has all tokens and all experts."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels import Groups, MoELayer, fsdp, moe_losses
from lancet_kernels.ops.comm.link import emulate_link

TOKENS = (0, 1, 7, 64)
D, F, E = 6, 10, 8
GATES = {"topk": 2, "random": 2, "hash": 1, "gshard": 2, "sigmoid": 2}


def build_layer(gate: str, capacity_factor: float | None) -> MoELayer:
    """The same parameters however many ranks there are, with a standard deviation of 1."""
    torch.manual_seed(5)
    layer = MoELayer(
        D, F, E, top_k=GATES[gate], gate=gate, capacity_factor=capacity_factor, dtype=torch.float64
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(50)
    return layer


def batch(step: int) -> tuple[Tensor, Tensor]:
    """x and the gradient of y, of all ranks one after the other."""
    generator = torch.Generator().manual_seed(step)
    shape = sum(TOKENS), D
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))


def run(layer: MoELayer, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y, sums = layer(x, return_sums=True)
    losses = moe_losses([sums])
    # Divided by the number of ranks, so that the sum of the gradients is that of the global loss.
    ((y * dy).sum() + (losses.balance + losses.z).sum() / layer.ranks).backward()
    found = {"y": y, "dx": x.grad, "balance": losses.balance, "z": losses.z, "dropped": losses.dropped}
    found |= {name: p.grad for name, p in layer.named_parameters()}
    return {name: value.detach() for name, value in found.items()}


def on_rank(gate: str, capacity_factor: float | None) -> list[dict[str, Tensor]]:
    """Two steps, in which each rank has another number of tokens."""
    layer, results = build_layer(gate, capacity_factor), []
    for step in range(2):
        order = TOKENS if step == 0 else TOKENS[::-1]
        x, dy = (t.split(order)[dist.get_rank()] for t in batch(step))
        layer.zero_grad()
        results.append(run(layer, x, dy))
    return results


@pytest.mark.parametrize("gate", GATES)
def test_dropless(pool, gate):
    by_rank = pool.run(on_rank, gate, None, ranks=4)
    for step in range(2):
        expected, ranks = run(build_layer(gate, None), *batch(step)), [results[step] for results in by_rank]
        close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)  # noqa: E731
        for name in ("y", "dx"):
            close(torch.cat([got[name] for got in ranks]), expected[name])
        for name in ("balance", "z"):
            close(torch.stack([got[name] for got in ranks]).mean(0), expected[name])
        for name in ("w1", "w2"):
            close(torch.cat([got[name] for got in ranks]), expected[name])
        if "router" in expected:
            close(sum(got["router"] for got in ranks), expected["router"])


def test_each_rank_has_the_capacity_of_its_own_tokens(pool):
    by_rank = pool.run(on_rank, "topk", 0.5, ranks=4)
    for (got, _), x, dy in zip(by_rank, *(t.split(TOKENS) for t in batch(0)), strict=True):
        if len(x):
            # The losses are of all ranks, so only what does not follow from them.
            alone = build_layer("topk", 0.5)(x)
            torch.testing.assert_close(got["y"], alone, rtol=1e-9, atol=1e-11)
        assert got["y"].shape == dy.shape
    assert all(0 < got["dropped"] < 1 for got, _ in by_rank)


def sharded_on_rank(gbps: float | None) -> dict[str, Tensor]:
    """Two steps under FSDP, in each of which another of two ranks has no tokens."""
    groups = Groups.around(dist.group.WORLD)
    torch.manual_seed(0)
    layer = MoELayer(D, F, E, top_k=2, gate="topk", capacity_factor=None, groups=groups, dtype=torch.float64)
    model = fsdp(torch.nn.Sequential(torch.nn.Linear(D, D, dtype=torch.float64), layer))
    emulate_link(gbps)
    try:
        for step in range(2):
            x = batch(step)[0][: 9 * (step == dist.get_rank())]
            model(x).square().sum().backward()
    finally:
        emulate_link(None)
    return {name: p.grad.to_local() for name, p in model.named_parameters()}


def test_a_rank_without_tokens_on_an_emulated_link_under_fsdp(pool):
    """The same bits as without the link; Gbit/s low enough that messages wait."""
    for paced, unpaced in zip(pool.run(sharded_on_rank, 0.01), pool.run(sharded_on_rank, None), strict=True):
        assert all(bool(gradient.any()) for gradient in paced.values())
        assert all(torch.equal(paced[name], unpaced[name]) for name in unpaced)
