"""PrimePar's cost model by hand, and segmented dynamic programming against brute force."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bench.papers.primepar import EDGES, BlockSizes, block, problem
from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.clusters import load_cluster
from lancet_kernels.graph.rules.slices import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    LINEAR,
    Partition,
    all_reduces,
    home_square,
    split,
    square,
)
from lancet_kernels.schedules.shard.partition_costs import (
    PartitionCost,
    all_reduce_ms,
    boxes,
    intra_cost,
    linear,
    pointwise,
    redistributions,
    redistributions_ms,
    shift_ms,
    travelling_shares,
)
from lancet_kernels.schedules.shard.segments import (
    Problem,
    Solution,
    candidates,
    megatron,
    solution_of,
    solve,
    solve_apart,
)
from tests.grids import few_of

P3DN = load_cluster("p3dn")
FOUR_A_NODE = replace(P3DN, gpus_per_node=4)
SIZES = BlockSizes(width=1024, hidden=4096)


def made_up(edges: tuple[tuple[int, int], ...], choices: int, seed: int) -> Problem:
    """A graph whose costs are random numbers; its ends are alike."""
    rng = np.random.default_rng(seed)
    count = 1 + max(j for _, j in edges)
    operators = tuple(pointwise(f"operator {n}", 2, 2, 2) for n in range(count))
    partitions = tuple(Partition((split(d),)) for d in "bmk")[:choices]
    made = Problem(P3DN, operators, edges, (partitions,) * count)
    costs = [
        [PartitionCost(ms, memory_bytes=b) for ms, b in zip(*rng.random((2, choices)), strict=True)]
        for _ in operators
    ]
    costs[-1] = costs[0]
    made.__dict__["costs"] = costs
    made.__dict__["edge_ms"] = {e: rng.random((choices, choices)) for e in edges}
    return made


def brute_force(p: Problem, layers: int) -> float:
    sizes = [len(c) for c in p.choices]
    ranges = [range(n) for n in sizes[:1] + sizes[1:] * layers]
    return min(solution_of(p, chosen).ms for chosen in itertools.product(*ranges))


def total_ms(solutions: Sequence[Solution]) -> float:
    return sum(s.ms for s in solutions)


def total_bytes(solutions: Sequence[Solution]) -> float:
    return sum(s.memory_bytes for s in solutions)


GRAPHS = {
    "chain": ((0, 1), (1, 2), (2, 3)),
    "residual": ((0, 1), (1, 2), (0, 2), (2, 3)),
    "two residuals": ((0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (2, 4)),
    "branches": ((0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (0, 4)),
    "a branch from the first": ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4)),
    "one segment": ((0, 2), (1, 3), (0, 1), (2, 3)),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(("layers", "choices"), few_of([(1, 3), (2, 2), (3, 2)], 0, 2))
def test_segments_find_what_brute_force_finds(name: str, layers: int, choices: int) -> None:
    for seed in range(3):
        p = made_up(GRAPHS[name], choices, seed)
        best = solve(p, layers)
        assert best.ms == pytest.approx(brute_force(p, layers), rel=1e-12)
        assert len(best.partitions) == 1 + layers * (len(p.operators) - 1)


def test_a_block_of_real_costs_against_brute_force() -> None:
    """Eleven operators with two random partitions each, in a block whose attention is cut in two ways."""
    whole = problem(FOUR_A_NODE, SIZES, 8, 256, 8)
    rng = np.random.default_rng(1)
    choices = {
        o.name: [c[n] for n in rng.choice(len(c), 2, replace=False)]
        for o, c in zip(whole.operators, whole.choices, strict=True)
    }
    few = whole.restricted(choices)
    assert solve(few).ms == pytest.approx(brute_force(few, 1), rel=1e-12)
    assert solve(whole).ms <= solve(few).ms


@pytest.mark.parametrize("seeds", [(0,), (1,), (2,), (0, 1)])
def test_memory_is_a_limit(seeds: tuple[int, ...]) -> None:
    """On the sum, where problems stand apart. What fits is found whenever there is any, and is the best of
    all where it lies on the convex hull."""
    problems = [(made_up(GRAPHS["residual"], 3, seed), 1) for seed in seeds]
    free = solve_apart(problems)
    assert [s.ms for s in free] == [solve(p).ms for p, _ in problems]
    every = [
        [solution_of(p, chosen) for chosen in itertools.product(range(3), repeat=len(p.operators))]
        for p, _ in problems
    ]
    together = [(total_ms(of), total_bytes(of)) for of in itertools.product(*every)]
    least = min(size for _, size in together)
    for limit in np.linspace(least * 1.0001, total_bytes(free), 5):
        fits = solve_apart(problems, limit)
        assert total_bytes(fits) <= limit
        assert min(ms for ms, size in together if size <= limit) <= total_ms(fits) + 1e-12
    assert total_ms(solve_apart(problems, total_bytes(free))) == total_ms(free)
    with pytest.raises(UserError, match="memory limit"):
        solve_apart(problems, least * 0.99)


def test_the_slides_mlp_block() -> None:
    """Timeline of the MLP block, 2 nodes of 4: Megatron's {B, N, N} sums O / 2 in a node and W / 4 between
    nodes; {N, P2x2} sums O / 4 between nodes and nothing else."""
    fc2 = linear("fc2", 8, 2048, 16384, 4096)
    o, w = 8 * 2048 * 4096 * 2, 16384 * 4096 * 2
    baseline, found = Partition((split("b"), split("n"), split("n"))), Partition((split("n"), square(1)))
    groups = {phase: all_reduces(baseline, p) for phase, p in LINEAR.items()}
    assert groups[FORWARD] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups[BACKWARD] == ()
    assert groups[GRADIENT] == ((0, 4), (1, 5), (2, 6), (3, 7))
    expected = all_reduce_ms(FOUR_A_NODE, groups[FORWARD], o / 2) + all_reduce_ms(
        FOUR_A_NODE, groups[GRADIENT], w / 4
    )
    assert intra_cost(FOUR_A_NODE, fc2, baseline).collective_ms == pytest.approx(expected)
    # Two GPUs' gigabytes over one network card: 4 groups at once, each with 2 * 1/2 of its bytes.
    assert all_reduce_ms(FOUR_A_NODE, groups[GRADIENT], w / 4) == pytest.approx(2 * 0.045 + w / 10e9 * 1e3)
    cost = intra_cost(FOUR_A_NODE, fc2, found)
    assert cost.collective_ms == pytest.approx(2 * 0.045 + 4 * (o / 4) / 10e9 * 1e3)
    assert cost.exposed_ring_ms == 0 < cost.ring_ms
    assert cost.memory_bytes < intra_cost(FOUR_A_NODE, fc2, baseline).memory_bytes


def test_a_ring_that_is_longer_than_its_gemm_is_exposed() -> None:
    tiny = linear("tiny", 1, 64, 64, 64)
    cost = intra_cost(P3DN, tiny, Partition((square(1),)))
    step_ms = cost.compute_ms / 6
    # Between two steps I and W, dO and W, I and dO; beside the last one of the gradient dW, and W on its way
    # back to where the forward begins.
    latency = P3DN.intra_node_latency_us * 1e-3
    per_shift = latency + 2 * 32 * 32 / 104e9 * 1e3
    assert cost.ring_ms == pytest.approx(8 * per_shift)
    assert cost.exposed_ring_ms == pytest.approx(4 * (2 * per_shift - step_ms))
    # Whose phases begin at home leaves dW and W where they are; a device has one tile of the weight in both.
    home = intra_cost(P3DN, tiny, Partition((home_square(1, "n"),)))
    assert home.ring_ms == pytest.approx(6 * per_shift)
    assert home.memory_bytes == cost.memory_bytes == 64 * 64 / 4 * (16 + 2)


def test_shifts_between_nodes_share_the_network_card() -> None:
    neighbours, across = (1, 0, 3, 2, 5, 4, 7, 6), (4, 5, 6, 7, 0, 1, 2, 3)
    size = 1e6
    assert shift_ms(FOUR_A_NODE, range(8), size) == 0
    assert shift_ms(FOUR_A_NODE, neighbours, size) == pytest.approx(0.020 + size / 104e9 * 1e3)
    assert shift_ms(FOUR_A_NODE, across, size) == pytest.approx(0.045 + 4 * size / 10e9 * 1e3)


@pytest.mark.parametrize("seed", range(2))
def test_redistribution_against_elements(seed: int) -> None:
    """Which elements a device needs and nobody in its node has, or it has not itself, counted one by one."""
    rng = np.random.default_rng(seed)
    every = candidates(linear("l", 8, 8, 8, 8), 3, 1)
    for _ in range(10):
        before, after = (every[n] for n in rng.choice(len(every), 2))
        layouts = [boxes(before, FORWARD, ("b", "m", "k"), -1), boxes(after, FORWARD, ("b", "m", "n"), 0)]
        held, needed = ([elements(box) for box in layout] for layout in layouts)
        of_node = [set().union(*held[:4]), set().union(*held[4:])]
        inside = max(len(n & of_node[d // 4] - held[d]) for d, n in enumerate(needed))
        outside = max(
            sum(len(needed[d] - of_node[node]) for d in range(4 * node, 4 * node + 4)) for node in (0, 1)
        )
        latency = 0.0 if not inside + outside else 0.045 if outside else 0.020
        size = 512 * 1e5
        expected = latency + max(inside * 1e5 / 104e9, outside * 1e5 / 10e9) * 1e3
        shares = travelling_shares(*(layout[None] for layout in layouts), gpus_per_node=4)
        assert redistributions_ms(FOUR_A_NODE, *shares, size) == pytest.approx(expected)


def elements(box: np.ndarray) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(int(8 * a), int(8 * b)) for a, b in box)))


def test_redistribution_is_free_between_equal_forms() -> None:
    one, other = block(SIZES, 8, 256)[7:9]
    columns = Partition((split("b"), split("k")))
    assert not redistributions(P3DN, one, [columns], other, [columns]).any()
    assert redistributions(P3DN, one, [columns], other, [Partition((split("b"), split("m")))]).any()


def test_one_line_for_bad_input() -> None:
    operators = block(SIZES, 8, 256)
    with pytest.raises(UserError, match="powers of two"):
        Problem.over(P3DN, operators, EDGES, 6)
    with pytest.raises(AssertionError, match="the last operator of the one before"):
        solve(Problem.over(P3DN, operators[:4], EDGES[:3], 4), layers=2)
    with pytest.raises(AssertionError, match="the batch has a sequence"):
        megatron(operators, 4, 0)
