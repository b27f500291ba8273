"""The fused kernels, dispatch to combine, forward and backward, in one launch and in two; their parts alone.

One PE: rows travel within the device. The parts: the rows moved by permute and combine (communication), and
the same GEMMs as grouped GEMMs, without the activation (gemm). The report makes
eta = max(communication, gemm) / fused of them.
"""

from collections.abc import Callable

import pytest
import torch

from lancet_kernels import ops
from lancet_kernels.kernels.moe.permute import combine, permute
from lancet_kernels.kernels.overlap import default_overlap_config
from lancet_kernels.measuring.fused_pass import FusedPasses
from lancet_kernels.tuning.workloads import Workload


class Parts:
    """What the fused launches do, as launches of their own."""

    def __init__(self, passes: FusedPasses) -> None:
        self.w, self.passes = passes.workload, passes
        self.row, self.weight = passes.routing.row, passes.routing.weight
        self.count = passes.routing.count[None]
        num_rows = int(self.count.sum())
        self.rows = passes.x.new_zeros(num_rows, self.w.width)
        self.pre = passes.x.new_zeros(num_rows, self.w.wide)
        self.hidden = passes.x.new_zeros(num_rows, self.w.hidden)

    def communication(self) -> None:
        permute(self.passes.x, self.row, None, len(self.rows), out=self.rows)
        combine(self.rows, self.row, self.weight)

    def gemms_forward(self) -> None:
        experts = self.passes.experts
        ops.grouped_gemm(self.rows, self.count, experts.w1, None)
        ops.grouped_gemm(self.hidden, self.count, experts.w2, None)

    def gemms_backward(self) -> None:
        experts = self.passes.experts
        ops.grouped_gemm_dx(self.rows, self.count, experts.w2)
        ops.grouped_gemm_dx(self.pre, self.count, experts.w1)
        ops.grouped_gemm_dw(self.hidden, self.rows, self.count)
        ops.grouped_gemm_dw(self.rows, self.pre, self.count)


def work_of(w: Workload, dtype: torch.dtype, direction: str) -> dict[str, float]:
    """FLOPs, and bytes if every operand is moved once. Backward: dX and dW of both GEMMs."""
    rows = w.experts * w.capacity
    weights = w.experts * w.width * (w.wide + w.hidden)
    flops = 2.0 * rows * w.width * (w.wide + w.hidden)
    moved = dtype.itemsize * (2 * w.tokens * w.width + 2 * rows * (w.width + w.hidden) + weights)
    backward = direction == "backward"
    return {"flops": (1 + backward) * flops, "moved_bytes": (1 + backward) * moved}


CONTENDERS = {
    "one launch": "fused",
    "rows alone": "communication",
    "GEMMs alone": "gemm",
}


@pytest.mark.parametrize("contender", list(CONTENDERS))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def bench_fused(measure, workload, device, dtype, direction, contender) -> None:
    passes = FusedPasses(workload, dtype, device)
    config = default_overlap_config(workload.width, workload.hidden, workload.activation, dtype, device)
    parts = Parts(passes)

    def backward() -> None:
        # The forward is part of the pass: its rows are what the backward needs.
        passes.forward_backward(config)

    runs: dict[str, Callable[[], object]] = {
        "rows alone": parts.communication,
        "GEMMs alone": parts.gemms_forward if direction == "forward" else parts.gemms_backward,
    }
    fused = (lambda: passes.forward(config)) if direction == "forward" else backward
    if direction == "backward" and contender.endswith("alone"):
        alone = runs[contender]
        forward_part = parts.communication if contender == "rows alone" else parts.gemms_forward
        runs[contender] = lambda: (forward_part(), alone())
    work = work_of(workload, dtype, direction)
    if direction == "backward":
        work = {key: value + work_of(workload, dtype, "forward")[key] for key, value in work.items()}
    if contender == "rows alone":
        # Rows in and out, to the buffers and back.
        rows = workload.tokens + workload.experts * workload.capacity
        directions = 1 if direction == "forward" else 2
        work = {"moved_bytes": 2.0 * directions * dtype.itemsize * workload.width * rows}
    measure(
        runs.get(contender, fused),
        group="fused " + ("forward" if direction == "forward" else "forward and backward"),
        name=contender,
        ours=True,
        workload=workload,
        role=CONTENDERS[contender],
        **work,
    )
    for exchange in passes.exchanges(config):
        exchange.check()
