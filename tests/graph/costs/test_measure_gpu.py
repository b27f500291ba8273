"""Measuring on a GPU: nodes of a graph by events, collectives through NCCL (one rank)."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from lancet_kernels import ops
from lancet_kernels.graph.costs.measure import measure_communication, measure_nodes
from lancet_kernels.graph.from_fx import op_name
from lancet_kernels.ops.comm.groups import Groups, group_device
from lancet_kernels.ops.comm.link import link

pytestmark = pytest.mark.gpu


@pytest.fixture
def nccl() -> Iterator[str]:
    """Name of a group of one rank."""
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


def test_nodes_take_what_the_device_takes() -> None:
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    small = torch.zeros(4, device="cuda")
    module = make_fx(lambda x, s: (x @ x, s + 1), tracing_mode="fake")(x, small)
    by_op = {op_name(n): n.name for n in module.graph.nodes if n.op == "call_function"}
    times = measure_nodes(module, [x, small], "")
    # 1.1e12 FLOPs: 0.4 ms at 2.7 PFLOP/s, which no such GPU reaches, and 40 ms on a slow one.
    assert 0.4 < times[by_op["aten.mm"]].milliseconds < 40
    # A launch is not in it: that alone would be some 0.01 ms, and 0.1 ms from Python.
    assert times[by_op["aten.add"]].milliseconds < 0.02


def test_all_to_all_through_nccl(nccl: str) -> None:
    count = torch.tensor([[2, 0, 1]], device="cuda")
    rows = torch.randn(3, 4, device="cuda")
    received = ops.exchange_counts(count, 4, torch.float32, nccl)
    assert torch.equal(received, count)
    link.read()
    assert torch.equal(ops.all_to_all(rows, count, received, nccl, True), rows)
    traffic = link.read()
    assert traffic.count == 1
    assert 0 < traffic.all_to_all_ms < 1000
    assert 0 <= traffic.exposed_ms < 1000


def test_time_that_computation_hides_is_not_exposed(nccl: str) -> None:
    rows = 1 << 18
    count = torch.tensor([[rows]], device="cuda")
    buffer = torch.zeros(rows, 256, device="cuda")
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    exposed = {}
    for name, products in (("alone", 0), ("hidden", 20)):
        for _ in range(3):
            link.read()
            pending = ops.start_all_to_all(buffer, count, count, nccl, True)
            for _ in range(products):
                x @ x
            pending.wait()
            exposed[name] = link.read().exposed_ms
    assert exposed["hidden"] < 0.5 * exposed["alone"] + 0.05


def test_collectives_are_timed_where_the_step_is(nccl: str) -> None:
    assert group_device(nccl).type == "cuda"
    sizes = {("all_to_all", "world"): 1 << 16, ("all_reduce", "world"): 1 << 16}
    model = measure_communication(sizes, 64, Groups.around(), torch.device("cuda"), repeats=2)
    # One rank sends no row to itself.
    assert model.milliseconds("all_to_all", 1 << 16) == 0
    assert 0 < model.milliseconds("all_reduce", 1 << 16) < 1000
