"""Redistribute a matrix from one layout to another: every rank sends the pieces of its tile that others need.

    [rows, features] is cut into `units`; a box is ((first row, end), (first feature, end)) in units

Replicas are alike on all ranks that have one, gradients too: so a redistribution sums nothing, and neither
does its backward, which is another redistribution. Taking a tile of a replicated matrix is one in which
nothing travels; its backward gathers the whole from tiles.

In a shift every rank sends tiles to one rank and receives as many from one (PrimePar, ring communication):

    source_of[w]   the place in the group from which the rank in place w gets tiles: a permutation, alike on
                   all ranks

Point to point (`batch_isend_irecv`), so no rank waits for a third one. `start_shift` gives it in two halves;
tiles have the same shapes on all ranks. The adjoint of a shift is the inverse shift.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.groups import group_of, group_rank, group_size
from lancet_kernels.ops.comm.link import link
from lancet_kernels.ops.comm.link_group import LinkWork, Pending, apart, link_group_of
from lancet_kernels.ops.comm.waiting import waiting


class _Works:
    """The halves of one shift, waited for as one: first what comes, then what is sent."""

    def __init__(self, works: list[dist.Work]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def start_shift(
    tiles: list[Tensor], source_of: Sequence[int], group: str, what: str = "", after: Tensor | None = None
) -> Pending[list[Tensor]]:
    """Begin to send tiles, which must stay as they are until `wait`.

    Args: group: a name from `group_name`. what: travels, for the message if a rank stays away.
        after: a tensor before which the shift must not begin in a captured graph; it is not sent.
    Raises: UserError (source_of is no permutation), CommunicationError.
    """
    ranks = group_size(group)
    if sorted(source_of) != list(range(ranks)):
        raise UserError(
            "sources of a shift",
            got=list(source_of),
            expected=f"each of the {ranks} places of the group once",
            do="let every rank send to one rank and receive from one",
        )
    if not group:
        return Pending.here(tiles)
    process_group, what = group_of(group), f"shift of {what}" if what else "shift"
    rank = process_group.rank()
    source, target = source_of[rank], list(source_of).index(rank)
    is_cuda = tiles[0].is_cuda
    if source == rank:
        link.skip_shift(process_group)
        return Pending.here(tiles)
    sent = [tile.contiguous() for tile in tiles]
    received = [torch.empty_like(tile) for tile in sent]
    size = sum(tile.nbytes for tile in sent)
    from_rank, to_rank = (dist.get_global_rank(process_group, place) for place in (source, target))
    peers = tuple(dict.fromkeys((source, target)))
    with waiting(what, process_group, peers=peers):
        transfer = link.start_shift(process_group, source, size, is_cuda)
        works = _Works(
            dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, tile, from_rank, process_group) for tile in received]
                + [dist.P2POp(dist.isend, tile, to_rank, process_group) for tile in sent]
            )
        )
    if is_cuda:
        transfer.watch(works)
    work = LinkWork(what, process_group, works, transfer, peers=peers, kept=sent)
    return Pending(work, lambda: received)


def check_alike(own: str, group: str, device: torch.device, what: str, do: str) -> None:
    """Raise UserError on every rank unless all of them describe themselves alike; before what is described
    travels.

    Each rank gets what the ranks behind it in the ring say, one by one, 256 bytes of it.

    Args: what: is described. do: the advice.
    Raises: CommunicationError.
    """
    ranks, rank = group_size(group), group_rank(group)
    header = torch.tensor(list(own.encode()[:256].ljust(256)), dtype=torch.uint8, device=device)
    around = [(place + 1) % ranks for place in range(ranks)]
    headers = [header]
    for _ in range(ranks - 1):
        headers += start_shift([headers[-1]], around, group, f"{what}'s shapes").wait()
    texts = [bytes(header.tolist()).decode(errors="replace").strip() for header in headers]
    for n, other in enumerate(texts):
        if other != texts[0]:
            raise UserError(
                f"{what} across ranks",
                got=f"{texts[0]} on rank {rank} and {other} on rank {(rank + n) % ranks}",
                expected="the same on every rank",
                do=do,
            )


@torch.library.custom_op("lancet::shift", mutates_args=())
def shift(
    tiles: list[Tensor], source_of: list[int], group: str, what: str, after: Tensor | None
) -> list[Tensor]:
    """Send and receive tiles, and wait.

    Args: see `start_shift`. Returns: the tiles of the source, of the same shapes.
    """
    received = start_shift(tiles, source_of, group, what).wait()
    return list(map(apart, received, tiles))


@shift.register_fake
def _(tiles, source_of, group, what, after):
    return [torch.empty_like(tile, memory_format=torch.contiguous_format) for tile in tiles]


def _keep_shift(ctx, inputs, output) -> None:
    _, ctx.source_of, ctx.group, ctx.what, _ = inputs


def _shift_backward(ctx, grads):
    back = [ctx.source_of.index(place) for place in range(len(ctx.source_of))]
    return shift(list(grads), back, ctx.group, f"gradient of {ctx.what}", None), None, None, None, None


shift.register_autograd(_shift_backward, setup_context=_keep_shift)


Span = tuple[int, int]
Box = tuple[Span, Span]


@dataclass(frozen=True)
class Piece:
    """A box, in units of the whole matrix, that one rank holds and another one (or itself) needs."""

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

    @cached_property
    def travels(self) -> bool:
        """Does any rank need what another one has?"""
        return any(piece.source != piece.target for piece in self.pieces)

    @cached_property
    def sources(self) -> tuple[int, ...] | None:
        """For each rank, the rank whose tile it gets, if whole tiles are permuted; else None."""
        whole = all(self.held[p.source] == self.needed[p.target] == (p.rows, p.columns) for p in self.pieces)
        sources = tuple(p.source for p in sorted(self.pieces, key=lambda p: p.target))
        return sources if whole and sorted(sources) == list(range(len(self.held))) else None

    @cached_property
    def text(self) -> str:
        """All of it, as an argument of an op; `redistribution_of` is the inverse."""
        return repr(astuple(self))

    def result_of(self, x: Tensor, rank: int) -> tuple[Tensor, int, int]:
        """An empty tile behind it; rows and features of a unit, from the size of this rank's tile x.

        Raises: UserError if the tile cannot be cut so.
        """
        rows, columns = (end - begin for begin, end in self.held[rank])
        if x.shape[0] % rows or x.shape[1] % columns:
            raise UserError(
                "rows and features of an activation",
                got=f"a tile of {tuple(x.shape)} on rank {rank}",
                expected=f"multiples of {rows} and {columns}",
                do="use a batch and a sequence whose product the ranks can divide",
            )
        height, width = x.shape[0] // rows, x.shape[1] // columns
        (r0, r1), (c0, c1) = self.needed[rank]
        return x.new_empty((r1 - r0) * height, (c1 - c0) * width), height, width


@lru_cache(maxsize=1000)
def redistribution_of(text: str) -> Redistribution:
    """The redistribution with this `text`."""
    units, held, needed, pieces = ast.literal_eval(text)
    return Redistribution(units, held, needed, tuple(Piece(*piece) for piece in pieces))


class Way:
    """A redistribution and that of the gradient, prepared so that calls can be captured."""

    def __init__(self, there: Redistribution, back: Redistribution) -> None:
        self.there, self.back = there, back
        self._changes = there.held != there.needed or back.held != back.needed
        self._travels, self._texts = there.travels, (there.text, back.text)
        self._sources: list[int] | None = None
        if there.sources and back.sources:
            returns = all(back.sources[source] == place for place, source in enumerate(there.sources))
            self._sources = list(there.sources) if returns else None

    def __call__(self, x: Tensor, group: str, what: str) -> Tensor:
        """This rank's tile behind it, from its tile x[rows, features] before. Differentiable.

        Args: what: travels, for the message if a rank stays away.
        Raises: UserError, CommunicationError.
        """
        if not self._changes:
            return x
        if self._sources is not None:
            return shift([x], self._sources, group, what, None)[0]
        return _op(self._travels)(x, *self._texts, group, what)


def moved(x: Tensor, plan: Redistribution, group: str, what: str) -> Tensor:
    """The redistribution, waited for. -> a tensor of its own, or x where nothing changes."""
    if plan.held == plan.needed:
        return x
    rank = group_rank(group)
    result, height, width = plan.result_of(x, rank)

    def cut(tile: Tensor, piece: Piece, box: Box) -> Tensor:
        """The piece as a view of the tile that fills the box."""
        (r0, _), (c0, _) = box
        rows = slice((piece.rows[0] - r0) * height, (piece.rows[1] - r0) * height)
        return tile[rows, (piece.columns[0] - c0) * width : (piece.columns[1] - c0) * width]

    source = partial(cut, x, box=plan.held[rank])
    target = partial(cut, result, box=plan.needed[rank])
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
        what = f"redistribution of {what}"
        link_group_of(group).all_to_all(arrived, leaving, receive, send, what).wait()
        arrivals = arrived.split([receive[piece.source] for piece in coming])
        for piece, values in zip(coming, arrivals, strict=True):
            target(piece).copy_(values.view(target(piece).shape))
    return result


def _redistributed(x: Tensor, there: str, back: str, group: str, what: str) -> Tensor:
    return apart(moved(x, redistribution_of(there), group, what), x)


def _fake(x, there, back, group, what):
    return redistribution_of(there).result_of(x, group_rank(group))[0]


def _keep_arguments(ctx, inputs, output) -> None:
    ctx.arguments = inputs[1:]


def _backward(ctx, grad):
    there, back, group, what = ctx.arguments
    op = _op(redistribution_of(back).travels)
    return op(grad, back, there, group, f"gradient of {what}"), None, None, None, None


_EXCHANGE, _TAKE = (
    torch.library.custom_op(f"lancet::{name}", _redistributed, mutates_args=())
    for name in ("redistribute", "take_tile")
)
"""The same op under two names, by which plans know whether anything travels."""
for op in (_EXCHANGE, _TAKE):
    op.register_fake(_fake)
    op.register_autograd(_backward, setup_context=_keep_arguments)


def _op(travels: bool):
    return _EXCHANGE if travels else _TAKE
