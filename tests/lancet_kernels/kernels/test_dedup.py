"""Duplicates of a token sent once: how many rows travel, both ways, what their origins say, when it pays."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from lancet_kernels.kernels import overlap_kernel
from lancet_kernels.kernels.overlap_config import dedup_pays, pes_of_token, rows_alone
from tests.grids import few_of
from tests.lancet_kernels.kernels.overlap_cases import Case, routing_of
from tests.lancet_kernels.kernels.overlap_ranks import GuardedMemory, make_layer


@triton.jit
def only_say(
    tile, epoch, rank, W, L, D, R, tiles, table_ptr, rows_ptr, arrived_ptr, origin_ptr, fanned_ptr,
    max_polls, report_ptr, NVSHMEM: tl.constexpr, BANKS: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SEND_X: tl.constexpr,
):  # fmt: skip
    """Stands for FAN: says that the rows of the tile are there, and copies nothing."""
    tl.store(fanned_ptr + tile, 1)


def rows_put_on_rank(case: Case, dedup: bool) -> int:
    """-> how many rows all ranks put to this one."""
    with GuardedMemory(timeout_s=30) as memory:
        layer = make_layer(memory, "layer", case, dedup=dedup, programs=2)
        with mock.patch.object(overlap_kernel, "fan_tile", only_say):
            layer.run_forward()
        # Nobody waited for rows.
        memory.barrier()
        layer.check()
        put = layer.forward.rows.local[1].isfinite().all(1)
        if dedup:
            check_origins(layer, put)
        memory.barrier()
        return int(put.sum())


def check_origins(layer, put: torch.Tensor) -> None:
    """Origins name a token's first row here, which was put, and the one before; the last has a sign."""
    case, rank = layer.case, layer.rank
    origin = layer.forward.origin.local[1].tolist()
    rows_of: dict[tuple[int, int], list[int]] = {}
    row = 0
    for e in range(rank * case.local, (rank + 1) * case.local):
        slot = 0
        for source in range(case.world):
            routing = routing_of(case, source)
            begin = int(routing.count[:e].sum())
            for choice in routing.choice[begin : begin + int(routing.count[e])].tolist():
                rows_of.setdefault((source, choice // case.choices), []).append(row + slot)
                slot += 1
        row += slot
    for rows in rows_of.values():
        for previous, one in zip([rows[0], *rows[:-1]], rows, strict=True):
            last = (one == rows[-1]) << 63
            assert origin[one] % (1 << 64) == last | previous << 32 | rows[0]
            assert put[one] == (one == rows[0])


def rows_returned_on_rank(case: Case, dedup: bool) -> list[int]:
    """-> how many rows came back to this rank, in the forward and in the backward."""
    with GuardedMemory(timeout_s=30) as memory:
        layer = make_layer(memory, "layer", case, dedup=dedup, programs=2)
        layer.run()
        layer.check()
        memory.barrier()
        return [
            int(exchange.results.local.isfinite().all(1).sum())
            for exchange in (layer.forward, layer.backward)
        ]


def returned_rows(case: Case, rank: int) -> tuple[int, int]:
    """(pairs of a token of this rank and a rank that has some of its experts, rows)."""
    routing = routing_of(case, rank)
    kept = routing.row >= 0
    owner = routing.expert // case.local
    pairs = sum(int((kept & (owner == peer)).any(1).sum()) for peer in range(case.world))
    return pairs, int(kept.sum())


def distinct_rows(case: Case, rank: int) -> tuple[int, int]:
    """(tokens, rows) of all sources for the experts of a rank; a token of several rows counts once."""
    tokens = rows = 0
    for source in range(case.world):
        routing = routing_of(case, source)
        there = (routing.row >= 0) & (routing.expert // case.local == rank)
        tokens, rows = tokens + int(there.any(1).sum()), rows + int(there.sum())
    return tokens, rows


CASES = [
    Case(local=4, choices=4, tokens=19, capacity=19),
    Case(local=4, choices=4, tokens=19, capacity=7, choose="few", uneven=True),
    Case(local=1, choices=2, tokens=9),
]


@pytest.mark.parametrize("case", few_of(CASES), ids=str)
def test_only_one_row_of_a_token_comes_back_from_a_rank(pool, case):
    returned = pool.run(rows_returned_on_rank, case, True, ranks=case.world)
    all_returned = pool.run(rows_returned_on_rank, case, False, ranks=case.world)
    for rank in range(case.world):
        pairs, rows = returned_rows(case, rank)
        assert pairs < rows or case.local == 1 or case.uneven
        assert returned[rank] == [pairs, pairs]
        assert all_returned[rank] == [rows, rows]


@pytest.mark.parametrize("case", few_of(CASES), ids=str)
def test_only_one_row_of_a_token_travels_to_a_rank(pool, case):
    put = pool.run(rows_put_on_rank, case, True, ranks=case.world)
    all_put = pool.run(rows_put_on_rank, case, False, ranks=case.world)
    for rank in range(case.world):
        tokens, rows = distinct_rows(case, rank)
        assert tokens < rows or case.local == 1
        assert put[rank] == tokens
        assert all_put[rank] == rows


@pytest.mark.parametrize(
    ("world", "local", "choices"), [(2, 3, 2), (3, 2, 4), (4, 2, 3), (1, 4, 2), (4, 1, 2)]
)
def test_how_many_ranks_a_token_is_sent_to(world, local, choices):
    sets = list(itertools.combinations(range(world * local), choices))
    owners = [[e // local for e in chosen] for chosen in sets]
    ranks = sum(len(set(of)) for of in owners)
    assert pes_of_token(world, local, choices) == pytest.approx(ranks / len(sets))
    alone = sum(of.count(owner) == 1 for of in owners for owner in of)
    assert rows_alone(world, local, choices) == pytest.approx(alone / len(sets))


def test_many_experts_are_the_limit_without_memory():
    assert pes_of_token(8, 10_000, 8) == pytest.approx(8 * (1 - (1 - 1 / 8) ** 8), rel=1e-3)


@pytest.mark.parametrize(
    ("world", "local", "choices", "pays"),
    [
        (1, 64, 8, False),  # nothing travels
        (8, 1, 4, False),  # no token has two rows for one rank
        (8, 16, 2, False),
        (8, 16, 4, False),  # sums cost what they save
        (8, 16, 6, True),
        (8, 16, 8, True),
        (2, 8, 8, True),
        (64, 4, 8, False),
        (2, 1, 3, False),  # more choices than experts: refused elsewhere
    ],
)
def test_when_it_pays(world, local, choices, pays):
    assert dedup_pays(world, local, choices) == pays
