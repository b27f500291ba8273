"""Rows to where their experts' rows lie (permute) and back with weights (combine); peers: the torch ops."""

import pytest
import torch

from lancet_kernels import ops
from lancet_kernels.kernels.moe.permute import combine, permute


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
    out = torch.empty_like(rows)
    runs = {
        ("permute", "ours"): lambda: permute(x, row, None, kept, out=out),
        ("permute", "torch ops"): lambda: ops.dispatch(x, row, None, kept),
        ("combine", "ours"): lambda: combine(rows, row, weight),
        ("combine", "torch ops"): lambda: ops.combine(rows, row, weight),
    }
    measure(runs[kernel, contender], group=kernel, name=contender, ours=contender == "ours", workload=w)
