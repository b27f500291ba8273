"""The tasks of one launch of an overlap kernel, and their numbers.

    kind      fields                needs                                 provides
    PUT       index: expert, m      (released, counts: earlier launches)  rows arrived in its tile m
    TILE_IN   index: tile, n        rows of all sources of the tile       a column tile of its first GEMM
    TILE_OUT  index: tile, n        all n of that tile ready              with the last n: returned to sources
    WGRAD     which, index, m, n    all tiles of expert `index` ready     -
    DENSE     index: problem, m, n  -                                     -

`schedule.py` has the order, and why one resident program per PE is enough. Puts are listed, since their order
is; of all else a number says its task by arithmetic: three divisions, 0.1 us in one warp.

Groups. Programs that multiply at the same time should have few different operands, and weights should come
from memory once for many rows. So the tiles of an expert, and of a weight gradient, are taken 8 rows at a
time, column by column: 132 programs are at 8 row tiles and 16 or 17 columns. Row by row, at Mixtral's widths,
all are at the 112 columns of one row tile, and all weights stream for every 128 rows. Milliseconds of an
H100's 2.9 TB/s and, in brackets, of 650 TFLOP/s for 2,048 rows of an expert, by a model of its L2
(`test_bytes_of_order.py`, 2026-11-26; not measured on a GPU):

                               forward                      backward
                        row by row   in groups            in groups
    Mixtral, 1 expert      1.92         0.41   (1.11)         0.79   (2.22)
    Qwen3-30B, 3 experts                0.05   (0.09)         0.08   (0.18)

A group ends with its expert, since the next one has other weights. The first column of a group waits for the
rows of 8 tiles instead of one: at D = 4096 8 MB, 0.02 ms of NVLink, beside 0.55 ms of products.

A claim is an atomic on one word in L2, 0.7 us. The Hopper kernel claims ahead of use, while up to 4 steps of
1,024 cycles, 2.3 us, are still to be multiplied. The portable kernel claims in between, 8 % of a tile of
128 x 128 with 2,048 to contract: claiming ahead took its tightest variant to 254 registers of 255.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from lancet_kernels.kernels.protocol.steps import expert_of_tile

PUT = tl.constexpr(0)
TILE_IN = tl.constexpr(1)
TILE_OUT = tl.constexpr(2)
WGRAD = tl.constexpr(3)
DENSE = tl.constexpr(4)
# A row of the table of independent GEMMs: a, b, c, M, N, K, number of its first tile.
DENSE_WORDS = tl.constexpr(8)
DENSE_M = tl.constexpr(3)
DENSE_FIRST = tl.constexpr(6)
# Row tiles whose tasks stand together.
GROUP = tl.constexpr(8)


Task = namedtuple("Task", "kind which index m n")
"""The fields that its kind names above; the others are 0. which: dw2 (0) or dw1 (1), in a backward."""


@triton.jit
def in_groups(position, row, rows, columns):
    """-> row and column of a tile of a matrix of `rows` by `columns` tiles: GROUP rows at a time, each group
    column by column. row: position // columns.
    Example: 10 rows, 2 columns: (0, 0) to (7, 0), (0, 1) to (7, 1), (8, 0), (9, 0), (8, 1), (9, 1).
    """
    first = row // GROUP * GROUP
    size = tl.minimum(rows - first, GROUP)
    position -= first * columns
    return first + position % size, position // size


@triton.jit
def lag_of(tasks, tiles_in):
    """By how many tiles the second GEMM is behind the first: whole groups with so many tasks of the first."""
    return GROUP * tl.cdiv(tasks, GROUP * tiles_in)


@triton.jit
def tile_task(y, num_tiles, lag, ptrs, sizes, const):
    """-> the y-th task of both GEMMs, each of which takes the tiles of an expert in groups.

    After `lag` tiles of the first, 8 of it and 8 of the second take turns, whatever experts they are of.
    Example: 2 experts with 1 and 2 tiles, 2 columns in, 1 out: in (0, 0), (0, 1), (1, 0), (2, 0), (1, 1),
    (2, 1), out (0, 0), (1, 0), (2, 0).
    """
    tiles_in, tiles_out = tl.cdiv(sizes.F, const.BN_IN), tl.cdiv(sizes.D, const.BN)
    early = tl.minimum(lag, num_tiles)
    z = y - early * tiles_in
    # Tiles of the second GEMM, and after the first `early` ones of the first, before this turn and after it.
    before = tl.maximum(z, 0) // (GROUP * (tiles_in + tiles_out)) * GROUP
    after = tl.minimum(before + GROUP, num_tiles - early)
    is_out = z >= before * tiles_out + after * tiles_in
    columns = tl.where(is_out, tiles_out, tiles_in)
    position = tl.where(is_out, z - after * tiles_in, y - before * tiles_out)
    tile = position // columns
    _, _, m, rows, _ = expert_of_tile(tile, ptrs, sizes)
    first_tile = tile - m
    m, n = in_groups(position - first_tile * columns, m, tl.cdiv(rows, const.BM), columns)
    return Task(tl.where(is_out, TILE_OUT, TILE_IN), y * 0, first_tile + m, y * 0, n)


@triton.jit
def dense_task(j, ptrs, sizes, const):
    """-> the j-th tile of all independent GEMMs, of which there are a few."""
    problem = j * 0
    following = ptrs.problems + DENSE_WORDS + DENSE_FIRST
    while (problem + 1 < sizes.num_problems) & (
        tl.load(following + problem * DENSE_WORDS, mask=problem + 1 < sizes.num_problems, other=0) <= j
    ):
        problem += 1
    p = ptrs.problems + problem * DENSE_WORDS
    tile = j - tl.load(p + DENSE_FIRST).to(tl.int32)
    rows = tl.cdiv(tl.load(p + DENSE_M).to(tl.int32), const.BM)
    columns = tl.cdiv(tl.load(p + DENSE_M + 1).to(tl.int32), const.BN)
    m, n = in_groups(tile, tile // columns, rows, columns)
    return Task(j * 0 + DENSE, j * 0, problem, m, n)


@triton.jit
def dense_problem(problem, ptrs, const):
    """-> a, b, c, M, N and K of a row of the table of independent GEMMs; pointers as of rows."""
    p = ptrs.problems + problem * DENSE_WORDS
    dtype: tl.constexpr = ptrs.arrivals.rows.dtype
    a_ptr, b_ptr, c_ptr = tl.load(p).to(dtype), tl.load(p + 1).to(dtype), tl.load(p + 2).to(dtype)
    M = tl.load(p + 3).to(tl.int32)
    N = tl.load(p + 4).to(tl.int32)
    K = tl.load(p + 5).to(tl.int32)
    if const.TMA:
        # The launcher has seen to it; not knowing it, a program stores c element by element.
        N = tl.multiple_of(N, 128 // dtype.element_ty.primitive_bitwidth)
        a_ptr = tl.multiple_of(a_ptr, 16)
        b_ptr = tl.multiple_of(b_ptr, 16)
        c_ptr = tl.multiple_of(c_ptr, 16)
    return a_ptr, b_ptr, c_ptr, M, N, K


@triton.jit
def wgrad_task(j, sizes, const):
    """-> the j-th tile of weight gradients: dw2 [F, D] of all local experts, then dw1 [D, H]."""
    rows, columns = tl.cdiv(sizes.F, const.BM), tl.cdiv(sizes.D, const.BN)
    which = j * 0
    if j >= sizes.L * rows * columns:
        j -= sizes.L * rows * columns
        which += 1
        rows, columns = tl.cdiv(sizes.D, const.BM), tl.cdiv(sizes.H, const.BN)
    index, tile = j // (rows * columns), j % (rows * columns)
    m, n = in_groups(tile, tile // columns, rows, columns)
    return Task(j * 0 + WGRAD, which, index, m, n)


@triton.jit
def num_gemm_tasks(num_tiles, sizes, const):
    """-> how many `gemm_task` numbers."""
    D, F, H = sizes.D, sizes.F, sizes.H
    count = sizes.dense_tiles + num_tiles * (tl.cdiv(F, const.BN_IN) + tl.cdiv(D, const.BN))
    if const.BACKWARD:
        wgrads = tl.cdiv(F, const.BM) * tl.cdiv(D, const.BN) + tl.cdiv(D, const.BM) * tl.cdiv(H, const.BN)
        count += sizes.L * wgrads
    return count


@triton.jit
def gemm_task(i, num_tiles, lag, ptrs, sizes, const):
    """-> the i-th of [independent GEMMs][tiles][weight gradients]. problems None: no independent GEMMs."""
    y = i - sizes.dense_tiles
    j = y - num_tiles * (tl.cdiv(sizes.F, const.BN_IN) + tl.cdiv(sizes.D, const.BN))
    kind, which, index, m, n = Task(y * 0, y * 0, y * 0, y * 0, y * 0)
    if (y >= 0) & (j < 0):
        kind, which, index, m, n = tile_task(y, num_tiles, lag, ptrs, sizes, const)
    if const.BACKWARD:
        if j >= 0:
            kind, which, index, m, n = wgrad_task(j, sizes, const)
    if ptrs.problems is not None:
        if y < 0:
            kind, which, index, m, n = dense_task(i, ptrs, sizes, const)
    return Task(kind, which, index, m, n)


@triton.jit(do_not_specialize=["a", "b", "c", "M", "N", "K", "first"])
def write_dense_row_kernel(row_ptr, a, b, c, M, N, K, first):
    """Write one row of the table of independent GEMMs, from launch arguments.

    Grid: (1,). Work: seven words.
    Example: a = 0x1000, .., M 8, N 4, K 16, first 3: c [8, 4] = a [16, 8]^T @ b [16, 4], whose tiles are
    numbered from 3 on.
    """
    tl.store(row_ptr, tl.cast(a, tl.int64))
    tl.store(row_ptr + 1, tl.cast(b, tl.int64))
    tl.store(row_ptr + 2, tl.cast(c, tl.int64))
    tl.store(row_ptr + 3, tl.cast(M, tl.int64))
    tl.store(row_ptr + 4, tl.cast(N, tl.int64))
    tl.store(row_ptr + 5, tl.cast(K, tl.int64))
    tl.store(row_ptr + 6, tl.cast(first, tl.int64))
