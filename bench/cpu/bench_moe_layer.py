"""The whole MoE layer on one rank, forward, and with backward: ours fused and unfused, peers."""

import pytest
import torch

from bench.peers import OURS, PEERS, Absent, make_layer


@pytest.mark.parametrize("contender", [*OURS, *PEERS])
@pytest.mark.parametrize("passes", ["forward", "forward and backward"])
def bench_moe_layer(measure, workload, device, dtype, passes, contender) -> None:
    w = workload
    try:
        layer = make_layer(contender, w, dtype, device)
    except Absent as error:
        pytest.skip(str(error))
    training = passes != "forward"
    x = torch.randn(w.tokens, w.width, dtype=dtype, device=device, requires_grad=training)
    dy = torch.randn_like(x)

    def run() -> None:
        # Else backward would add to the gradients of the call before.
        x.grad = None
        layer.zero_grad(set_to_none=True)
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
