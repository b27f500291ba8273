"""The rows of a token's choices: their place, their weighted sum.

    t  tokens [BT], m_t which of them exist    K  choices per token    D  width of a row

Choice k of token t is at row[t, k] of [S, D]; a negative row means dropped. The row of a dropped choice is
never read, and counts as zero. K may be a constexpr or an argument.
"""

import triton
import triton.language as tl


@triton.jit
def place_row(row_ptr, i, m, D):
    """Offset of the compact rows of choices `i`, and which of them are kept.

    Example: D = 10: row 3 is at 30 and kept; row -1 would not be.
    """
    b_row = tl.load(row_ptr + i, mask=m, other=-1)
    return b_row * D, m & (b_row >= 0)


@triton.jit
def add_row(acc, rows_ptr, weight_ptr, i, offset, m_kept, i_d, m_d):
    """-> acc [BT, BD] + the columns i_d of the rows at `offset`, times weight[i] unless it is None.

    Example: acc = [[1, 1]], a row [3, 4] and weight 10: [[31, 41]].
    """
    m = m_kept[:, None] & m_d[None, :]
    b_row = tl.load(rows_ptr + offset[:, None] + i_d[None, :], mask=m, other=0.0).to(acc.dtype)
    if weight_ptr is not None:
        b_row = b_row * tl.load(weight_ptr + i, mask=m_kept, other=0.0).to(acc.dtype)[:, None]
    return acc + b_row
