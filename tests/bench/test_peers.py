"""What we compare with must compute an MoE layer: the adapter always at hand, against a plain loop."""

import pytest
import torch

from bench.peers import Absent, TorchGrouped, make_peer, quack_gemm
from lancet_kernels.ops.moe.expert_activation import activate
from lancet_kernels.tuning.workloads import Workload


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_torch_grouped_is_an_moe_layer(activation: str) -> None:
    w = Workload("small", tokens=40, width=32, hidden=16, experts=4, choices=2, activation=activation)
    torch.manual_seed(0)
    layer = TorchGrouped(w, torch.float32, torch.device("cpu"))
    x = torch.randn(w.tokens, w.width, requires_grad=True)
    weight_TK, expert_TK = layer.router(x).softmax(-1).topk(w.choices)

    def expert(t: int, e: int) -> torch.Tensor:
        return activate(x[t] @ layer.w1[e], activation) @ layer.w2[e]

    rows = [
        sum(weight_TK[t, k] * expert(t, e) for k, e in enumerate(expert_TK[t].tolist()))
        for t in range(w.tokens)
    ]
    y, expected = layer(x), torch.stack(rows)
    torch.testing.assert_close(y, expected)
    dy, inputs = torch.randn_like(y), (x, *layer.parameters())
    gradients = (torch.autograd.grad(out, inputs, dy, retain_graph=True) for out in (y, expected))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)


def test_a_peer_that_cannot_be_had_says_why() -> None:
    w = Workload("small", 8, 8, 8, 2, 1)
    with pytest.raises(Absent, match="liger-cute-kernels needs a GPU"):
        make_peer("liger-cute-kernels", w, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(Absent, match="liger-cute-kernels is not installed"):
        make_peer("liger-cute-kernels", w, torch.bfloat16, torch.device("cuda"))
    with pytest.raises(Absent, match="quack is not installed"):
        quack_gemm(torch.device("cuda"))
