"""Measuring on CPU ranks: what a node takes, where ranks have not the same to do."""

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from lancet_kernels.graph.costs.measure import (
    beyond_others,
    beyond_roofline,
    measure_communication,
    measure_nodes,
)
from lancet_kernels.graph.from_fx import op_name, program_from_fx
from lancet_kernels.ops.comm.groups import Groups


def measured_on_rank() -> dict[str, float]:
    """Milliseconds by op; rank 1 multiplies matrices of 400^2, rank 0 of 4^2."""
    size = 400 if dist.get_rank() == 1 else 4
    x = torch.randn(size, size, dtype=torch.float64)
    module = make_fx(lambda x: (x @ x).sum())(x)
    times = measure_nodes(module, [x], dist.group.WORLD.group_name)
    return {op_name(n): times[n.name].milliseconds for n in module.graph.nodes if n.op == "call_function"}


def test_the_slowest_rank_counts(pool) -> None:
    first, second = pool.run(measured_on_rank, ranks=2)
    assert first == second
    # 1.3e8 FLOPs: more than 0.1 ms on any one core; those of rank 0 take some 0.01 ms.
    assert first["aten.mm"] > 0.1


def points_on_rank() -> dict[tuple[str, str], int]:
    """How many points each collective got; shards of the smallest size are of 128 numbers."""
    everything = {(c, "world"): 2048 for c in ("all_to_all", "all_reduce", "all_gather", "reduce_scatter")}
    model = measure_communication(everything, 8, Groups.around(), torch.device("cpu"), repeats=1)
    assert all(ms > 0 for points in model.points.values() for _, ms in points)
    return {key: len(points) for key, points in model.points.items()}


def test_every_collective_gets_points_of_its_own(pool) -> None:
    for found in pool.run(points_on_rank, ranks=2):
        assert len(found) == 4
        assert set(found.values()) == {2}


def test_times_that_others_say_are_too_long() -> None:
    assert beyond_others({1024: 0.1, 2048: 0.1, 4096: 0.2, 8192: 0.4}) == []
    assert beyond_others({1024: 1288.9, 2048: 0.1, 4096: 0.2}) == [1024], "a larger message takes less"
    assert beyond_others({1024: 0.1, 2048: 0.1, 4096: 43.0}) == [4096], "four times the bytes"
    assert beyond_others({1024: 0.1, 4096: 3.9}) == []
    assert beyond_others({1024: 5.0}) == []


def test_computations_beyond_their_roofline() -> None:
    def step(x, small):
        return x @ x + x @ x.t() + x.t() @ x, small @ small

    program = program_from_fx(make_fx(step)(torch.randn(256, 256), torch.randn(4, 4)))
    products = [i.name for i in program.instructions if i.op == "aten.mm"]
    alike = {i.name: 0.05 for i in program.instructions if not i.is_free} | dict.fromkeys(products[:3], 1.0)
    assert beyond_roofline(program, alike) == []
    assert beyond_roofline(program, alike | {products[1]: 30.0}) == [products[1]]
    assert beyond_roofline(program, alike | {products[3]: 30.0}) == [products[3]], "the small one"
    assert beyond_roofline(program, {}) == []
