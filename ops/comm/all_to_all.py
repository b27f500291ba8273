"""Irregular all-to-all in two phases: counts first, then the rows themselves (Lancet, section 6, figure 10).

    T  tokens on this rank      K  choices per token      S  rows to send, one per kept choice
    W  ranks, L experts each    R  rows received          D  width

`exchange_counts` is phase one and runs once per layer: it gives the counts of both directions, so the combine
and both backward passes need no second exchange. `all_to_all` is phase two. On the way to the experts, rows
are sorted by rank before it and by local expert after it; on the way back it is the reverse. Its
adjoint is itself, with the counts swapped and the direction reversed.

`start_exchange_counts` and `start_all_to_all` do the same in two steps, so that computation runs in between:
other ranks answer an exchange of counts only when they come to it.

Where rows lie. A row is one kept choice of one token; nothing else is stored per expert. Rows to send, [S,
D]: by global expert e = w * L + l, then slot. What goes to one rank is one block. Rows received, [R, D]: by
local expert, then source rank, then slot. An expert's rows are one block, a group of a grouped GEMM. Every
offset is a prefix sum of counts [W, L].

Sizes in graphs. How many rows there are depends on the routing, so ops that make rows cannot say it when a
graph is traced. Two answers:

- Under torch.compile such a size is a symbol without a value (`new_dynamic_size`, which dynamo of torch 2.11
  to 2.13 allows with `fullgraph=True`): inductor compares sizes of results with those that were traced.
- Where a plan is made for the graph (`graph.capture.capture`), it is the number of rows of an evenly
  spread, dropless batch (`ops.base.Now`): a planner needs numbers, and the partitioner and the runtime of
  AOTAutograd (2.11 to 2.13) never compare the size of an intermediate result with the traced one. Tensors are
  exact when the graph runs, so nothing in a graph may take a number of rows as an argument and trust it.

On a GPU that exchanges nothing with others, the host does not know the counts: tensors then have the most
rows that there can be, ops read the counts on the device, and what lies behind the last row is never read.
"""

from __future__ import annotations

import zlib
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.base import now, op
from lancet_kernels.ops.comm.groups import counts_group, group_of
from lancet_kernels.ops.comm.link_group import LinkWork, Pending, apart, link_group_of
from lancet_kernels.ops.comm.waiting import current_layer, enter_layer, waiting

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
    ranks, local_experts = count_WL.shape
    if ranks <= 1 or local_experts <= 1:
        return rows_RD
    counts = count_WL.flatten().tolist()
    pieces = rows_RD[: sum(counts)].split(counts)
    return torch.cat([piece for e in range(local_experts) for piece in pieces[e::local_experts]])


def rank_major(rows_RD: Tensor, count_WL: Tensor) -> Tensor:
    """Rows by expert, then rank -> by rank, then expert. The rows themselves where that is the same."""
    return expert_major(rows_RD, count_WL.T)


# Magic number, width, dtype, experts per rank, hash of the layer's name, whether a plan runs.
_HEADER = 6
_COUNTS = zlib.crc32(b"counts")
# Message sizes are multiples of this: ranks with different numbers of experts must be able to detect that,
# but gloo ends the process if two ranks expect messages of different sizes.
_MESSAGE = 64
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def start_exchange_counts(count_WL: Tensor, width: int, dtype: torch.dtype, group: str) -> Pending[Tensor]:
    """The first half of `exchange_counts`, which it replaces in a graph, with the same arguments."""
    (ranks, local_experts), layer = count_WL.shape, current_layer()
    if not group:
        return Pending.here(_counted(count_WL, layer))
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
        return _counted(received[:, _HEADER : _HEADER + local_experts].contiguous(), layer)

    return Pending(LinkWork("exchange_counts", process_group, work, None, layer, kept=sent), finish)


def _counted(count_WL: Tensor, layer: str) -> Tensor:
    """The counts that this rank received, added to `now.routed` unless that is None."""
    if now.routed is not None:
        rows_L = count_WL.sum(0)
        now.routed[layer] = now.routed[layer] + rows_L if layer in now.routed else rows_L
    return count_WL


@op("lancet::exchange_counts", like="count_WL")
def exchange_counts(count_WL: Tensor, width: int, dtype: torch.dtype, group: str) -> Tensor:
    """Tell every rank how many rows it gets for each of its experts, and wait for the counts of the others.

    A header is sent along (width, dtype, layer, ..., with a plan or without), so that ranks that disagree
    all raise an error, and none hangs. Ranks may have different numbers of tokens.

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
) -> Pending[Tensor]:
    """The first half of `all_to_all`, which it replaces in a graph, with the same arguments: rows must not
    change until `wait`."""
    if not group:
        # With one rank, both sides have the same order.
        return Pending.here(rows_SD)
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
