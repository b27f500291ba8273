"""The whole MoE layer on one rank, forward, and with backward: ours fused, the torch reference, peers."""

import pytest
import torch
from peers import PEERS, Absent, make_peer

from lancet_kernels import MoELayer

OURS = {"ours, fused": "fused", "torch reference": "torch"}


def make_layer(contender, w, dtype, device):
    """-> what takes x [T, D]. Skips, with the reason, if it cannot be had."""
    if contender in OURS:
        return MoELayer(
            w.width, w.hidden, w.experts, top_k=w.choices, gate="topk", capacity_factor=1.25,
            activation=w.activation, backend=OURS[contender], device=device, dtype=dtype,
        )  # fmt: skip
    try:
        return make_peer(contender, w, dtype, device)
    except Absent as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("contender", [*OURS, *PEERS])
@pytest.mark.parametrize("passes", ["forward", "forward and backward"])
def bench_moe_layer(measure, workload, device, dtype, passes, contender) -> None:
    w = workload
    layer = make_layer(contender, w, dtype, device)
    training = passes != "forward"
    x = torch.randn(w.tokens, w.width, dtype=dtype, device=device, requires_grad=training)
    dy = torch.randn_like(x)

    def run() -> None:
        with torch.set_grad_enabled(training):
            y = layer(x)
        if training:
            y.backward(dy)

    rows, weights = w.tokens * w.choices, w.experts * w.width * (w.wide + w.hidden)
    factor = 3 if training else 1
    measure(
        run,
        group=f"MoE layer {passes}",
        name=contender,
        ours=contender == "ours, fused",
        workload=w,
        flops=factor * 2.0 * rows * w.width * (w.wide + w.hidden),
        moved_bytes=factor * dtype.itemsize * (2 * w.tokens * w.width + 2 * rows * w.width + weights),
    )
