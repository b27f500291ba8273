"""A shift: every rank sends tiles to one rank and receives as many from one (PrimePar, ring communication).

    source_of[w]   the place in the group from which the rank in place w gets tiles: a permutation, alike on
                   all ranks

Point to point (`batch_isend_irecv`), so no rank waits for a third one. `start_shift` gives it in two halves;
tiles have the same shapes on all ranks. A shift is its own adjoint, the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.groups import group_of, group_rank, group_size
from lancet_kernels.ops.comm.link import link
from lancet_kernels.ops.comm.link_group import Here, LinkWork, Pending, Started, apart
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
) -> Started[list[Tensor]]:
    """Begin to send tiles, which must stay as they are until `wait`.

    Args: group: a name from `group_name`. what: travels, for the message if a rank stays away.
        after: a tensor before which the shift must not begin in a captured graph; it is not sent.
    Raises: UserError (source_of is no permutation), CommunicationError.
    """
    _check_permutation(source_of, group)
    if not group:
        return Here(tiles)
    process_group, what = group_of(group), f"shift of {what}" if what else "shift"
    rank = process_group.rank()
    source, target = source_of[rank], list(source_of).index(rank)
    is_cuda = tiles[0].is_cuda
    if source == rank:
        link.skip_shift(process_group)
        return Here(tiles)
    sent = [tile.contiguous() for tile in tiles]
    received = [torch.empty_like(tile) for tile in sent]
    size = sum(tile.numel() * tile.element_size() for tile in sent)
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


def _check_permutation(source_of: Sequence[int], group: str) -> None:
    ranks = group_size(group)
    if sorted(source_of) != list(range(ranks)):
        raise UserError(
            "sources of a shift",
            got=list(source_of),
            expected=f"each of the {ranks} places of the group once",
            do="let every rank send to one rank and receive from one",
        )


@torch.library.custom_op("lancet::shift", mutates_args=())
def shift(
    tiles: list[Tensor], source_of: list[int], group: str, what: str, after: Tensor | None
) -> list[Tensor]:
    """Send and receive tiles, and wait.

    Args: as of `start_shift`.
    Returns: the tiles of the source, of the same shapes.
    """
    received = start_shift(tiles, source_of, group, what).wait()
    return list(map(apart, received, tiles))


@shift.register_fake
def _(tiles, source_of, group, what, after):
    return [torch.empty_like(tile, memory_format=torch.contiguous_format) for tile in tiles]


def _setup_context(ctx, inputs, output) -> None:
    _, ctx.source_of, ctx.group, ctx.what, _ = inputs


def _backward(ctx, grads):
    back = [ctx.source_of.index(place) for place in range(len(ctx.source_of))]
    return shift(list(grads), back, ctx.group, f"gradient of {ctx.what}", None), None, None, None, None


shift.register_autograd(_backward, setup_context=_setup_context)
