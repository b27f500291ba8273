"""The order of the tiles of a grouped GEMM, computed on the device: which tile has number n?

The order is chosen for L2: expert by expert, and within an expert in bands of GROUP_M row tiles, column by
column. So programs that run at the same time share columns of one weight, and the weight is read from HBM
about once per band. Experts without rows have no tiles.

The data of all L experts is in vectors of GROUPS elements, a power of two >= L, in registers. Compiled for
sm_90 (Triton 3.6 and 3.9), no kernel spills because of them at 512 experts; at 2048 some do, with at most 44
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
def groups(offset_ptr, L, R, GROUPS: tl.constexpr, BM: tl.constexpr):
    """-> [GROUPS] each, by expert: rows, first row, end of its row tiles. No row beyond R counts.

    Example: L = 3, offset = [0, 5, 5, 14], BM = 4: rows 5, 0, 9 from 0, 5, 5 on; row tiles end at 2, 2, 5.
    """
    i_e = tl.arange(0, GROUPS)
    m_e = i_e < L
    first = tl.load(offset_ptr + i_e, mask=m_e, other=0)
    rows = tl.minimum(tl.load(offset_ptr + i_e + 1, mask=m_e, other=0), R) - first
    rows = tl.maximum(rows, 0).to(tl.int32)
    return rows, first, tl.cumsum((rows + BM - 1) // BM, 0)


@triton.jit
def locate(
    tile, rows_L, first_L, end_L, num_n, GROUPS: tl.constexpr, GROUP_M: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """-> of tile number `tile`: expert, its first row and number of rows, m0 there, column of tiles.

    Each expert has num_n tiles per row tile, so tile // num_n names a row tile of the right expert; which
    one of that expert's it is, and the column, follow from the bands.
    """
    expert = tl.sum((end_L <= tile // num_n).to(tl.int32), 0)
    here = tl.arange(0, GROUPS) == expert
    rows = tl.sum(tl.where(here, rows_L, 0), 0)
    first = tl.sum(tl.where(here, first_L, 0), 0)
    num_m = (rows + BM - 1) // BM
    first_m = tl.sum(tl.where(here, end_L, 0), 0) - num_m
    i_m, i_n = in_bands(tile - first_m * num_n, num_m, num_n, GROUP_M)
    return expert, first, rows, i_m * BM, i_n
