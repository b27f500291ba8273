"""Gradient all-reduces in the captured graph, in buckets, against all-reduces one by one."""

import pytest
import torch
import torch.distributed as dist

from lancet_kernels import expert_parameters
from lancet_kernels.ops.comm.groups import Groups
from lancet_kernels.optimization.captured_step import CapturedStep
from lancet_kernels.schedules.rewrite.buckets import insert_all_reduces
from tests.planned_steps import (
    StepCase,
    build_step,
)


def reduce_on_rank(bucket_bytes: int) -> dict[str, object]:
    """Gradients of the graph with buckets, bit by bit against all-reduces one by one."""
    case = StepCase(layers=2, dtype=torch.float32)
    module, inputs = build_step(case)
    experts = {
        name
        for name, p in module.named_parameters()
        if any(p is expert for expert in expert_parameters(module))
    }
    found: dict[str, list] = {}
    buckets: list[str] = []
    data = Groups.around().data
    for reduced in (False, True):
        step = CapturedStep.of(module, inputs, {}, "", None)
        joint, names = step.captured.joint, step.captured.parameter_of_gradient()
        if reduced:
            over = {name: "" if name in experts else data for name in names.values()}
            buckets = insert_all_reduces(joint, names, over, bucket_bytes=bucket_bytes)
        values = step.graph_inputs()
        with torch.no_grad():
            results = torch.fx.Interpreter(joint).run(*values, enable_io_processing=False)
        for position, name in names.items():
            found.setdefault(name, []).append(results[position])
    worst = []
    for name, (own, total) in found.items():
        wanted = own.clone()
        if name not in experts:
            dist.all_reduce(wanted)
            assert not torch.equal(wanted, own), f"{name}: ranks have the same gradient, nothing was tested"
        if not torch.equal(wanted, total):
            worst.append(name)
    return {"wrong": worst, "buckets": len(buckets), "experts": len(experts), "all": len(found)}


@pytest.mark.long
@pytest.mark.parametrize("bucket_bytes", [2000, 1, 1 << 20])
def test_buckets_give_the_bits_of_plain_all_reduces(pool, bucket_bytes):
    for found in pool.run(reduce_on_rank, bucket_bytes, ranks=2):
        assert found["wrong"] == []
        assert found["experts"] == 2
        replicated = found["all"] - found["experts"]
        wanted = {1: replicated, 1 << 20: 1}.get(bucket_bytes)
        assert found["buckets"] == wanted or (wanted is None and 1 < found["buckets"] < replicated)
