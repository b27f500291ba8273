"""Gradients are summed in buckets, as many in a step that runs a plan file as in the one that was planned."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from lancet_kernels.optimization.optimized_module import OptimizedModule
from lancet_kernels.schedules.rewrite import buckets
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
    with mock.patch.multiple(buckets, BUCKET_BYTES=64, LARGEST_BUCKET_BYTES=64):
        small = planned()
        if dist.get_rank() == 0:
            small.plan.save(file)
        dist.barrier()
        again = planned(plan=file)
    for step in (small, again):
        with counted_sums() as sums:
            step(batch_of(dist.get_rank(), 0)).backward()
        numbers.append(len(sums))
        assert distance(step.module, one_large_batch(1), Case(2)) < BOUND
    assert numbers[0] == numbers[1] > 1


def test_about_32_buckets_of_1_to_16_mib() -> None:
    mib = 1 << 20
    assert [buckets.bucket_bytes_of(n * mib) // mib for n in (1, 32, 96, 512, 4096)] == [1, 1, 3, 16, 16]


@pytest.mark.long
def test_buckets_are_those_of_the_plan(pool: RankPool, tmp_path: Path) -> None:
    pool.run(small_buckets, str(tmp_path))
