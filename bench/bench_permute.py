"""Rows to their experts' buffers (permute) and back with weights (combine); the peers are the torch ops."""

import pytest
import torch

from lancet_kernels import ops
from lancet_kernels.kernels.permute import combine, permute
from lancet_kernels.tune_tasks import routed


@pytest.mark.parametrize("contender", ["ours", "torch ops"])
@pytest.mark.parametrize("kernel", ["permute", "combine"])
def bench_rows(measure, workload, device, dtype, kernel, contender) -> None:
    w = workload
    weight, found = routed(w, device)
    places = found.expert_TK, found.slot_TK
    x = torch.randn(w.tokens, w.width, dtype=dtype, device=device)
    rows = torch.randn(w.experts, w.capacity, w.width, dtype=dtype, device=device)
    out = torch.empty_like(rows)
    runs = {
        ("permute", "ours"): lambda: permute(x, *places, None, w.experts, w.capacity, out=out),
        ("permute", "torch ops"): lambda: ops.dispatch(x, *places, None, 1, w.experts, w.capacity),
        ("combine", "ours"): lambda: combine(rows, *places, weight),
        ("combine", "torch ops"): lambda: ops.combine(rows[None], *places, weight),
    }
    kept = int(found.kept_E.sum())
    measure(
        runs[kernel, contender],
        group=kernel,
        name=contender,
        ours=contender == "ours",
        workload=w,
        flops=2.0 * kept * w.width if kernel == "combine" else 0.0,
        moved_bytes=dtype.itemsize * w.width * (kept + w.tokens) + 16 * w.tokens * w.choices,
    )
