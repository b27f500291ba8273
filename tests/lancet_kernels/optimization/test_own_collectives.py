"""Functional collectives that a user's step calls itself: planned, they go over the link like all others."""

from __future__ import annotations

import re
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from lancet_kernels.errors import CommunicationError
from lancet_kernels.ops.comm.link import emulate_link, link
from tests.optimized import optimized
from tests.ranks import RankPool
from tests.refusals import refusal

NUMBERS, GBPS = 4096, 0.01


class Step(nn.Module):
    """x[N] -> loss. The ranks gather what they see, and subtract its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(NUMBERS))

    def forward(self, x: Tensor) -> Tensor:
        seen = functional.all_gather_tensor(x.detach(), 0, dist.group.WORLD)
        return ((x - seen.mean()) * self.scale).square().mean()


def own_collective() -> tuple[bool, int, float, str]:
    """-> whether gradients are those of the module; bytes on the link, ms waited there; what the rank hears
    whose peer stays away."""
    step, x = Step(), torch.randn(NUMBERS, generator=torch.Generator().manual_seed(dist.get_rank()))
    step(x).backward()
    expected, step.scale.grad = step.scale.grad, None
    ready = optimized(step, (x,), "none", reduce_gradients=False)
    emulate_link(GBPS)
    link.read()
    ready(x).backward()
    traffic = link.read()
    emulate_link(None)
    equal = bool(torch.allclose(step.scale.grad, expected, rtol=1e-6))
    heard = ""
    if dist.get_rank() == 1:
        time.sleep(2.5)
    else:
        # A call waits for the other rank before: to agree on it.
        heard = refusal(ready.bare_step(((x,), {})), CommunicationError)
    return equal, traffic.bytes_sent, traffic.waited_ms["all_gather"], heard


def test_goes_over_the_link(pool: RankPool) -> None:
    results = pool.run(own_collective, collective_timeout_s=1.0, leave_together=False)
    for equal, sent, waited_ms, _ in results:
        assert equal
        assert sent == 4 * NUMBERS
        assert waited_ms > 0
    assert re.fullmatch(r"rank 0 waited \d+\.\d s in all_gather for rank\(s\) 1", results[0][3])
