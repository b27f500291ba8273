"""Where compact rows lie: offsets, the two orders, parts and windows; against loops over (rank, expert)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.ops.comm.all_to_all import DROPPED, expert_major, group_ends, rank_major
from lancet_kernels.ops.moe.dispatch import choice_of_rows
from tests.ops.op_cases import (
    QUICK,
    SEEDS,
    Batch,
    batches,
    counts,
    generator,
    transposed_in_memory,
    with_gaps,
)


def naive_send_rows(expert_TK: Tensor, slot_TK: Tensor, count_WL: Tensor) -> Tensor:
    """Reference, one choice after the other."""
    count_E = count_WL.flatten().tolist()
    row_TK = torch.full_like(expert_TK, DROPPED)
    for t in range(expert_TK.shape[0]):
        for k in range(expert_TK.shape[1]):
            expert, slot = int(expert_TK[t, k]), int(slot_TK[t, k])
            if slot < count_E[expert]:
                row_TK[t, k] = sum(count_E[:expert]) + slot
    return row_TK


def labelled(count_WL: Tensor, by_expert: bool) -> list[tuple[int, int, int]]:
    """(rank, expert, slot) of every row, in order."""
    ranks, local = count_WL.shape
    pairs = [(w, e) for w in range(ranks) for e in range(local)]
    if by_expert:
        pairs = [(w, e) for e in range(local) for w in range(ranks)]
    return [(w, e, c) for w, e in pairs for c in range(int(count_WL[w, e]))]


def rows_of(labels: list[tuple[int, int, int]]) -> Tensor:
    """[R, 3], one row per label."""
    return torch.tensor(labels, dtype=torch.float64).view(-1, 3)


@QUICK
@given(count=counts())
def test_offsets_against_loops(count: Tensor) -> None:
    for layout in (count, transposed_in_memory(count)):
        received = labelled(count, by_expert=True)
        bounds = [0, *group_ends(layout).tolist()]
        for e in range(count.shape[1]):
            assert all(label[1] == e for label in received[bounds[e] : bounds[e + 1]])
        assert bounds[-1] == len(received)


@QUICK
@given(count=counts())
def test_there_and_back(count: Tensor) -> None:
    sent, received = (rows_of(labelled(count, by_expert)) for by_expert in (False, True))
    for rows, layout in ((sent, count), (with_gaps(sent), transposed_in_memory(count))):
        assert torch.equal(expert_major(rows, layout), received)
    assert torch.equal(rank_major(received, count), sent)


@QUICK
@given(count=counts(most=9), parts=st.integers(1, 4), by_expert=st.booleans())
def test_windows_hold_every_slot_once_and_merge_again(count: Tensor, parts: int, by_expert: bool) -> None:
    labels = labelled(count, by_expert)
    rows, windows, window_counts = rows_of(labels), [], []
    for part in range(parts):
        window_count = ops.window_counts(count, part, parts)
        window = ops.window_rows(rows, count, part, parts, by_expert)
        bounds = [(int(n) * part // parts, int(n) * (part + 1) // parts) for n in count.view(-1)]
        first, behind = (torch.tensor(side).view(count.shape) for side in zip(*bounds, strict=True))
        assert torch.equal(window_count, behind - first)
        assert torch.equal(window, rows_of([x for x in labels if first[x[:2]] <= x[2] < behind[x[:2]]]))
        windows.append(window)
        window_counts.append(window_count)
    assert torch.equal(ops.merge_parts(windows, window_counts, by_expert), rows)


@QUICK
@given(batch=batches(), gaps=st.booleans())
def test_rows_of_choices(batch: Batch, gaps: bool) -> None:
    expert_TK, slot_TK = batch.routing.expert_TK, batch.routing.slot_TK
    expected = naive_send_rows(expert_TK, slot_TK, batch.count_WL)
    relayout = with_gaps if gaps else torch.clone
    kept = [min(int(used), batch.capacity) for used in batch.routing.used_E]
    assert ops.kept_counts(batch.routing.used_E, batch.capacity, batch.ranks).flatten().tolist() == kept
    row_TK = ops.send_rows(relayout(expert_TK), relayout(slot_TK), relayout(batch.count_WL))
    assert torch.equal(row_TK, expected)
    assert sorted(row_TK[row_TK >= 0].tolist()) == list(range(batch.num_rows))
    assert torch.equal(row_TK.reshape(-1)[choice_of_rows(relayout(row_TK))], torch.arange(batch.num_rows))


@QUICK
@given(batch=batches(), parts=st.integers(1, 3), seed=SEEDS)
def test_parts_of_a_batch_merge_into_its_rows(batch: Batch, parts: int, seed: int) -> None:
    """Token-order priority: merged rows lie where those of the uncut batch do. Any other order of slots:
    every row is where `merge_rows` says."""
    expert_TK, slot_TK = batch.routing.expert_TK, batch.routing.slot_TK
    for in_token_order in (True, False):
        if not in_token_order:
            for e in range(batch.num_experts):
                of_e = expert_TK == e
                shuffled = torch.randperm(int(of_e.sum()), generator=generator(seed))
                slot_TK = slot_TK.masked_scatter(of_e, slot_TK[of_e][shuffled])
        pieces = [(e, s) for e, s in zip(expert_TK.chunk(parts), slot_TK.chunk(parts), strict=True)]
        found = [ops.part_rows(e, s, batch.num_experts, batch.capacity) for e, s in pieces]
        experts, counts_WL = [e for e, _ in pieces], [n.view_as(batch.count_WL) for _, n in found]
        rows = [
            ops.dispatch(x, row, None, row.numel())
            for x, (row, _) in zip(batch.x_TD.chunk(parts), found, strict=True)
        ]
        merged = ops.merge_parts(rows, counts_WL, False)
        row_TK = ops.merge_rows(experts, [row for row, _ in found], counts_WL)
        assert torch.equal(sum(counts_WL), batch.count_WL)
        assert torch.equal(row_TK >= 0, slot_TK < batch.capacity)
        assert torch.equal(merged, ops.dispatch(batch.x_TD, row_TK, None, batch.num_rows))
        if in_token_order:
            assert torch.equal(row_TK, batch.row_TK)


# Rows of (rank, expert) as they arrive, and the order in which experts take them: the figures of torchtitan's
# TestPermute.
TORCHTITAN = [
    ([[2, 3], [1, 4]], [0, 1, 5, 2, 3, 4, 6, 7, 8, 9], [3, 7]),
    ([[4, 2, 5]], [*range(11)], [4, 2, 5]),
    ([[3], [5], [2]], [*range(10)], [10]),
    ([[0, 3], [2, 0]], [3, 4, 0, 1, 2], [2, 3]),
    ([[0, 0], [0, 0]], [], [0, 0]),
    ([[2, 2], [2, 2], [2, 2]], [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11], [6, 6]),
    ([[2, 0, 3], [1, 4, 2]], [0, 1, 5, 6, 7, 8, 9, 2, 3, 4, 10, 11], [3, 4, 5]),  # by its rule
]


@pytest.mark.parametrize(("counts_WL", "order", "of_experts"), TORCHTITAN)
def test_received_rows_lie_as_those_of_torchtitan(counts_WL, order, of_experts) -> None:
    count_WL = torch.tensor(counts_WL)
    arrived = torch.arange(len(order))
    taken = expert_major(arrived, count_WL)
    assert taken.tolist() == order
    assert group_ends(count_WL).diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist() == of_experts
    assert torch.equal(rank_major(taken, count_WL), arrived)


def test_opcheck() -> None:
    """As ops of a graph; sizes that depend on data are numbers there (`Now.expects_sizes`) or symbols."""
    count = torch.tensor([[2, 0], [1, 3]])
    rows = torch.randn(6, 3)
    expert_TK, slot_TK = torch.tensor([[0, 1], [3, 0]]), torch.tensor([[0, 2], [1, 1]])
    torch.library.opcheck(torch.ops.lancet.send_rows.default, (expert_TK, slot_TK, count))
    torch.library.opcheck(torch.ops.lancet.part_rows.default, (expert_TK, slot_TK, 4, 2))
    torch.library.opcheck(torch.ops.lancet.window_counts.default, (count, 1, 2))
    torch.library.opcheck(torch.ops.lancet.merge_rows.default, ([expert_TK], [slot_TK], [count]))
    torch.library.opcheck(torch.ops.lancet.merge_parts.default, ([rows, rows], [count, count], True))
    torch.library.opcheck(torch.ops.lancet.window_rows.default, (rows, count, 0, 2, True))
