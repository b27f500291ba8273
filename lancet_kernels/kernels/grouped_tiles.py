"""The order of the tiles of a grouped GEMM, computed on the device: which tile has number n?

    W  ranks, L experts here, C capacity      group  the contiguous rows of one rank for one expert

The order is chosen for L2: expert by expert, and within an expert in bands of GROUP_M row tiles (of all its
groups), column by column. So programs that run at the same time share columns of one weight, and the weight
is read from HBM about once per band. Empty groups have no tiles.

The data of all groups is in vectors of GROUPS elements, a power of two >= W * L, in registers. Compiled for
sm_90 (Triton 3.6 and 3.9), no kernel spills because of them at 512 groups; at 2048 some do, with at most 44
moves.
"""

import triton
import triton.language as tl


@triton.jit
def in_bands(i_tile, num_m, num_n, GROUP_M: tl.constexpr):
    """-> row and column of tile `i_tile` of num_m x num_n: bands of GROUP_M rows, column by column.

    Example: num_m = 3, num_n = 2, GROUP_M = 2: (0,0) (1,0) (0,1) (1,1), then (2,0) (2,1).
    """
    i_band = i_tile // (GROUP_M * num_n)
    height = tl.minimum(num_m - i_band * GROUP_M, GROUP_M)
    i_within = i_tile % (GROUP_M * num_n)
    return i_band * GROUP_M + i_within % height, i_within // height


@triton.jit
def groups(count_ptr, W, L, C, COMPACT: tl.constexpr, GROUPS: tl.constexpr, BM: tl.constexpr):
    """-> [GROUPS] each, expert by expert: real rows, first row in the buffer, end of its row tiles.

    Example: W = 2, L = 2, C = 8, counts = [[5, 0], [8, 1]], BM = 4: groups (0,0) (1,0) (0,1) (1,1) have
    rows 5, 8, 0, 1, start at rows 0, 16, 8, 24, and their row tiles end at 2, 4, 4, 5.
    """
    i_g = tl.arange(0, GROUPS)
    m_g = i_g < W * L
    if COMPACT:
        first = tl.load(count_ptr + i_g, mask=m_g, other=0)
        rows = tl.minimum(tl.load(count_ptr + i_g + 1, mask=m_g, other=0), C) - first
    else:
        i = (i_g % W) * L + i_g // W
        first = i.to(tl.int64) * C
        rows = tl.minimum(tl.load(count_ptr + i, mask=m_g, other=0), C)
    rows = tl.maximum(rows, 0).to(tl.int32)
    return rows, first.to(tl.int64), tl.cumsum((rows + BM - 1) // BM, 0)


@triton.jit
def locate(
    tile, rows_G, first_G, end_G, W, num_n,
    GROUPS: tl.constexpr, GROUP_M: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """-> of tile number `tile`: expert, first row and number of rows of its group, m0 there, column of tiles.

    Each expert has num_n tiles per row tile, so tile // num_n names a row tile of the right expert; which
    one of that expert's it is, and the column, follow from the bands.
    """
    i_g = tl.arange(0, GROUPS)
    tiles_G = (rows_G + BM - 1) // BM
    expert = tl.sum((end_G <= tile // num_n).to(tl.int32), 0) // W
    num_m = tl.sum(tl.where(i_g // W == expert, tiles_G, 0), 0)
    first_m = tl.sum(tl.where(i_g < expert * W, tiles_G, 0), 0)
    i_m, i_n = in_bands(tile - first_m * num_n, num_m, num_n, GROUP_M)
    i_m += first_m
    group = tl.sum((end_G <= i_m).to(tl.int32), 0)
    here = i_g == group
    rows = tl.sum(tl.where(here, rows_G, 0), 0)
    first = tl.sum(tl.where(here, first_G, 0), 0)
    m0 = (i_m - tl.sum(tl.where(i_g < group, tiles_G, 0), 0)) * BM
    return expert, first, rows, m0, i_n
