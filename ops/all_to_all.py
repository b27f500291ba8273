"""Irregular all-to-all in two phases: counts first, then the real rows alone (Lancet, section 6, figure 10).

    W  ranks, L experts on each      C  capacity      D  width      R  real rows

`exchange_counts` is phase one and runs once per layer: afterwards both sides know both directions, so
the way back and both backward passes need no second exchange. `all_to_all` is phase two: row block [w]
of the buffer goes to rank w. It is its own adjoint with the counts swapped.

`start_all_to_all` gives the same in two halves, so that computation can run in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.groups import counts_group, group_of
from lancet_kernels.ops.kernel_path import runs_in_kernels
from lancet_kernels.ops.link import Transfer, link
from lancet_kernels.ops.rows import pack, unpack
from lancet_kernels.ops.waiting import current_layer, enter_layer, waiting

_HEADER = 5
# Messages come in multiples of this: ranks with different numbers of experts must still understand each
# other, and gloo ends the process when two ranks expect messages of different sizes.
_MESSAGE = 64
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


_runs_a_plan = False


@contextlib.contextmanager
def running_a_plan() -> Iterator[None]:
    """Inside the block, exchanges of counts are those of a plan: its collectives are others than the
    module's, so no rank may run one while its peers run the other."""
    global _runs_a_plan
    before, _runs_a_plan = _runs_a_plan, True
    try:
        yield
    finally:
        _runs_a_plan = before


@torch.library.custom_op("lancet::exchange_counts", mutates_args=())
def exchange_counts(count_WL: Tensor, capacity: int, width: int, dtype: torch.dtype, group: str) -> Tensor:
    """Tell every rank how many rows it gets for each of its experts.

    A header travels along (capacity, width, dtype, ..., with a plan or without), so that ranks that
    disagree all raise instead of one of them hanging.

    Args: count_WL int64, rows for expert l of rank w; group: a name from `group_name`.
    Returns: [W, L] int64, rows that rank w has for expert l of this rank.
    Raises: UserError (ranks disagree), CommunicationError (a peer did not come).
    """
    if not group:
        return count_WL.clone()
    ranks, local_experts = count_WL.shape
    values = [capacity, width, _DTYPES.index(dtype), local_experts, int(_runs_a_plan)]
    header = torch.tensor(values, device=count_WL.device)
    message = torch.cat([header.expand(ranks, -1), count_WL], dim=1)
    sent = torch.nn.functional.pad(message, (0, -message.shape[1] % _MESSAGE))
    received = torch.empty_like(sent)
    process_group = group_of(counts_group(group))
    with waiting("exchange_counts", process_group, current_layer()):
        dist.all_to_all_single(received, sent, group=process_group)
    _check_headers(received[:, :_HEADER].tolist(), process_group)
    return received[:, _HEADER : _HEADER + local_experts].contiguous()


def _check_headers(headers: list[list[int]], group: dist.ProcessGroup) -> None:
    own = headers[group.rank()]
    if len({header[-1] for header in headers}) > 1:
        without = ", ".join(str(peer) for peer, header in enumerate(headers) if not header[-1])
        raise UserError(
            "optimized module across ranks",
            got=f"rank(s) {without} running without the plan, others with it",
            expected="the same on every rank",
            do="see the warning there: it names the mode, setting or shape that is another one",
        )
    for peer, header in enumerate(headers):
        if header != own:
            raise UserError(
                "MoE layer across ranks (capacity, width, dtype, experts per rank)",
                got=f"{_describe(own)} on rank {group.rank()} and {_describe(header)} on rank {peer}",
                expected="the same on every rank",
                do="give every rank the same number of tokens and the same layer",
            )


def _describe(header: list[int]) -> tuple:
    return (*header[:2], str(_DTYPES[header[2]]).removeprefix("torch."), header[3])


@exchange_counts.register_fake
def _(count_WL, capacity, width, dtype, group):
    return torch.empty_like(count_WL)


@dataclass
class PendingAllToAll:
    """An all-to-all under way. `wait` gives the received buffer."""

    work: dist.Work | None
    transfer: Transfer | None
    received_RD: Tensor
    count_WL: Tensor
    capacity: int
    group: dist.ProcessGroup | None
    layer: str = ""

    def wait(self) -> Tensor:
        """-> [W, L, C, D]. Bounded by the process group's timeout; raises CommunicationError."""
        if self.work is not None:
            with waiting("all_to_all", self.group, self.layer):
                self.transfer.finish(self.work)
        return unpack(self.received_RD, self.count_WL, self.capacity)


@dataclass
class NothingToWaitFor:
    """An all-to-all among one rank, on a GPU."""

    received_WLCD: Tensor

    def wait(self) -> Tensor:
        """-> [W, L, C, D]."""
        return self.received_WLCD


def start_all_to_all(
    buffer_WLCD: Tensor, send_count_WL: Tensor, receive_count_WL: Tensor, group: str
) -> PendingAllToAll | NothingToWaitFor:
    """Begin to send the real rows; the buffer may be reused at once.

    Args: send_count_WL, receive_count_WL: int64, rows of each (rank, expert) that leave and that come.
    """
    if not group and runs_in_kernels(buffer_WLCD):
        # Nothing travels, and packing would ask the device how many rows there are.
        return NothingToWaitFor(buffer_WLCD.clone(memory_format=torch.contiguous_format))
    capacity = buffer_WLCD.shape[2]
    sent_RD = pack(buffer_WLCD, send_count_WL)
    if not group:
        return PendingAllToAll(None, None, sent_RD, receive_count_WL, capacity, None)
    process_group = group_of(group)
    rank = process_group.rank()
    send_rows, receive_rows = send_count_WL.sum(1).tolist(), receive_count_WL.sum(1).tolist()
    received_RD = sent_RD.new_empty(sum(receive_rows), sent_RD.shape[1])
    row_bytes = sent_RD.shape[1] * sent_RD.element_size()
    layer = current_layer()
    with waiting("all_to_all", process_group, layer):
        transfer = link.start(
            process_group,
            sent=(sum(send_rows) - send_rows[rank]) * row_bytes,
            received=(sum(receive_rows) - receive_rows[rank]) * row_bytes,
            cuda=sent_RD.is_cuda,
        )
        work = dist.all_to_all_single(
            received_RD, sent_RD, receive_rows, send_rows, group=process_group, async_op=True
        )
    transfer.watch(work, sent_RD)
    return PendingAllToAll(work, transfer, received_RD, receive_count_WL, capacity, process_group, layer)


@torch.library.custom_op("lancet::all_to_all", mutates_args=())
def all_to_all(buffer_WLCD: Tensor, send_count_WL: Tensor, receive_count_WL: Tensor, group: str) -> Tensor:
    """Exchange the real rows and wait. -> [W, L, C, D]; rows from rank w in block [w]."""
    return start_all_to_all(buffer_WLCD, send_count_WL, receive_count_WL, group).wait()


@all_to_all.register_fake
def _(buffer_WLCD, send_count_WL, receive_count_WL, group):
    return torch.empty_like(buffer_WLCD, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output) -> None:
    _, send_count_WL, receive_count_WL, ctx.group = inputs
    ctx.save_for_backward(send_count_WL, receive_count_WL)
    ctx.layer = current_layer()


def _backward(ctx, grad_WLCD):
    send_count_WL, receive_count_WL = ctx.saved_tensors
    enter_layer(ctx.layer)
    return (
        torch.ops.lancet.all_to_all(grad_WLCD, receive_count_WL, send_count_WL, ctx.group),
        None,
        None,
        None,
    )


all_to_all.register_autograd(_backward, setup_context=_setup_context)
