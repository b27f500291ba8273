"""An MoE layer beside alternatives, permutation of rows, and planning time.

The layer, forward and backward, beside its alternatives, in turns: one round each.

    ours, dropless; ours, capacity 1.25     `MoELayer`
    transformers grouped_mm, eager          its Mixtral block, with the same weights; checked equal first
    dense                                   a SwiGLU layer of the same FLOPs: a lower bound

`extra_info` has the medians of all, and the ratios of ours to each of them.

Rows sorted by expert (permute) and back with weights (combine); alternatives: the torch ops.

Plans of models on a cluster file; on the CPU, real sizes everywhere.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from bench.peers import same_weights
from lancet_kernels import ops
from lancet_kernels.kernels.rows import combine, permute
from lancet_kernels.measure.fused_pass import Workload
from lancet_kernels.predict.simulate import Setting
from lancet_kernels.schedules.cut.partition_range import PartitionOptions
from lancet_kernels.schedules.strategies import PlanningOptions

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


@pytest.mark.parametrize("contender", ["ours", "torch ops"])
@pytest.mark.parametrize("kernel", ["permute", "combine"])
def bench_rows(measure, workload, device, dtype, kernel, contender) -> None:
    w = workload
    score = torch.randn(w.tokens, w.experts, device=device)
    used = torch.zeros(w.experts, dtype=torch.int64, device=device)
    expert, slot, weight, used = ops.gate(score, used, None, None, "topk", w.choices, w.capacity)
    counts = ops.kept_counts(used, w.capacity, 1)
    row, kept = ops.send_rows(expert, slot, counts), int(counts.sum())
    x = torch.randn(w.tokens, w.width, dtype=dtype, device=device)
    rows = torch.randn(kept, w.width, dtype=dtype, device=device)
    runs = {
        ("permute", "ours"): lambda: permute(x, row, None, kept),
        ("permute", "torch ops"): lambda: ops.dispatch(x, row, None, kept),
        ("combine", "ours"): lambda: combine(rows, row, weight),
        ("combine", "torch ops"): lambda: ops.combine(rows, row, weight),
    }
    measure(runs[kernel, contender], group=kernel, name=contender, ours=contender == "ours", workload=w)


@pytest.mark.parametrize("strategy", ["tutel", "lancet-dw", "lancet"])
@pytest.mark.parametrize("model", ["gpt2-s-moe", "gpt2-l-moe"])
def bench_planning(benchmark, measure, model, strategy) -> None:
    setting = Setting(model, "p4de", 16, layers=None if benchmark.enabled else 2)
    step = setting.priced
    options = PlanningOptions(PartitionOptions.from_environment(), setting.hardware.memory_gb)
    measure(
        # A new planner each time, because planners cache plans.
        lambda: step.planner(options).plan(strategy),
        group=f"planning {model}",
        name=strategy,
        ours=False,
        rounds=1,
        warmup=0,
    )
