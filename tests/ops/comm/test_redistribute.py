"""`shift` and redistributions between whole and tiles, on real ranks: bitwise, each other's adjoints."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels import UserError
from lancet_kernels.ops.comm.groups import group_name
from lancet_kernels.ops.comm.link import emulate_link, link
from lancet_kernels.ops.comm.redistribute import (
    Piece,
    Redistribution,
    Way,
    redistribution_of,
    shift,
    start_shift,
)
from tests.grids import few_of
from tests.ranks import RankPool

PERMUTATIONS = [[1, 2, 3, 0], [0, 2, 1, 3], [3, 2, 1, 0], [0, 1, 2, 3]]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]


def tile_of(rank: int, n: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + n)
    return (100 * torch.randn(3 + n, 5, generator=generator)).to(dtype)


def shift_on_rank(source_of: list[int], dtype: torch.dtype, gbps: float | None) -> dict:
    """Two tensors, of which one is not contiguous; then two shifts under way at a time."""
    rank, group = dist.get_rank(), group_name(None)
    if gbps:
        emulate_link(gbps)
    own = [tile_of(rank, 0, dtype), tile_of(rank, 1, dtype).T.contiguous().T]
    link.read()
    got = shift(own, source_of, group, "tiles", None)
    sent = link.read().bytes_sent
    first, second = (start_shift([tile], source_of, group) for tile in own)
    beside = [*first.wait(), *second.wait()]
    expected = [tile_of(source_of[rank], n, dtype) for n in range(2)]
    travels = source_of[rank] != rank
    return {
        "bitwise": all(torch.equal(a, b) for a, b in zip([*got, *beside], expected * 2, strict=True)),
        "own memory": all(a.data_ptr() != b.data_ptr() for a, b in zip(got, own, strict=True)),
        "bytes": sent == travels * sum(t.nbytes for t in own),
    }


@pytest.mark.parametrize("gbps", few_of([None, 1.0], 0, 1))
@pytest.mark.parametrize(("source_of", "dtype"), few_of(zip(PERMUTATIONS, DTYPES, strict=True), 0, 1))
def test_tiles_come_from_their_source(
    pool: RankPool, source_of: list[int], dtype: torch.dtype, gbps: float | None
) -> None:
    for result in pool.run(shift_on_rank, source_of, dtype, gbps, ranks=4):
        assert result == {"bitwise": True, "own memory": True, "bytes": True}


def gradients_on_rank(source_of: list[int]) -> list[bool]:
    """Gradients go back where tiles came from; whole and tile are each other's adjoints."""
    rank, group = dist.get_rank(), group_name(None)
    tile = tile_of(rank, 0, torch.float64).requires_grad_()
    (got,) = shift([tile], source_of, group, "tile", None)
    (got * (rank + 1)).sum().backward()
    receiver = source_of.index(rank)
    checks = [torch.equal(tile.grad, torch.full_like(tile, receiver + 1))]
    whole = torch.arange(48.0, dtype=torch.float64).view(6, 8).requires_grad_()
    corners = tuple(((r, r + 1), (c, c + 1)) for r, c in ((1, 1), (0, 1), (0, 0), (1, 0)))
    everything = (((0, 2), (0, 2)),) * 4
    take = Redistribution(
        (2, 2), everything, corners, tuple(Piece(w, w, *box) for w, box in enumerate(corners))
    )
    pieces = tuple(Piece(s, t, *box) for t in range(4) for s, box in enumerate(corners))
    gather = Redistribution((2, 2), corners, everything, pieces)
    part = Way(take, gather)(whole, group, "whole")
    (row, _), (column, _) = corners[rank]
    checks.append(torch.equal(part, whole[3 * row : 3 * row + 3, 4 * column : 4 * column + 4]))
    back = Way(gather, take)(part, group, "parts")
    checks.append(torch.equal(back, whole))
    weights = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (back * weights).sum().backward()
    checks.append(torch.equal(whole.grad, weights))
    return checks


@pytest.mark.parametrize("source_of", few_of(PERMUTATIONS))
def test_gradients_go_back(pool: RankPool, source_of: list[int]) -> None:
    assert all(all(checks) for checks in pool.run(gradients_on_rank, source_of, ranks=4))


def test_one_rank_and_bad_input() -> None:
    tile = torch.randn(2, 3)
    (same,) = shift([tile], [0], "", "tile", None)
    assert torch.equal(same, tile)
    assert same.data_ptr() != tile.data_ptr()
    with pytest.raises(UserError, match=r"sources of a shift: got \[1\], expected each of the 1 places"):
        start_shift([tile], [1], "")
    torch.library.opcheck(shift, ([tile.requires_grad_()], [0], "", "tile", None))
    whole, left = (((0, 1), (0, 2)),), (((0, 1), (0, 1)),)
    take = Redistribution((1, 2), whole, left, (Piece(0, 0, *left[0]),))
    wide = torch.randn(2, 4, requires_grad=True)
    assert redistribution_of(take.text) == take
    checked = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = wide, take.text, take.text, "", ""
    torch.library.opcheck(torch.ops.lancet.take_tile, arguments, test_utils=checked)
