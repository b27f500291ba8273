"""torch's functional collectives on a link group: what they compute, what the link counts, who is missing."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.ops.comm.groups import group_name
from lancet_kernels.ops.comm.link import GPUS_PER_NODE, emulate_link, link
from lancet_kernels.ops.comm.link_group import link_group, link_group_of, plain_group

functional = torch.ops._c10d_functional
GBPS, NUMBERS = 0.01, 16_384
BYTES = 4 * NUMBERS


def started(op: str, x: Tensor, group: str) -> Tensor:
    ranks = dist.get_world_size()
    if op == "all_reduce":
        return functional.all_reduce(x, "sum", group)
    if op == "all_gather":
        return functional.all_gather_into_tensor(x, ranks, group)
    return functional.reduce_scatter_tensor(x, "sum", ranks, group)


OPS = ("all_gather", "reduce_scatter", "all_reduce")


def as_on_the_plain_group() -> list[bool]:
    plain = group_name(None)
    assert link_group_of(plain) is link_group_of(plain)
    assert plain_group(link_group(plain)) == plain
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    pairs = [[functional.wait_tensor(started(op, x, g)) for g in (plain, link_group(plain))] for op in OPS]
    return [torch.equal(*pair) for pair in pairs]


def test_results_are_those_of_the_plain_group(pool):
    assert pool.run(as_on_the_plain_group) == [[True] * len(OPS)] * 2


def test_without_ranks_there_is_no_group():
    assert link_group("") == plain_group("") == ""


def counted_on_rank() -> list[tuple[int, int, float, float]]:
    """By op: bytes sent, transfers, milliseconds waited for it, and until it was there."""
    emulate_link(GBPS)
    found = []
    for op in OPS:
        dist.barrier()
        link.read()
        begin = time.monotonic()
        functional.wait_tensor(started(op, torch.ones(NUMBERS), link_group(group_name(None))))
        took, traffic = (time.monotonic() - begin) * 1e3, link.read()
        found.append((traffic.bytes_sent, traffic.count, traffic.waited_ms[op], took))
    return found


def test_the_link_counts_and_paces_them(pool):
    """Two ranks, 0.01 Gbit/s: a gathered half of 64 KiB takes 52 ms."""
    for gathered, scattered, reduced in pool.run(counted_on_rank):
        for (sent, count, waited, took), size in ((gathered, BYTES), (scattered, BYTES // 2)):
            assert (sent, count) == (size, 1)
            assert took >= waited > 0
            assert took >= size * 8 / (GBPS * 1e9) * 1e3
        assert reduced[:2] == (0, 0), "sums of gradients are paced, but are no all-to-alls"
        # Each of two ranks sends half of its bytes twice, as one of a node's GPUs that have summed theirs.
        assert reduced[3] >= BYTES / GPUS_PER_NODE * 8 / (GBPS * 1e9) * 1e3
        assert reduced[3] >= reduced[2] > 0
