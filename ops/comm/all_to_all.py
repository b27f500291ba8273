"""Irregular all-to-all in two phases: counts first, then the rows themselves (Lancet, section 6, figure 10).

    W  ranks, L experts on each      R  rows      D  width

`exchange_counts` is phase one and runs once per layer: it gives the counts of both directions, so the combine
and both backward passes need no second exchange. `all_to_all` is phase two. On the way to the experts, rows
are sorted by rank before it and by local expert after it; on the way back it is the reverse (`rows`). Its
adjoint is itself, with the counts swapped and the direction reversed.

`start_exchange_counts` and `start_all_to_all` do the same in two steps, so that computation runs in between:
other ranks answer an exchange of counts only when they come to it.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.groups import counts_group, group_of
from lancet_kernels.ops.comm.link_group import LinkWork, link_group_of
from lancet_kernels.ops.comm.pending import Here, Pending, Started, apart
from lancet_kernels.ops.comm.rows import expert_major, rank_major, traced_rows
from lancet_kernels.ops.comm.waiting import current_layer, enter_layer, waiting
from lancet_kernels.ops.context import now
from lancet_kernels.ops.registration import op

# A number by which it is known, width, dtype, experts per rank, a number for the layer, whether a plan runs.
_HEADER = 6
_COUNTS = zlib.crc32(b"counts")
# Message sizes are multiples of this: ranks with different numbers of experts must be able to detect that,
# but gloo ends the process if two ranks expect messages of different sizes.
_MESSAGE = 64
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def start_exchange_counts(count_WL: Tensor, width: int, dtype: torch.dtype, group: str) -> Started[Tensor]:
    """Start to tell every rank how many rows it gets for each of its experts.

    Args: as of `exchange_counts`, whose call in a graph this one takes the place of.
    """
    if not group:
        return Here(count_WL)
    (ranks, local_experts), layer = count_WL.shape, current_layer()
    values = [
        _COUNTS,
        width,
        _DTYPES.index(dtype),
        local_experts,
        zlib.crc32(layer.encode()),
        int(now.runs_a_plan),
    ]
    header = torch.tensor(values, device=count_WL.device)
    message = torch.cat([header.expand(ranks, -1), count_WL], dim=1)
    sent = torch.nn.functional.pad(message, (0, -message.shape[1] % _MESSAGE))
    received = torch.empty_like(sent)
    process_group = group_of(counts_group(group))
    with waiting("exchange_counts", process_group, layer):
        work = dist.all_to_all_single(received, sent, group=process_group, async_op=True)

    def finish() -> Tensor:
        _check_headers(received[:, :_HEADER].tolist(), process_group)
        return received[:, _HEADER : _HEADER + local_experts].contiguous()

    return Pending(LinkWork("exchange_counts", process_group, work, None, layer, kept=sent), finish)


@op("lancet::exchange_counts", like="count_WL")
def exchange_counts(count_WL: Tensor, width: int, dtype: torch.dtype, group: str) -> Tensor:
    """Tell every rank how many rows it gets for each of its experts, and wait for what the others tell.

    A header is sent with it (width, dtype, layer, ..., with a plan or without), so that all ranks raise an
    error if they disagree, and none hangs. Ranks may have different numbers of tokens.

    Args: count_WL int64, rows for expert l of rank w; group: a name from `group_name`.
    Returns: [W, L] int64, rows that rank w has for expert l of this rank.
    Raises: UserError (ranks disagree), CommunicationError (a peer is missing).
    """
    return apart(start_exchange_counts(count_WL, width, dtype, group).wait(), count_WL)


def _check_headers(headers: list[list[int]], group: dist.ProcessGroup) -> None:
    own = headers[group.rank()]
    others = [str(peer) for peer, header in enumerate(headers) if header[0] != _COUNTS]
    if others:
        raise UserError(
            f"counts of {current_layer()} on rank {group.rank()}",
            got=f"another collective of rank(s) {', '.join(others)}",
            expected="the counts of all ranks",
            do="let all ranks run the same layers and steps; with LANCET_CHECK=1 both collectives are named",
        )
    if len({header[-1] for header in headers}) > 1:
        without = ", ".join(str(peer) for peer, header in enumerate(headers) if not header[-1])
        raise UserError(
            "optimized module across ranks",
            got=f"rank(s) {without} running without the plan, others with it",
            expected="the same on every rank",
            do="see the warning there, which names the mode, setting or shape that differs",
        )
    for peer, header in enumerate(headers):
        if header[:4] == own[:4] and header != own:
            raise UserError(
                "MoE layer across ranks",
                got=f"{current_layer()} on rank {group.rank()}, another one on rank {peer}",
                expected="the same layer on every rank at the same time",
                do="let all ranks run, or leave out, the same MoE layers",
            )
        if header != own:
            raise UserError(
                "MoE layer across ranks (width, dtype, experts per rank)",
                got=f"{_describe(own)} on rank {group.rank()} and {_describe(header)} on rank {peer}",
                expected="the same on every rank",
                do="give every rank the same layer",
            )


def _describe(header: list[int]) -> tuple:
    return header[1], str(_DTYPES[header[2]]).removeprefix("torch."), header[3]


def start_all_to_all(
    rows_SD: Tensor,
    send_count_WL: Tensor,
    receive_count_WL: Tensor,
    group: str,
    to_experts: bool,
    num_rows: int | None = None,
) -> Started[Tensor]:
    """Start to send rows, which must not change until `wait`.

    Args: as of `all_to_all`, whose call in a graph this one takes the place of, with the same arguments.
    """
    if not group:
        # With one rank, both sides have the same order.
        return Here(rows_SD)
    send_rows, receive_rows = send_count_WL.sum(1).tolist(), receive_count_WL.sum(1).tolist()
    # On a device that did not know the number of rows, the tensor may have more rows than needed.
    sent_SD = (rows_SD if to_experts else rank_major(rows_SD, send_count_WL))[: sum(send_rows)]
    received_RD = sent_SD.new_empty(sum(receive_rows), sent_SD.shape[1])
    work = link_group_of(group).all_to_all(
        received_RD, sent_SD, receive_rows, send_rows, layer=current_layer()
    )

    def finish() -> Tensor:
        # A collective delivers rank by rank.
        return expert_major(received_RD, receive_count_WL) if to_experts else received_RD

    return Pending(work, finish)


@op("lancet::all_to_all")
def all_to_all(
    rows_SD: Tensor,
    send_count_WL: Tensor,
    receive_count_WL: Tensor,
    group: str,
    to_experts: bool,
    num_rows: int | None = None,
) -> Tensor:
    """Exchange rows and wait.

    Args:
        send_count_WL, receive_count_WL: int64, rows of each (rank, expert) to send and to receive.
        group: a name from `group_name`.
        to_experts: True: rows [S, D] by rank and expert become [R, D] by local expert and rank. False: back.
        num_rows: the number of received rows, if the caller knows it.
    """
    pending = start_all_to_all(rows_SD, send_count_WL, receive_count_WL, group, to_experts)
    return apart(pending.wait(), rows_SD)


@all_to_all.register_fake
def _(rows_SD, send_count_WL, receive_count_WL, group, to_experts, num_rows=None):
    num_rows = num_rows if group else rows_SD.shape[0]
    return rows_SD.new_empty(traced_rows(rows_SD.shape[0], num_rows), rows_SD.shape[1])


def _setup_context(ctx, inputs, output) -> None:
    rows_SD, send_count_WL, receive_count_WL, ctx.group, ctx.to_experts, _ = inputs
    ctx.save_for_backward(send_count_WL, receive_count_WL)
    ctx.num_rows = rows_SD.shape[0]
    ctx.layer = current_layer()


def _backward(ctx, grad_RD):
    send_count_WL, receive_count_WL = ctx.saved_tensors
    enter_layer(ctx.layer)
    grad_SD = torch.ops.lancet.all_to_all(
        grad_RD, receive_count_WL, send_count_WL, ctx.group, not ctx.to_experts, ctx.num_rows
    )
    return grad_SD, None, None, None, None, None


all_to_all.register_autograd(_backward, setup_context=_setup_context)
