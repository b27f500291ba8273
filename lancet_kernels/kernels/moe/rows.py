"""The rows of a token's choices: their place, their weighted sum.

    t  tokens [BT], m_t which of them exist    K  choices per token    D  width of a row

Choice k of token t is at row[t, k] of [S, D]; a negative row means dropped. The row of a dropped choice is
never read, and counts as zero. K may be a constexpr or an argument.

Roundings are those of torch, the same in the interpreter and compiled.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels.protocol.device import INTERPRETED


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


# Launch options: a product is rounded before it is added, as torch does. Set everywhere, because the default
# changes between Triton 3.9 (fused) and 3.10.
UNFUSED = {"enable_fp_fusion": False}


@triton.jit
def round_to(b_x, dtype: tl.constexpr):
    """Round to `dtype`, to nearest, ties to even.

    Compiled code does that by itself; the interpreter cuts the low bits of float32 off to get bfloat16
    (Triton 3.6 to 3.9), half a unit too small on average. There the rounding is done in integers:
    0x3F80_8001 -> 0x3F81, 0x3F80_8000 -> 0x3F80, 0x3F81_8000 -> 0x3F82.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = b_x.to(tl.int32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        # Rounding could carry a NaN into infinity; any NaN will do.
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, nearest)
        b_x = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        b_x = b_x.to(dtype)
    return b_x
