"""Routing: from scores to experts and slots. Ours in three launches; the peer is the gate in torch ops."""

import pytest
import torch

from lancet_kernels.kernels.moe.routing import route_scores
from lancet_kernels.ops.moe.gates import parse_gate


@pytest.mark.parametrize("contender", ["ours", "torch ops"])
def bench_routing(measure, workload, device, contender) -> None:
    w = workload
    score = torch.randn(w.tokens, w.experts, device=device)
    used = torch.zeros(w.experts, dtype=torch.int64, device=device)
    gate = parse_gate("topk")

    def torch_ops() -> object:
        expert = gate.select(score, None, None, w.experts, w.choices)
        return gate.assign_slots(score, expert, used, w.capacity)

    runs = {"ours": lambda: route_scores(score, used, w.choices, w.capacity), "torch ops": torch_ops}
    measure(
        runs[contender],
        group="routing",
        name=contender,
        ours=contender == "ours",
        workload=w,
        # Scores in; expert, slot and the two tables of slots out.
        moved_bytes=4 * w.tokens * w.experts + 16 * w.tokens * w.choices + 8 * w.experts * w.capacity,
        work_dtype=torch.float32,
    )
