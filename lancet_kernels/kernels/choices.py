"""Where does the row of a token's choice lie, what does it add to a sum, what is its dot product?

    t  tokens [BT], m_t which of them exist    K  choices per token    C  capacity    D  width of a row

Choice k of token t sits in a buffer [E, C, D] at expert[t, k], slot[t, k]. One with slot >= C was dropped:
its row is never read, and it counts as zero whatever the buffer holds. K may be a constexpr or an argument.
"""

import triton
import triton.language as tl


@triton.jit
def place(expert_ptr, slot_ptr, i, m, C, D):
    """Offset of the rows of choices `i` in a [E, C, D] buffer, and which of them are kept.

    Example: C = 4, D = 10: expert 2, slot 1 is at (2 * 4 + 1) * 10 = 90 and kept; slot 4 would not be.
    """
    b_slot = tl.load(slot_ptr + i, mask=m, other=C)
    b_expert = tl.load(expert_ptr + i, mask=m, other=0)
    return (b_expert * C + b_slot) * D, m & (b_slot < C)


@triton.jit
def add_choice(
    acc, k, buffer_ptr, expert_ptr, slot_ptr, weight_ptr, t, m_t, i_d, m_d, C, D, K, WEIGHTED: tl.constexpr
):  # fmt: skip
    """-> acc [BT, BD] + the columns i_d of each token's row of choice k, times weight[t, k] if WEIGHTED.

    Example: acc = [[1, 1]], a row [3, 4] and weight 10: [[31, 41]].
    """
    offset, m_kept = place(expert_ptr, slot_ptr, t * K + k, m_t, C, D)
    m = m_kept[:, None] & m_d[None, :]
    b_row = tl.load(buffer_ptr + offset[:, None] + i_d[None, :], mask=m, other=0.0).to(acc.dtype)
    if WEIGHTED:
        b_row = b_row * tl.load(weight_ptr + t * K + k, mask=m_kept, other=0.0).to(acc.dtype)[:, None]
    return acc + b_row


@triton.jit
def dot_choice(
    k, x_ptr, buffer_ptr, expert_ptr, slot_ptr, dweight_ptr, t, m_t, C, D, K,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dweight[t, k] = x[t] . the row of choice k, summed in the dtype of dweight, in blocks of BD columns.

    Example: x[t] = [1, 2], a row [3, 4]: 11; for a dropped choice 0.
    """
    offset, m_kept = place(expert_ptr, slot_ptr, t * K + k, m_t, C, D)
    acc = tl.zeros([BT, BD], dweight_ptr.dtype.element_ty)
    for d in range(0, D, BD):
        i_d = d + tl.arange(0, BD)
        m = m_kept[:, None] & (i_d < D)[None, :]
        # [BT, BD]
        b_x = tl.load(x_ptr + t[:, None] * D + i_d[None, :], mask=m, other=0.0).to(acc.dtype)
        b_row = tl.load(buffer_ptr + offset[:, None] + i_d[None, :], mask=m, other=0.0).to(acc.dtype)
        acc += b_x * b_row
    tl.store(dweight_ptr + t * K + k, tl.sum(acc, 1), mask=m_t)
