"""Blocks of transformers: what Megatron's partitions cost, the larger space, and the same by the clock."""

from dataclasses import replace

import numpy as np
import pytest

from bench.papers.primepar import (
    BlockSizes,
    best_megatron,
    fixed,
    partition_program,
    problem,
    spatial,
)
from lancet_kernels.graph.costs.clusters import load_cluster
from lancet_kernels.schedules.shard.partition_costs import all_reduce_ms
from lancet_kernels.schedules.shard.segments import borders_of, megatron, solve
from lancet_kernels.schedules.time.simulate import simulate
from tests.grids import few_of

P3DN = load_cluster("p3dn")
FOUR_A_NODE = replace(P3DN, gpus_per_node=4)
SIZES = BlockSizes(width=1024, hidden=4096)


def test_a_block_is_cut_as_in_the_slides() -> None:
    """Single tensors up to the first addition; the second residual edge keeps the rest in one segment."""
    assert borders_of(problem(P3DN, SIZES, 8, 256, 4)) == [0, 1, 2, 3, 4, 5, 10]


def test_megatron_sums_four_times_a_layer_and_redistributes_nothing() -> None:
    p = problem(P3DN, SIZES, 8, 256, 8)
    solution = fixed(p, megatron(p.operators, 0, 3))
    summed = all_reduce_ms(P3DN, [range(8)], 8 * 256 * 1024 * 2)
    assert solution.inter_ms == 0
    assert solution.intra.collective_ms == pytest.approx(4 * summed)
    data_parallel = fixed(p, megatron(p.operators, 3, 0))
    weights = sum(all_reduce_ms(P3DN, [range(8)], 2 * n) for n in (3 << 20, 1 << 20, 4 << 20, 4 << 20))
    assert data_parallel.intra.collective_ms == pytest.approx(weights)
    assert data_parallel.memory_bytes > solution.memory_bytes


@pytest.mark.parametrize("devices", few_of([4, 8, 16], 1))
def test_the_larger_space_is_never_worse(devices: int) -> None:
    whole = problem(P3DN, SIZES, 8, 512, devices)
    splits = spatial(whole)
    best = solve(splits, layers=4)
    assert solve(whole, layers=4).ms <= best.ms + 1e-9
    assert best.ms <= best_megatron(splits, devices, layers=4).ms + 1e-9
    assert any("P2x2" in str(p) for p in whole.choices[2])


@pytest.mark.parametrize("devices", few_of([4, 8], 1))
def test_the_clock_says_what_the_cost_model_says(devices: int) -> None:
    """A block as a Program, simulated: rings are hidden where the cost model says so."""
    p = problem(FOUR_A_NODE, SIZES, 8, 512, devices)
    rng = np.random.default_rng(0)
    for partitions in (
        solve(p).partitions,
        megatron(p.operators, 1, devices.bit_length() - 2),
        *([c[rng.integers(len(c))] for c in p.choices] for _ in range(3)),
    ):
        program = partition_program(p, partitions)
        timeline = simulate(program, lambda i, _: i.milliseconds)
        solution = fixed(p, partitions)
        assert timeline.iteration_ms == pytest.approx(solution.ms, rel=1e-9)
        assert timeline.exposed_ms == pytest.approx(solution.ms - solution.intra.compute_ms, rel=1e-9)
