"""The MoE layer, forward and backward, beside what a user would have instead, in turns: one round each.

    ours, dropless; ours, capacity 1.25     `MoELayer`
    transformers grouped_mm, eager          its Mixtral block, with the same weights; checked equal first
    dense                                   a SwiGLU layer of the same FLOPs: what no MoE layer gets below

`extra_info` has the medians of all, and ours over each of them.
"""

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from bench.peers import same_weights
from lancet_kernels.measure.fused_pass import Workload

WORKLOADS = {
    w.name: w
    for w in (
        Workload("few experts", 2048, 512, 1024, 8, 2, "swiglu"),
        Workload("many experts", 2048, 512, 256, 64, 8, "swiglu"),
    )
}
ROUNDS, WARMUP = 7, 1


def one_pass(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        layer(x).backward(dy)

    return run


@pytest.mark.parametrize("name", WORKLOADS)
def bench_moe_peers(benchmark, device, dtype, name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    w = WORKLOADS[name] if benchmark.enabled else WORKLOADS[name].small()
    layers = same_weights(w, dtype, device)
    x = torch.randn(w.tokens, w.width, dtype=dtype, device=device, requires_grad=True)
    runs = {peer: one_pass(layer, x, torch.randn_like(x)) for peer, layer in layers.items()}
    seconds: dict[str, list[float]] = {peer: [] for peer in runs}
    ours = "ours, dropless"

    def timed(peer: str) -> None:
        begin = time.perf_counter()
        runs[peer]()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[peer].append(time.perf_counter() - begin)

    def the_others() -> None:
        for peer in runs:
            if peer != ours:
                timed(peer)

    benchmark.group = f"MoE layer beside its peers {w.name}"
    benchmark.pedantic(lambda: timed(ours), setup=the_others, rounds=ROUNDS, warmup_rounds=WARMUP)
    warmup = WARMUP if benchmark.enabled else 0
    median = {peer: statistics.median(times[warmup:]) * 1e3 for peer, times in seconds.items()}
    info = {
        "kernel": "MoE layer beside its peers",
        "contender": ours,
        "ours": True,
        "workload": str(w),
        "device": f"{device.type}, {torch.get_num_threads()} threads",
        "median_ms": median,
        "ours_over": {peer: median[ours] / ms for peer, ms in median.items() if peer != ours},
    }
    benchmark.extra_info.update(info)
