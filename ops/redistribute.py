"""An activation goes from one layout to another: every rank sends the pieces of its tile that others need.

    [rows, features] is cut into `units`; a box is ((first row, end), (first feature, end)) in units

What is replicated is alike on all ranks that have it, its gradient too: so a redistribution sums nothing,
and neither does its backward, which is another redistribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.groups import group_of, group_rank
from lancet_kernels.ops.link import link
from lancet_kernels.ops.waiting import waiting

Span = tuple[int, int]
Box = tuple[Span, Span]


@dataclass(frozen=True)
class Piece:
    """What one rank has and another one (or itself) needs: units of the whole matrix."""

    source: int
    target: int
    rows: Span
    columns: Span


@dataclass(frozen=True)
class Redistribution:
    """held, needed: the box of each rank before and behind it."""

    units: tuple[int, int]
    held: tuple[Box, ...]
    needed: tuple[Box, ...]
    pieces: tuple[Piece, ...]

    @property
    def travels(self) -> bool:
        """Does any rank need what another one has?"""
        return any(piece.source != piece.target for piece in self.pieces)

    def unit_sizes(self, tile: tuple[int, ...], rank: int) -> tuple[int, int]:
        """Rows and features of a unit, from the size of this rank's tile.

        Raises: UserError if the tile cannot be cut so.
        """
        (r0, r1), (c0, c1) = self.held[rank]
        if tile[0] % (r1 - r0) or tile[1] % (c1 - c0):
            raise UserError(
                "rows and features of an activation",
                got=f"a tile of {tuple(tile)} on rank {rank}",
                expected=f"multiples of {r1 - r0} and {c1 - c0}",
                do="use a batch and a sequence whose product the ranks can divide",
            )
        return tile[0] // (r1 - r0), tile[1] // (c1 - c0)


def redistribute(x: Tensor, there: Redistribution, back: Redistribution, group: str, what: str) -> Tensor:
    """This rank's tile of the layout after `there`. Differentiable; the gradient goes the way of `back`.

    Args: x: [rows, features], its tile before. what: travels, for the message if a rank stays away.
    Raises: UserError, CommunicationError.
    """
    return _Redistribute.apply(x, there, back, group, what)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back, group, what):
        ctx.back, ctx.group, ctx.what = back, group, what
        return moved(x, there, group, what)

    @staticmethod
    def backward(ctx, grad):
        return moved(grad, ctx.back, ctx.group, f"gradient of {ctx.what}"), None, None, None, None


def moved(x: Tensor, plan: Redistribution, group: str, what: str) -> Tensor:
    """The redistribution, waited for. -> a tensor of its own, or x where nothing changes."""
    if plan.held == plan.needed:
        return x
    rank = group_rank(group)
    height, width = plan.unit_sizes(x.shape, rank)
    (r0, r1), (c0, c1) = plan.needed[rank]
    result = x.new_empty((r1 - r0) * height, (c1 - c0) * width)

    def source(piece: Piece) -> Tensor:
        return _cut(x, piece, plan.held[rank], height, width)

    def target(piece: Piece) -> Tensor:
        return _cut(result, piece, plan.needed[rank], height, width)

    for piece in plan.pieces:
        if piece.source == piece.target == rank:
            target(piece).copy_(source(piece))
    if plan.travels:
        # A rank has one box, so there is one piece at the most for each pair of ranks.
        sent = sorted((p for p in plan.pieces if p.source == rank != p.target), key=lambda p: p.target)
        coming = sorted((p for p in plan.pieces if p.target == rank != p.source), key=lambda p: p.source)
        send, receive = [0] * len(plan.held), [0] * len(plan.held)
        for piece in sent:
            send[piece.target] = source(piece).numel()
        for piece in coming:
            receive[piece.source] = target(piece).numel()
        leaving = torch.cat([x.new_empty(0), *(source(p).reshape(-1) for p in sent)])
        arrived = x.new_empty(sum(receive))
        _exchange(arrived, leaving, receive, send, group, what)
        for piece, values in zip(coming, arrived.split([n for n in receive if n]), strict=True):
            target(piece).copy_(values.view(target(piece).shape))
    return result


def _exchange(
    arrived: Tensor, buffer: Tensor, receive: list[int], send: list[int], group: str, what: str
) -> None:
    process_group, size = group_of(group), buffer.element_size()
    with waiting(f"redistribution of {what}", process_group):
        transfer = link.start(process_group, buffer.numel() * size, arrived.numel() * size, buffer.is_cuda)
        work = dist.all_to_all_single(arrived, buffer, receive, send, group=process_group, async_op=True)
        transfer.watch(work, buffer)
        transfer.finish(work)


def _cut(tile: Tensor, piece: Piece, box: Box, height: int, width: int) -> Tensor:
    """The piece as a view of the tile that fills `box`."""
    (r0, _), (c0, _) = box
    rows = slice((piece.rows[0] - r0) * height, (piece.rows[1] - r0) * height)
    return tile[rows, (piece.columns[0] - c0) * width : (piece.columns[1] - c0) * width]
