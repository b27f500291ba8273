"""What cutting a batch into parts needs: rows of each part, and whole tensors out of parts again.

    T  tokens of this part      E = W * L  experts      C  capacity of the whole batch
    K  choices per token        P  parts                S, R  rows to send, rows received (`ops.comm.rows`)

A part of a batch is a batch: it sends anything from 0 to C rows to an expert (Lancet, section 2.3), with
counts and rows of its own (`part_rows`). Where the backward wants the whole batch's rows, those of the parts
are put together, expert by expert (`merge_parts`), and `merge_rows` says where each choice's row is then. For
gates with token-order priority these are the very rows of the uncut batch.

A part of the capacity (Tutel) is a window of slots: part p of P has the slots n * p / P to n * (p + 1) / P of
the n that a rank fills with rows for an expert. Both sides know the counts, so they cut alike.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from lancet_kernels.ops.comm.rows import DROPPED, segments, traced_rows
from lancet_kernels.ops.moe.dispatch import send_rows
from lancet_kernels.ops.moe.gates.base import slots_in_token_order
from lancet_kernels.ops.registration import op


@op("lancet::part_rows")
def part_rows(expert_TK: Tensor, slot_TK: Tensor, num_experts: int, capacity: int) -> tuple[Tensor, Tensor]:
    """The rows of a part, by expert, then in token order.

    Example: C = 3, expert = [[0], [0], [1]], slot = [[2], [3], [0]] -> row = [[0], [-1], [1]], counts =
    [1, 1].

    Args: slot_TK: slots in the whole batch.
    Returns: row_TK (DROPPED as in the whole batch), counts_E; int64.
    """
    # As padding, dropped choices use no row.
    local_TK, count_E = slots_in_token_order(expert_TK, expert_TK.new_zeros(num_experts), slot_TK < capacity)
    return send_rows(expert_TK, local_TK, count_E), count_E


part_rows.register_fake(part_rows.function)


@op("lancet::merge_parts")
def merge_parts(rows: list[Tensor], counts: list[Tensor], by_expert: bool) -> Tensor:
    """The whole batch's rows: for each (rank, expert) those of part 0, then of part 1, ...

    Args: rows: P tensors [R_p, D]; counts: P tensors [W, L]. by_expert: received rows, else rows to send.
    """
    pieces = [
        part.split([*lengths, part.shape[0] - sum(lengths)])[:-1]
        for part, count in zip(rows, counts, strict=True)
        for lengths in [segments(count, by_expert)]
    ]
    return torch.cat([piece for of_segment in zip(*pieces, strict=True) for piece in of_segment])


@merge_parts.register_fake
def _(rows, counts, by_expert):
    return rows[0].new_empty(sum(part.shape[0] for part in rows), rows[0].shape[1])


@op("lancet::merge_rows")
def merge_rows(experts: list[Tensor], rows: list[Tensor], counts: list[Tensor]) -> Tensor:
    """The index of each choice's row in the merged rows to send; [T, K] of the whole batch.

    Args: experts, rows: P tensors [T_p, K], rows from `part_rows`; counts: P tensors [E].
    """
    count_PE = torch.stack([count.reshape(-1) for count in counts])
    total_E = count_PE.sum(0)
    first_E = total_E.cumsum(0) - total_E
    earlier_PE = count_PE.cumsum(0) - count_PE
    own_first_PE = count_PE.cumsum(1) - count_PE
    shift_PE = first_E + earlier_PE - own_first_PE
    merged = [
        torch.where(row_TK >= 0, row_TK + shift_E[expert_TK], DROPPED)
        for expert_TK, row_TK, shift_E in zip(experts, rows, shift_PE, strict=True)
    ]
    return torch.cat(merged)


merge_rows.register_fake(merge_rows.function)


Number = TypeVar("Number", int, Tensor)


def _window(n: Number, part: int, parts: int) -> tuple[Number, Number]:
    """First slot of a part, and the end (exclusive)."""
    return n * part // parts, n * (part + 1) // parts


@op("lancet::window_counts")
def window_counts(count_WL: Tensor, part: int, parts: int) -> Tensor:
    """-> [W, L]: the number of rows in a part's window of slots. Example: 5 rows in 2 parts: 2 and 3."""
    first_WL, behind_WL = _window(count_WL, part, parts)
    return behind_WL - first_WL


window_counts.register_fake(window_counts.function)


@op("lancet::window_rows")
def window_rows(rows_RD: Tensor, count_WL: Tensor, part: int, parts: int, by_expert: bool) -> Tensor:
    """The rows in a part's window of slots, in their order in `rows_RD`.

    Args: count_WL: of all rows. by_expert: received rows, else rows to send.
    """
    pieces, begin = [], 0
    for n in segments(count_WL, by_expert):
        first, behind = _window(n, part, parts)
        pieces.append(rows_RD[begin + first : begin + behind])
        begin += n
    return torch.cat(pieces)


@window_rows.register_fake
def _(rows_RD, count_WL, part, parts, by_expert):
    first, behind = _window(rows_RD.shape[0], part, parts)
    return rows_RD.new_empty(traced_rows(behind - first, None), rows_RD.shape[1])
