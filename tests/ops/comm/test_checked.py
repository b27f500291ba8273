"""LANCET_CHECK=1, which all tests have: ranks whose collectives differ name them, and no process ends."""

import json
import time
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

from lancet_kernels import MoELayer
from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm import checked
from lancet_kernels.ops.comm.checked import MUTUAL_S, Record, _Entered
from lancet_kernels.ops.comm.groups import Groups, group_of
from lancet_kernels.ops.comm.link_group import link_group_of
from lancet_kernels.ops.comm.redistribute import start_shift

DESTROYED: list[dist.ProcessGroup] = []
"""Groups of an earlier job that something still holds."""


def groups_that_stay() -> None:
    """More collectives than the next job enters, in groups of the same names."""
    layer(Groups.of(None))(torch.ones(6, 8))
    DESTROYED.extend(dist.distributed_c10d._world.pg_map)
    for group in DESTROYED:
        for _ in range(50):
            dist.all_reduce(torch.ones(1), group=group)


def layer(groups: Groups | None = None) -> MoELayer:
    torch.manual_seed(0)
    made = MoELayer(8, 12, 4, gate="topk", top_k=2, capacity_factor=None, groups=groups)
    made.name = "blocks.0.moe"
    return made


def one_forward_more(moe: MoELayer) -> None:
    """An evaluation without no_grad on one rank, say."""
    x = torch.randn(6 + dist.get_rank(), 8)
    moe(x).sum().backward()
    y = moe(x)
    if dist.get_rank() == 1:
        y = moe(x)
    y.sum().backward()


def another_size() -> None:
    dist.all_reduce(torch.ones(10 + dist.get_rank()))


def another_collective() -> None:
    x = torch.ones(4)
    if dist.get_rank() == 1:
        dist.broadcast(x, 0)
    else:
        dist.all_reduce(x)


def another_number_of_rows() -> None:
    """Rank 0 sends three rows to rank 1, which expects two."""
    rows = [[1, 3], [1, 1]][dist.get_rank()]
    coming = [[1, 1], [2, 1]][dist.get_rank()]
    received, sent = torch.empty(sum(coming), 8), torch.ones(sum(rows), 8)
    link_group_of(Groups.of(None).expert).all_to_all(
        received, sent, coming, rows, layer="blocks.0.moe"
    ).wait()


def another_model_of_fsdp() -> None:
    model = nn.Sequential(nn.Linear(8, 8 + 8 * dist.get_rank()))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model(torch.ones(2, 8)).sum().backward()


def another_size_of_a_message() -> None:
    start_shift([torch.ones(4 + dist.get_rank())], [1, 0], Groups.of(None).world, "tiles").wait()


DISAGREE = {
    "forward": lambda: one_forward_more(layer()),
    "forward beside": lambda: one_forward_more(layer(Groups.of(None))),
    "size": another_size,
    "collective": another_collective,
    "rows": another_number_of_rows,
    "fsdp": another_model_of_fsdp,
    "message": another_size_of_a_message,
}


def said_of(kind: str) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        DISAGREE[kind]()
    except UserError as error:
        seconds = time.monotonic() - begin
        # The file of the process group goes with the rank that leaves; the other one reads it a little later.
        time.sleep(3 * MUTUAL_S if kind == "forward beside" else 0.0)
        return str(error), seconds
    return "", 0.0


@pytest.mark.parametrize(
    ("kind", "got"),
    [
        (
            "forward",
            "all_to_all of blocks.0.moe (192 bytes to rank 1, 224 from it) on rank 0 and exchange_counts of",
        ),
        pytest.param(
            "forward beside",
            "all_to_all of blocks.0.moe on rank 0 and exchange_counts of blocks.0.moe on rank 1",
            marks=pytest.mark.long,
        ),
        ("size", "all_reduce (40 bytes) on rank 0 and all_reduce (44 bytes) on rank 1"),
        ("collective", "all_reduce (16 bytes) on rank 0 and broadcast (16 bytes) on rank 1"),
        (
            "rows",
            "all_to_all of blocks.0.moe (96 bytes to rank 1, 32 from it) on rank 0 and all_to_all of blocks",
        ),
        ("message", "shift of tiles (16 bytes) on rank 0 and shift of tiles (20 bytes) on rank 1"),
        ("fsdp", "all_gather (144 bytes) on rank 0 and all_gather (288 bytes) on rank 1"),
    ],
)
def test_collectives_that_differ_are_named_on_both_ranks(pool, kind, got):
    pool.run(groups_that_stay if kind == "forward beside" else dist.get_rank)
    before = pool.pids()
    # Not a minute: garbage collection waits so long for what is still under way.
    for said, seconds in pool.run(said_of, kind, leave_together=False, collective_timeout_s=10.0):
        assert got in said
        assert "\n" not in said
        assert len(said) < 400
        assert seconds < 60
    assert pool.pids() == before, "no process has ended"


def two_groups_in_other_orders() -> float:
    """Allowed, because nobody waits in between."""
    groups = [dist.new_group(timeout=timedelta(seconds=20)) for _ in range(2)]
    numbers = [torch.tensor(1.0), torch.tensor(10.0)]
    order = (0, 1) if dist.get_rank() == 0 else (1, 0)
    works = [dist.all_reduce(numbers[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    return float(numbers[0] + numbers[1])


def test_groups_have_orders_of_their_own(pool):
    assert pool.run(two_groups_in_other_orders) == [22.0, 22.0]


def test_a_rank_that_has_come_since_the_last_look_does_not_wait_for_this_one(monkeypatch):
    """Rank 0 entered collective 7 behind rank 1's look for it, ended it, and waits in 8 for rank 1."""
    store = dist.HashStore()
    order = SimpleNamespace(name="all", place=1, ranks=[0, 1], store=store)
    record = Record(7, "all_gather", "", [8], [8])
    entered = _Entered(order, "", record, {0})
    store.set(entered.key(0), json.dumps(asdict(record)))
    monkeypatch.setattr(checked, "_waits_of", lambda rank: json.dumps(["all", 8, [0, 1], "all_gather"]))
    monkeypatch.setattr(checked, "_entered_in", lambda name: 7)
    entered.refuse_waiting_for_each_other()
    assert not entered.missing


def every_collective() -> list[list[float]]:
    """What torch gives without the check is known; here through all methods that are compared."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own, results = torch.tensor([1.0, 2.0]) + 10 * rank, []
    total = own.clone()
    dist.all_reduce(total)
    sent = own.clone()
    dist.broadcast(sent, 0)
    gathered = [torch.zeros(2) for _ in range(ranks)]
    dist.all_gather(gathered, own)
    arrived = torch.empty(2)
    dist.all_to_all_single(arrived, own)
    objects: list = [None] * ranks
    dist.all_gather_object(objects, "x" * (1 + rank))
    dist.barrier(group=group_of(Groups.of(None).data))
    results += [total, sent, torch.cat(gathered), arrived, torch.tensor([float(len(o)) for o in objects])]
    return [result.tolist() for result in results]


def test_results_are_those_of_torch(pool):
    alike = [[12.0, 14.0], [1.0, 2.0], [1.0, 2.0, 11.0, 12.0]]
    first, second = pool.run(every_collective)
    assert first == [*alike, [1.0, 11.0], [1.0, 2.0]]
    assert second == [*alike, [2.0, 12.0], [1.0, 2.0]]
