"""From a whole matrix to the tiles of the ranks, and back.

    q  tiles along a side      m, n  rows and columns of a tile
    tile_of[w] = row * q + column of the tile that the rank in place w of the group has

`scatter_tiles` takes this rank's tile of a matrix that every rank has whole; `gather_tiles` gives every rank
the whole. Each is the other's gradient: what is whole, and its gradient, are alike on all ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.ops.groups import group_of, group_rank, group_size
from lancet_kernels.ops.waiting import waiting


@torch.library.custom_op("lancet::row_of_rank", mutates_args=())
def row_of_rank(table: list[int], group: str, like: Tensor) -> Tensor:
    """Of a table with a row for each rank of the group this rank's: int64, on the device of `like`.

    What differs between ranks is data, and all of them run one graph.
    """
    width = len(table) // group_size(group)
    begin = width * group_rank(group)
    return torch.tensor(table[begin : begin + width], device=like.device)


@row_of_rank.register_fake
def _(table, group, like):
    return like.new_empty(len(table) // group_size(group), dtype=torch.int64)


@torch.library.custom_op("lancet::scatter_tiles", mutates_args=())
def scatter_tiles(whole: Tensor, tile_of: list[int], side: int, group: str) -> Tensor:
    """[q m, q n], alike on all ranks -> this rank's tile [m, n]."""
    row, column = divmod(tile_of[group_rank(group)], side)
    m, n = whole.shape[0] // side, whole.shape[1] // side
    return whole[row * m : (row + 1) * m, column * n : (column + 1) * n].clone(
        memory_format=torch.contiguous_format
    )


@scatter_tiles.register_fake
def _(whole, tile_of, side, group):
    return whole.new_empty(whole.shape[0] // side, whole.shape[1] // side)


@torch.library.custom_op("lancet::gather_tiles", mutates_args=())
def gather_tiles(tile: Tensor, tile_of: list[int], side: int, group: str) -> Tensor:
    """This rank's tile [m, n] -> [q m, q n] on every rank. Raises: CommunicationError."""
    if not group:
        return tile.clone(memory_format=torch.contiguous_format)
    process_group = group_of(group)
    (m, n), ranks = tile.shape, process_group.size()
    tiles = tile.new_empty(ranks, m, n)
    with waiting("gathering of tiles", process_group):
        dist.all_gather(list(tiles.unbind()), tile.contiguous(), group=process_group)
    place = torch.empty(ranks, dtype=torch.int64)
    place[torch.tensor(tile_of)] = torch.arange(ranks)
    grid = tiles[place.to(tile.device)].view(side, side, m, n)
    return grid.permute(0, 2, 1, 3).reshape(side * m, side * n)


@gather_tiles.register_fake
def _(tile, tile_of, side, group):
    return tile.new_empty(tile.shape[0] * side, tile.shape[1] * side)


def _setup_context(ctx, inputs, output) -> None:
    _, ctx.tile_of, ctx.side, ctx.group = inputs


def _scatter_backward(ctx, grad):
    return gather_tiles(grad, ctx.tile_of, ctx.side, ctx.group), None, None, None


def _gather_backward(ctx, grad):
    return scatter_tiles(grad, ctx.tile_of, ctx.side, ctx.group), None, None, None


scatter_tiles.register_autograd(_scatter_backward, setup_context=_setup_context)
gather_tiles.register_autograd(_gather_backward, setup_context=_setup_context)
