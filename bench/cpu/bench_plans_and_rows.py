"""How long does a plan take? Models on a cluster file; on the CPU, real sizes everywhere.

And rows to where their experts' rows lie (permute) and back with weights (combine); peers: the torch ops.
"""

from __future__ import annotations

import pytest
import torch

from lancet_kernels import ops
from lancet_kernels.kernels.rows import combine, permute
from lancet_kernels.predict.simulate import Setting
from lancet_kernels.schedules.cut.partition_range import PartitionOptions
from lancet_kernels.schedules.strategies import PlanningOptions


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
        # A planner anew each time: it remembers what it planned.
        lambda: step.planner(options).plan(strategy),
        group=f"planning {model}",
        name=strategy,
        ours=False,
        rounds=1,
        warmup=0,
    )
