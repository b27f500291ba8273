"""Duplicates of a token sent once: how many rows travel, where their origins point, and when it pays."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from lancet_kernels.kernels import overlap_kernel
from lancet_kernels.kernels.overlap_config import dedup_pays, pes_of_token
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
    """Every row has the first row here of the same token, and its tile, as origin; those rows were put."""
    case, rank = layer.case, layer.rank
    origin = layer.forward.origin.local[1].tolist()
    first: dict[tuple[int, int], tuple[int, int]] = {}
    row = tile = 0
    for e in range(rank * case.local, (rank + 1) * case.local):
        slot = 0
        for source in range(case.world):
            routing = routing_of(case, source)
            begin = int(routing.count[:e].sum())
            for choice in routing.choice[begin : begin + int(routing.count[e])].tolist():
                here = tile + slot // layer.forward.chunk_rows, row + slot
                expected = first.setdefault((source, choice // case.choices), here)
                assert divmod(origin[row + slot], 1 << 32) == expected
                assert put[row + slot] == (expected == here)
                slot += 1
        row, tile = row + slot, tile + -(-slot // layer.forward.chunk_rows)


def distinct_rows(case: Case, rank: int) -> tuple[int, int]:
    """(tokens, rows) of all sources for the experts of a rank; a token of several rows counts once."""
    tokens = rows = 0
    for source in range(case.world):
        routing = routing_of(case, source)
        there = (routing.row >= 0) & (routing.expert // case.local == rank)
        tokens, rows = tokens + int(there.any(1).sum()), rows + int(there.sum())
    return tokens, rows


@pytest.mark.parametrize(
    "case",
    few_of(
        [
            Case(local=4, choices=4, tokens=19, capacity=19),
            Case(local=4, choices=4, tokens=19, capacity=7, choose="few", uneven=True),
            Case(local=1, choices=2, tokens=9),
        ]
    ),
    ids=str,
)
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
    ranks = sum(len({e // local for e in chosen}) for chosen in sets)
    assert pes_of_token(world, local, choices) == pytest.approx(ranks / len(sets))


def test_many_experts_are_the_limit_without_memory():
    assert pes_of_token(8, 10_000, 8) == pytest.approx(8 * (1 - (1 - 1 / 8) ** 8), rel=1e-3)


@pytest.mark.parametrize(
    ("world", "local", "choices", "pays"),
    [
        (1, 64, 8, False),  # nothing travels
        (8, 1, 4, False),  # no token has two rows for one rank
        (8, 16, 2, False),
        (8, 16, 4, True),
        (8, 16, 8, True),
        (2, 8, 8, True),
        (64, 4, 8, False),
        (2, 1, 3, False),  # more choices than experts: refused elsewhere
    ],
)
def test_when_it_pays(world, local, choices, pays):
    assert dedup_pays(world, local, choices) == pays
