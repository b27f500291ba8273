"""Rows to send, dispatch and combine; and the same for parts of a batch.

    T  tokens on this rank      W  ranks, L experts on each, e = w * L + l
    K  choices per token        D  model width
    S, R  rows to send, rows received (`ops.comm.all_to_all`)
    C  capacity of the whole batch      P  parts

Dispatch copies each token's row to the rows of its experts. The rows of each expert and the row of each kept
choice are computed once per layer, for dispatch, combine and their gradients, by ops of their own: the
planner replaces them where a batch is cut into parts, which have counts of their own.

Dispatch and combine are each other's adjoint, so each one's backward is the other.

On a GPU, Triton kernels compute: they read counts where they are, while torch's way (nonzero) makes the host
wait for the device, which costs time and cannot be captured in a CUDA graph. Without Triton, on a CPU, and
for types that a kernel does not know, torch does; both give the same.

Combine: gather each token's rows back from the experts and add them up with their weights. Dropped choices
contribute zero. The sum over K is computed in a fixed order and in at least float32, then rounded once to the
dtype of the rows, without an intermediate tensor of T * K rows.

A part of a batch is a batch: it sends anything from 0 to C rows to an expert (Lancet, section 2.3), with
counts and rows of its own (`part_rows`). Where the backward wants the whole batch's rows, those of the parts
are put together, expert by expert (`merge_parts`), and `merge_rows` says where each choice's row is then. For
gates with token-order priority these are the very rows of the uncut batch.

A part of the capacity (Tutel) is a window of slots: part p of P has the slots n * p / P to n * (p + 1) / P of
the n that a rank fills with rows for an expert. Both sides know the counts, so they cut alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from lancet_kernels.kernels.config import DTYPES
from lancet_kernels.ops.base import op
from lancet_kernels.ops.comm.all_to_all import DROPPED, segments, traced_rows
from lancet_kernels.ops.moe.gate import slots_in_token_order


def runs_in_kernels(tensor: Tensor) -> bool:
    """Is there a kernel for tensors of this device and dtype?"""
    return tensor.dtype in DTYPES and _kernels_run_on(tensor.device)


def _kernels_run_on(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        from lancet_kernels.kernels.runtime import INTERPRETED
    except ImportError:
        return False
    # TRITON_INTERPRET is for tensors on the CPU.
    return not INTERPRETED


@op("lancet::kept_counts", is_own_fake=True)
def kept_counts(used_E: Tensor, capacity: int, ranks: int) -> Tensor:
    """-> [W, L] int64: min(used, capacity) of expert l on rank w, for a batch that began with no slot used.

    Args: used_E: int64, the gate's `used'` (dropped assignments included).
    """
    return used_E.clamp(max=capacity).view(ranks, -1)


@op("lancet::send_rows", like="expert_TK")
def send_rows(expert_TK: Tensor, slot_TK: Tensor, count_WL: Tensor) -> Tensor:
    """-> [T, K] int64: row indices, sorted by expert, then slot; DROPPED for a slot >= the expert's count.

    Args: expert_TK, slot_TK: int64, from the gate; the slots of an expert are 0, 1, 2, ... without gaps.
    Example: counts = [[1], [2]], expert = [[1, 0], [1, 0]], slot = [[0, 0], [1, 1]] -> [[1, 0], [2, -1]].
    """
    count_E = count_WL.reshape(-1)
    first_E = count_E.cumsum(0) - count_E
    return torch.where(slot_TK < count_E[expert_TK], first_E[expert_TK] + slot_TK, DROPPED)


def choice_of_rows(row_TK: Tensor) -> Tensor:
    """-> [S] int64: the choice t * K + k of each row. Makes the host wait for the number of rows.

    Example: row = [[1, 0], [2, -1]] -> [1, 0, 2].
    """
    row_N = row_TK.reshape(-1)
    choice_S = (row_N >= 0).nonzero().view(-1)
    return torch.empty_like(choice_S).index_copy_(0, row_N[choice_S], choice_S)


@op("lancet::dispatch")
def dispatch(
    x_TD: Tensor, row_TK: Tensor, weight_TK: Tensor | None, most_rows: int, num_rows: int | None = None
) -> Tensor:
    """rows[row[t, k]] = x[t] * weight[t, k].

    Args:
        row_TK: int64, from `send_rows`. weight_TK: None means 1.
        most_rows: an upper bound of S; the number of rows of the result if the host does not know S.
        num_rows: S, if the caller knows it.
    Returns: [S, D] in the dtype of x; products are computed in at least float32.
    """
    if runs_in_kernels(x_TD):
        from lancet_kernels.kernels.rows import permute

        weight_TK = None if weight_TK is None else weight_TK.float().contiguous()
        return permute(x_TD.contiguous(), row_TK.contiguous(), weight_TK, most_rows)

    choice_S = choice_of_rows(row_TK)
    token_S = choice_S if row_TK.shape[1] == 1 else choice_S.div(row_TK.shape[1], rounding_mode="floor")
    rows_SD = x_TD.index_select(0, token_S)
    if weight_TK is None:
        return rows_SD
    weight_S1 = weight_TK.reshape(-1)[choice_S].unsqueeze(1)
    # The rows are already a copy, so multiply in place, unless the weights have a wider dtype.
    wide = torch.promote_types(rows_SD.dtype, weight_S1.dtype) != rows_SD.dtype
    return (rows_SD * weight_S1).to(x_TD.dtype) if wide else rows_SD.mul_(weight_S1)


@dispatch.register_fake
def _(x_TD, row_TK, weight_TK, most_rows, num_rows=None):
    return x_TD.new_empty(traced_rows(most_rows, num_rows), x_TD.shape[1])


def _setup_context(ctx, inputs, output) -> None:
    x_TD, row_TK, weight_TK, *_ = inputs
    weighted = weight_TK is not None and ctx.needs_input_grad[2]
    ctx.save_for_backward(row_TK, weight_TK, x_TD if weighted else None)


def _backward(ctx, grad_SD):
    row_TK, weight_TK, x_TD = ctx.saved_tensors
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = combine(grad_SD, row_TK, weight_TK)
    if x_TD is not None:
        grad_weight = combine_dweight(x_TD, grad_SD, row_TK).to(weight_TK.dtype)
    return grad_x, None, grad_weight, None, None


dispatch.register_autograd(_backward, setup_context=_setup_context)


def _choices(rows_SD: Tensor, row_TK: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each k: k, the rows [T, D] of all tokens' choice k, and which of them are dropped [T, 1]."""
    for k, row_T in enumerate(row_TK.unbind(1)):
        yield k, rows_SD.index_select(0, row_T.clamp(min=0)), (row_T < 0)[:, None]


def _weighted_sum(rows_SD: Tensor, row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """-> [T, D] in at least float32, choice by choice."""
    dtype = torch.promote_types(rows_SD.dtype, torch.float32)
    sum_TD = rows_SD.new_zeros(row_TK.shape[0], rows_SD.shape[1], dtype=dtype)
    for k, rows_TD, dropped_T1 in _choices(rows_SD, row_TK):
        rows_TD = rows_TD.to(dtype).masked_fill_(dropped_T1, 0)
        sum_TD += rows_TD if weight_TK is None else rows_TD.mul_(weight_TK[:, k, None].to(dtype))
    return sum_TD


def _bags(rows_SD: Tensor, row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """`_weighted_sum` in one call: torch's embedding bags, one per token. float32 and float64 only."""
    kept_TK = row_TK >= 0
    kept_T = kept_TK.sum(1)
    first_T = kept_T.cumsum(0) - kept_T
    row_S = row_TK[kept_TK]
    weight_S = None if weight_TK is None else weight_TK[kept_TK].to(rows_SD.dtype)
    return torch.nn.functional.embedding_bag(row_S, rows_SD, first_T, mode="sum", per_sample_weights=weight_S)


@op("lancet::combine")
def combine(rows_SD: Tensor, row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """out[t] = sum_k weight[t, k] * rows[row[t, k]].

    Args: row_TK: int64, as given to dispatch; weight_TK: None means 1.
    Returns: [T, D] in the dtype of the rows.
    """
    if runs_in_kernels(rows_SD):
        from lancet_kernels.kernels import rows

        weight_TK = None if weight_TK is None else weight_TK.float().contiguous()
        return rows.combine(rows_SD.contiguous(), row_TK.contiguous(), weight_TK)

    if not rows_SD.numel() or not row_TK.numel():
        return rows_SD.new_zeros(row_TK.shape[0], rows_SD.shape[1])
    if rows_SD.dtype == torch.float32 and rows_SD.device.type == "cpu":
        return _bags(rows_SD.contiguous(), row_TK, weight_TK)
    return _weighted_sum(rows_SD, row_TK, weight_TK).to(rows_SD.dtype)


@combine.register_fake
def _(rows_SD, row_TK, weight_TK):
    return rows_SD.new_empty(row_TK.shape[0], rows_SD.shape[1])


@op("lancet::combine_dweight")
def combine_dweight(x_TD: Tensor, rows_SD: Tensor, row_TK: Tensor) -> Tensor:
    """-> [T, K], at least float32: x[t] . rows[row[t, k]], zero where dropped.

    The gradient of the weights in combine (x = gradient of its output) and in dispatch (rows = gradient of
    its output).
    """
    if runs_in_kernels(x_TD):
        from lancet_kernels.kernels import rows

        return rows.combine_dweight(x_TD.contiguous(), rows_SD.contiguous(), row_TK.contiguous())

    dtype = torch.promote_types(rows_SD.dtype, torch.float32)
    dweight_TK = rows_SD.new_zeros(row_TK.shape, dtype=dtype)
    if rows_SD.numel():
        x_TD1 = x_TD.to(dtype).unsqueeze(2)
        for k, rows_TD, dropped_T1 in _choices(rows_SD, row_TK):
            dot_T1 = torch.bmm(rows_TD.to(dtype).unsqueeze(1), x_TD1).squeeze(2)
            dweight_TK[:, k] = dot_T1.masked_fill_(dropped_T1, 0).squeeze(1)
    return dweight_TK


@combine_dweight.register_fake
def _(x_TD, rows_SD, row_TK):
    dtype = torch.promote_types(rows_SD.dtype, torch.float32)
    return row_TK.new_empty(row_TK.shape, dtype=dtype)


def _save_for_combine(ctx, inputs, output) -> None:
    rows_SD, row_TK, weight_TK = inputs
    weighted = weight_TK is not None and ctx.needs_input_grad[2]
    ctx.save_for_backward(row_TK, weight_TK, rows_SD if weighted else None)
    ctx.num_rows = rows_SD.shape[0]


def _combine_backward(ctx, grad_TD):
    row_TK, weight_TK, rows_SD = ctx.saved_tensors
    grad_rows = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_rows = torch.ops.lancet.dispatch(grad_TD, row_TK, weight_TK, ctx.num_rows, ctx.num_rows)
    if rows_SD is not None:
        grad_weight = combine_dweight(grad_TD, rows_SD, row_TK).to(weight_TK.dtype)
    return grad_rows, None, grad_weight


combine.register_autograd(_combine_backward, setup_context=_save_for_combine)


@op("lancet::part_rows", is_own_fake=True)
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


@op("lancet::merge_rows", is_own_fake=True)
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


Number = TypeVar("Number", int, Tensor)


def _window(n: Number, part: int, parts: int) -> tuple[Number, Number]:
    """First slot of a part, and the end (exclusive)."""
    return n * part // parts, n * (part + 1) // parts


@op("lancet::window_counts", is_own_fake=True)
def window_counts(count_WL: Tensor, part: int, parts: int) -> Tensor:
    """-> [W, L]: the number of rows in a part's window of slots. Example: 5 rows in 2 parts: 2 and 3."""
    first_WL, behind_WL = _window(count_WL, part, parts)
    return behind_WL - first_WL


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
