"""The size of the buckets that the planner chooses is that of the step that runs, and of its plan file."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from lancet_kernels.optimization import captured_step
from lancet_kernels.optimization.optimized_module import OptimizedModule
from tests.lancet_kernels.optimization.test_accumulated import counted_sums, one_large_batch
from tests.lancet_kernels.optimization.test_sharded import Case, Step, batch_of, distance, groups_with
from tests.optimized import optimized
from tests.ranks import RankPool

BOUND = 1e-9


def planned(**options: object) -> OptimizedModule:
    groups = groups_with(2)
    step, inputs = Step(groups, balance=0.0), (batch_of(dist.get_rank(), 0),)
    return optimized(step, inputs, "lancet-dw", groups=groups, reduce_gradients="mean", **options)


def small_buckets(folder: str) -> None:
    file, numbers = Path(folder, "plan.json"), []
    with mock.patch.object(captured_step, "bucket_sizes_ms", return_value={64: 1.0, 1 << 20: 2.0}):
        small = planned()
    if dist.get_rank() == 0:
        small.plan.save(file)
    dist.barrier()
    for step in (small, planned(plan=file)):
        with counted_sums() as sums:
            step(batch_of(dist.get_rank(), 0)).backward()
        numbers.append(len(sums))
        assert distance(step.module, one_large_batch(1), Case(2), of_gradients=True) < BOUND
    assert small.plan.bucket_bytes == 64
    assert "in buckets of 6.10352e-05 MiB: 1.00 ms in one schedule (1 MiB 2.00)" in small.plan.explain()
    assert numbers[0] == numbers[1] > 1


@pytest.mark.long  # by default: schedules/order/test_bucket_sizes.py
def test_buckets_are_those_of_the_plan(pool: RankPool, tmp_path: Path) -> None:
    pool.run(small_buckets, str(tmp_path))
