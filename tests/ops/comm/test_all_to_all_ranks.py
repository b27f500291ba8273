"""all_to_all and exchange_counts on real ranks: bitwise right, nothing but rows on the wire, bounded waits.

W ranks      L experts on each      D width
"""

import itertools
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels import CommunicationError, ops
from lancet_kernels.ops import all_to_all, exchange_counts, start_all_to_all
from lancet_kernels.ops.comm.groups import Groups, group_name
from lancet_kernels.ops.comm.link import emulate_link, link
from lancet_kernels.ops.comm.link_group import link_group
from tests.grids import few_of
from tests.ops.comm.test_link_group import OPS, functional, started

MOST, D = 5, 8
DTYPES = [torch.float64, torch.bfloat16, torch.float16]
COUNTS = ["mixed", "none", "full", "to rank 0", "empty experts", "only own"]


def all_counts(kind: str, ranks: int, local_experts: int) -> Tensor:
    """[W, W, L]: rows that each rank sends to each expert of each rank; any rank can work them out."""
    shape = (ranks, ranks, local_experts)
    counts = torch.randint(0, MOST + 1, shape, generator=torch.Generator().manual_seed(ranks + local_experts))
    if kind == "none":
        counts.zero_()
    elif kind == "full":
        counts.fill_(MOST)
    elif kind == "to rank 0":
        counts[:, 1:] = 0
        counts[:, 0] = MOST
    elif kind == "empty experts":
        counts[:, :, ::2] = 0
    elif kind == "only own":
        counts *= torch.eye(ranks, dtype=torch.int64)[:, :, None]
    return counts


def segment(source: int, peer: int, expert: int, rows: int, dtype: torch.dtype, seed: int) -> Tensor:
    """The rows that one rank has for one expert of another; any rank can work them out."""
    generator = torch.Generator().manual_seed(((seed * 8 + source) * 8 + peer) * 8 + expert)
    return torch.randn(rows, D, generator=generator, dtype=torch.float64).to(dtype)


def sent_by(counts: Tensor, rank: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows to send, by rank, then expert."""
    _, ranks, local = counts.shape
    pairs = [(w, e) for w in range(ranks) for e in range(local)]
    return torch.cat([segment(rank, w, e, int(counts[rank, w, e]), dtype, seed) for w, e in pairs])


def received_by(counts: Tensor, rank: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows received, by expert, then source."""
    ranks, _, local = counts.shape
    pairs = [(w, e) for e in range(local) for w in range(ranks)]
    return torch.cat([segment(w, rank, e, int(counts[w, rank, e]), dtype, seed) for w, e in pairs])


def exchange_on_rank(kind: str, local_experts: int, dtype: torch.dtype) -> dict:
    """Counts, rows, and the gradients back, of this rank; and the bytes of each step."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), group_name(None)
    counts = all_counts(kind, ranks, local_experts)
    rows = sent_by(counts, rank, dtype, seed=1).requires_grad_()
    received = exchange_counts(counts[rank], D, dtype, group)
    link.read()
    out = all_to_all(rows, counts[rank], received, group, True)
    forward = link.read()
    out.backward(received_by(counts, rank, dtype, seed=2))
    backward = link.read()
    return {
        "received": received,
        "out": out.detach(),
        "grad": rows.grad,
        "link": [forward.bytes_sent, backward.bytes_sent],
        "count": [forward.count, backward.count],
    }


@pytest.mark.parametrize(
    ("kind", "ranks", "dtype"),
    [
        *((kind, 2, torch.float32) for kind in COUNTS),
        # Rows are copied as they are: each dtype with half of the counts.
        *(
            pytest.param(kind, 4, dtype, marks=pytest.mark.long)
            for kind, dtype in zip(COUNTS, itertools.cycle(DTYPES))
        ),
    ],
)
def test_rows_arrive_where_they_belong_and_gradients_go_back(pool, kind, ranks, dtype):
    for local_experts in (1, 3):
        results = pool.run(exchange_on_rank, kind, local_experts, dtype, ranks=ranks)
        counts = all_counts(kind, ranks, local_experts)
        row_bytes = D * torch.empty((), dtype=dtype).element_size()
        for r, got in enumerate(results):
            assert torch.equal(got["received"], counts[:, r])
            assert torch.equal(got["out"], received_by(counts, r, dtype, seed=1))
            assert torch.equal(got["grad"], sent_by(counts, r, dtype, seed=2))
            forward = (counts[r].sum() - counts[r, r].sum()).item() * row_bytes
            backward = (counts[:, r].sum() - counts[r, r].sum()).item() * row_bytes
            assert got["link"] == [forward, backward], "bytes that the link reports"
            assert got["count"] == [1, 1]


# ---- the emulated link

GBPS = 0.02
ROWS, WIDTH = 100, 1250  # 500 kB of float32 to each other rank: 0.2 s at 0.02 Gbit/s


def paced_on_rank(gbps: float) -> dict:
    """One all-to-all of ROWS rows to each rank."""
    ranks, group = dist.get_world_size(), group_name(None)
    counts = torch.full((ranks, 1), ROWS)
    rows = torch.randn(ranks * ROWS, WIDTH)
    start_all_to_all(rows, counts, counts, group, True).wait()
    emulate_link(gbps)
    dist.barrier()
    link.read()
    begin = time.monotonic()
    pending = start_all_to_all(rows, counts, counts, group, True)
    out = pending.wait()
    total = time.monotonic() - begin
    traffic = link.read()
    return {
        "total": total * 1e3,
        "all_to_all": traffic.all_to_all_ms,
        "exposed": traffic.exposed_ms,
        "bytes": traffic.bytes_sent,
        "finite": bool(out.isfinite().all()),
    }


@pytest.mark.parametrize("ranks", few_of([2, 4]))
def test_emulated_link_takes_its_time(pool, ranks):
    wire_ms = (ranks - 1) * ROWS * WIDTH * 4 * 8 / (GBPS * 1e9) * 1e3
    for got in pool.run(paced_on_rank, GBPS, ranks=ranks):
        assert got["finite"]
        assert got["bytes"] == (ranks - 1) * ROWS * WIDTH * 4
        assert wire_ms * 0.999 <= got["all_to_all"]
        assert got["exposed"] > 0.9 * wire_ms
        assert got["total"] >= got["all_to_all"] * 0.999


# ---- a peer that does not come


def absent_on_rank(op: str) -> tuple[str, str, float]:
    """Rank 1 stays away; the others say what they got to hear, and when."""
    group, ranks = group_name(None), dist.get_world_size()
    counts = torch.ones(ranks, 1, dtype=torch.int64)
    rows = torch.ones(ranks, D)
    # The first collective also makes the connections: a peer that leaves comes later.
    exchange_counts(counts, D, torch.float32, group)
    if dist.get_rank() == 1:
        time.sleep(4.5)
        return "absent", "", 0.0
    begin = time.monotonic()
    try:
        if op == "exchange_counts":
            exchange_counts(counts, D, torch.float32, group)
        elif op == "all_to_all":
            all_to_all(rows, counts, counts, group, True)
        elif op == "emulated":
            emulate_link(1.0)
            start_all_to_all(rows, counts, counts, group, True).wait()
        else:
            functional.wait_tensor(started(op, rows, link_group(group)))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "no error", "", time.monotonic() - begin


@pytest.mark.parametrize("op", few_of(["all_to_all", "exchange_counts", "emulated", *OPS]))
def test_peer_that_never_comes(pool, op):
    results = pool.run(absent_on_rank, op, ranks=4, collective_timeout_s=2.0, leave_together=False)
    name = "the emulated link's first all-to-all" if op == "emulated" else op
    for rank in (0, 2, 3):
        kind, message, seconds = results[rank]
        assert kind == CommunicationError.__name__, message
        # Only rank 1: the others have entered it (LANCET_CHECK, which ends the wait if gloo does not).
        waited = rf"rank {rank} waited \d+\.\d s in {name} for rank\(s\) 1"
        assert re.fullmatch(waited + r"( \[they have not entered it\])?", message)
        assert "\n" not in message
        assert seconds > 0.9


def counts_beside_rows() -> bool:
    """Rank 0 has rows under way before it exchanges counts, rank 1 sends its rows only after its counts."""
    expert = Groups.around().expert
    count_WL, rows_SD = torch.tensor([[2], [2]]), torch.randn(4, 3)

    def rows():
        return start_all_to_all(rows_SD, count_WL, count_WL, expert, True)

    pending = rows() if dist.get_rank() == 0 else None
    received_WL = ops.exchange_counts(count_WL, 3, torch.float32, expert)
    (pending or rows()).wait()
    return torch.equal(received_WL, count_WL)


def test_counts_do_not_queue_behind_rows(pool):
    assert pool.run(counts_beside_rows) == [True, True]
