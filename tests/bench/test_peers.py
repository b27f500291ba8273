"""What we compare with must compute an MoE layer: torch's ops, always at hand, against a plain loop."""

import pytest
import torch

from bench.peers import by_torch
from lancet_kernels.kernels.overlap import Experts, Routing
from lancet_kernels.ops.moe.expert_ops import activate


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_by_torch_is_an_moe_layer(activation: str) -> None:
    torch.manual_seed(0)
    tokens, width, hidden, experts, choices = 40, 32, 16, 4, 2
    wide = 2 * hidden if activation == "swiglu" else hidden
    x, dy = torch.randn(2, tokens, width, dtype=torch.float64).unbind()
    w1, w2 = (torch.randn(experts, *shape).double() for shape in ((width, wide), (hidden, width)))
    weight, expert = torch.randn(tokens, experts).double().softmax(-1).topk(choices)
    expert[3, 1] = expert[3, 0]  # twice the same
    order = expert.reshape(-1).argsort(stable=True)
    row = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order))).view_as(expert)
    count = torch.bincount(expert.reshape(-1), minlength=experts)
    got = by_torch(x, dy, Routing.of(expert, row, weight, count), Experts(w1, None, w2, None, activation))
    inputs = [t.requires_grad_() for t in (x, weight, w1, w2)]
    rows = [
        sum(
            weight[t, k] * (activate(x[t] @ w1[e], activation) @ w2[e])
            for k, e in enumerate(expert[t].tolist())
        )
        for t in range(tokens)
    ]
    y = torch.stack(rows)
    for mine, expected in zip(got, (y, *torch.autograd.grad(y, inputs, dy)), strict=True):
        torch.testing.assert_close(mine, expected)
