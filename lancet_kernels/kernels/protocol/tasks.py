"""What does one launch of the overlap kernel do, and which task has which number?

    kind      numbers      needs                                     provides
    PUT       expert, tile (released, and counts: earlier launches)  rows arrived in that tile of the expert
    TILE_IN   tile, n      rows of all sources of the tile           one column tile of its first GEMM ready
    TILE_OUT  tile, n      all n of that tile ready                  with the last n: returned to the sources
    WGRAD     which, local, m, n    all tiles of the expert ready    -
    DENSE     problem, m, n         -                                -
    REDUCE    block        returned, of the tokens in it             -

`schedule.py` has the order, and why one resident program per PE is enough. Nothing of it is a list on the
host: how many puts and tiles there are follows from the counts, and `find_task` finds the task of a number.
Kinds, and their numbers [T] of blocks of tokens and tiles of independent GEMMs, come from the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from lancet_kernels.errors import UserError

PUT = tl.constexpr(0)
TILE_IN = tl.constexpr(1)
TILE_OUT = tl.constexpr(2)
WGRAD = tl.constexpr(3)
DENSE = tl.constexpr(4)
REDUCE = tl.constexpr(5)
# A row of the table of independent GEMMs: kind, a, b, c, M, N, K, number of its first task.
DENSE_WORDS = tl.constexpr(8)
DENSE_N = tl.constexpr(5)
DENSE_FIRST = tl.constexpr(7)


@dataclass(frozen=True)
class LaunchShape:
    """What a launch has, apart from puts and tiles, whose numbers the counts decide.

    Attributes:
        put: send rows. tiles_in, tiles_out: column tiles of the first and second GEMM; 0: not in this launch.
        wgrad: weight gradients of the experts.
        dense_tiles: tiles of independent GEMMs.
        reduce_blocks: blocks of tokens to add up; 0: none.
        programs, comm_programs: size of the grid, and how many of it put while the others have tiles.
    """

    put: bool = True
    tiles_in: int = 0
    tiles_out: int = 0
    wgrad: bool = False
    dense_tiles: int = 0
    reduce_blocks: int = 0
    programs: int = 1
    comm_programs: int = 1

    def __post_init__(self) -> None:
        check_comm_programs(self.comm_programs, self.programs)

    @property
    def lag(self) -> int:
        """By how many tiles the second GEMM is behind the first: those that other programs are still at."""
        return -(-self.programs // max(1, self.tiles_in))


def check_comm_programs(comm_programs: int, programs: int) -> None:
    """Raise UserError unless some of the programs of a launch, or all, can put."""
    if not 1 <= comm_programs <= programs:
        raise UserError(
            "comm_programs",
            got=comm_programs,
            expected=f"1 to {programs} (the programs of the launch)",
            do="give communication fewer programs",
        )


@triton.jit
def puts_before(
    j, num_puts, independent, num_tiles, tiles_in, tiles_out, lag, programs, comm_programs, tile_puts_ptr
):  # fmt: skip
    """How many puts stand before the j-th of the other tasks; grows with j.

    Example: 4 programs of which 1 puts, 3 independent tasks, 9 puts: 1 before each of the first three; the
    tile behind them has 2, or tile_puts[0] if that is more.
    """
    beside = programs - comm_programs
    before = num_puts
    if beside > 0:
        before = tl.minimum(num_puts, (j // tl.maximum(beside, 1) + 1) * comm_programs)
    y = j - independent
    if y >= 0:
        early = tl.minimum(lag, num_tiles)
        head = early * tiles_in
        tile = y // tl.maximum(tiles_in, 1)
        if y >= head:
            tile = early + (y - head) // tl.maximum(tiles_in + tiles_out, 1)
        # Without tiles in the launch, what comes next stands behind all puts.
        tile = tl.where(tiles_in + tiles_out > 0, tile, num_tiles)
        needed = num_puts
        if tile < num_tiles:
            needed = tl.load(tile_puts_ptr + tile)
        before = tl.maximum(before, needed)
    return before


@triton.jit
def find_other(
    j, num_puts, independent, num_tiles, tiles_in, tiles_out, lag, programs, comm_programs, tile_puts_ptr, i
):  # fmt: skip
    """-> the last of the other tasks up to j whose number is at most i; -1 if there is none."""
    low = j * 0 - 1
    high = j
    while low < high:
        middle = (low + high + 1) // 2
        number = middle + puts_before(
            middle, num_puts, independent, num_tiles, tiles_in, tiles_out, lag, programs, comm_programs,
            tile_puts_ptr,
        )  # fmt: skip
        if number <= i:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def tile_task(y, num_tiles, tiles_in, tiles_out, lag):
    """-> kind, tile and column of the y-th task of both GEMMs.

    Example: 3 tiles, 2 columns in, 1 out, lag 1: in (0, 0), in (0, 1), in (1, 0), in (1, 1), out (0, 0), in
    (2, 0), in (2, 1), out (1, 0), out (2, 0).
    """
    early = tl.minimum(lag, num_tiles)
    head = early * tiles_in
    both = tiles_in + tiles_out
    kind = TILE_IN + y * 0
    tile = y // tl.maximum(tiles_in, 1)
    n = y % tl.maximum(tiles_in, 1)
    if y >= head:
        z = y - head
        if z < (num_tiles - early) * both:
            tile = z // both
            n = z % both
            if n < tiles_in:
                tile += early
            else:
                n -= tiles_in
                kind = TILE_OUT + y * 0
        else:
            z -= (num_tiles - early) * both
            kind = TILE_OUT + y * 0
            tile = num_tiles - early + z // tl.maximum(tiles_out, 1)
            n = z % tl.maximum(tiles_out, 1)
    return kind, tile, n


@triton.jit
def dense_task(j, problems_ptr, num_problems, BN: tl.constexpr):
    """-> problem, m and n of the j-th tile of all independent GEMMs."""
    problem = j * 0
    following = problems_ptr + DENSE_WORDS + DENSE_FIRST
    while (problem + 1 < num_problems) & (
        tl.load(following + problem * DENSE_WORDS, mask=problem + 1 < num_problems, other=0) <= j
    ):
        problem += 1
    p = problems_ptr + problem * DENSE_WORDS
    tile = j - tl.load(p + DENSE_FIRST).to(tl.int32)
    columns = tl.cdiv(tl.load(p + DENSE_N).to(tl.int32), BN)
    return problem, tile // columns, tile % columns


@triton.jit
def wgrad_task(j, L, D, F, H, BM: tl.constexpr, BN: tl.constexpr):
    """-> which, local expert, m and n of the j-th tile of weight gradients: dw2 [F, D], then dw1 [D, H]."""
    columns = tl.cdiv(D, BN)
    each = tl.cdiv(F, BM) * columns
    which = j * 0
    if j >= L * each:
        j -= L * each
        which += 1
        columns = tl.cdiv(H, BN)
        each = tl.cdiv(D, BM) * columns
    return which, j // each, j % each // columns, j % columns


@triton.jit
def num_wgrads(L, D, F, H, BM: tl.constexpr, BN: tl.constexpr):
    """Tiles of the weight gradients of all experts here."""
    return L * (tl.cdiv(F, BM) * tl.cdiv(D, BN) + tl.cdiv(D, BM) * tl.cdiv(H, BN))
