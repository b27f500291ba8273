"""The documentation's `Step`, as `lancet plan --module` reads it."""

import torch
from torch import nn

from lancet_kernels import MoELayer


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), MoELayer(64, 256, 64), nn.LayerNorm(64))

    def forward(self, x, target):
        return (self.inner(x) - target).square().mean()


def make_step():
    return Step(), (torch.randn(4, 32, 64), torch.randn(4, 32, 64))
