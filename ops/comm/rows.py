"""Where do compact rows lie? A row is one kept choice of one token; nothing else is stored per expert.

    T  tokens on this rank      K  choices per token      S  rows to send, one per kept choice
    W  ranks, L experts each    R  rows received          D  width

Rows to send, [S, D]: by global expert e = w * L + l, then slot. What goes to one rank is one block. Rows
received, [R, D]: by local expert, then source rank, then slot. An expert's rows are one block, a group of a
grouped GEMM. Every offset is a prefix sum of counts [W, L].

Sizes in graphs. How many rows there are depends on the routing, so ops that make rows cannot say it when a
graph is traced. Two answers:

- Under torch.compile such a size is a symbol without a value (`new_dynamic_size`, which dynamo of torch 2.11
  to 2.13 allows with `fullgraph=True`): inductor compares sizes of results with those that were traced.
- Where a plan is made for the graph (`graph.capture.capture`), it is the number of rows of an evenly
  spread, dropless batch (`ops.context.Now`): a planner needs numbers, and the partitioner and the runtime of
  AOTAutograd (2.11 to 2.13) never compare the size of an intermediate result with the traced one. Tensors are
  exact when the graph runs, so nothing in a graph may take a number of rows as an argument and trust it.

On a GPU that exchanges nothing with others, the host does not know the counts: tensors then have the most
rows that there can be, ops read the counts on the device, and what lies behind the last row is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from lancet_kernels.ops.context import now

DROPPED = -1
"""The row of a choice that was dropped."""


def traced_rows(expected: int, given: int | None) -> int:
    """For fakes: how many rows has the result? `given` if the caller knows it."""
    if given is not None:
        return given
    # A symbolic number can be used as a size like any other.
    return expected if now.expects_sizes else cast(int, torch.library.get_ctx().new_dynamic_size())


def group_ends(count_WL: Tensor) -> Tensor:
    """-> [L] int64: the end of each local expert's group among the received rows.

    Example: counts = [[1, 2], [0, 3]] -> [1, 6].
    """
    return count_WL.sum(0).cumsum(0)


def segments(count_WL: Tensor, by_expert: bool) -> list[int]:
    """Lengths of the (rank, expert) segments in the order in which they lie: by expert if received, else by
    rank.

    Example: counts = [[1, 2], [0, 3]] -> [1, 2, 0, 3]; by expert [1, 0, 2, 3].
    """
    return (count_WL.T if by_expert else count_WL).reshape(-1).tolist()


def expert_major(rows_RD: Tensor, count_WL: Tensor) -> Tensor:
    """Rows by rank, then expert -> by expert, then rank. The rows themselves where that is the same."""
    return _transpose_segments(rows_RD, count_WL.tolist())


def rank_major(rows_RD: Tensor, count_WL: Tensor) -> Tensor:
    """Rows by expert, then rank -> by rank, then expert. The rows themselves where that is the same."""
    return _transpose_segments(rows_RD, count_WL.T.tolist())


def _transpose_segments(rows_RD: Tensor, count_AB: Sequence[Sequence[int]]) -> Tensor:
    """Rows by a, then b -> by b, then a."""
    inner = len(count_AB[0]) if count_AB else 0
    if len(count_AB) <= 1 or inner <= 1:
        return rows_RD
    pieces = rows_RD[: sum(map(sum, count_AB))].split([n for row in count_AB for n in row])
    return torch.cat([piece for b in range(inner) for piece in pieces[b::inner]])
