"""One tile of an expert's GEMM: forward, dX, dW, each with its epilogue.

    rows  real rows of the group        BM, BN  the tile of the output        BK  step along the contraction
    K     contraction                   N       columns of the output (of one half, for swiglu)

Pointers already point at the group's first row and at the expert's weight; matrices are row-major, without
gaps. Accumulation is in float32; there is one rounding, at the store. Rows from `rows` on do not affect a
result and are not written, even if they contain NaN.

There are two ways to load. TMA=True (sm_90 and newer) creates tensor descriptors on the device, whose extent
is the real rows, so that the hardware fills the rest of a tile with zeros. It requires base addresses and row
distances that are multiples of 16 bytes, and `runtime.provide_scratch()` before the launch. TMA=False loads
with masks and runs everywhere. Stores are always plain, so that an output on another PE is covered by the
release of the signal that follows (`device.put_signal`).

The caller has waited for the rows, and called `device.fence_tma` if they came from another PE.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels.protocol.device import INTERPRETED

# Columns of a block in `add_row_dots`, which 64 would make spill beside the rest of a backward (216 bytes).
DOT_BLOCK = tl.constexpr(32)

SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def gelu(h):
    """h * Phi(h), exact. float32 in and out, like all of these."""
    return h * 0.5 * (1.0 + tl.erf(h * SQRT_HALF))


@triton.jit
def dgelu(h):
    """Phi(h) + h * phi(h)."""
    return 0.5 * (1.0 + tl.erf(h * SQRT_HALF)) + h * (INV_SQRT_2PI * tl.exp(-0.5 * h * h))


@triton.jit
def silu(h):
    return h * tl.sigmoid(h)


@triton.jit
def dsilu(h):
    # By h * s, which is silu(h): whoever needs both keeps one register less for each element.
    s = tl.sigmoid(h)
    return s + h * s * (1.0 - s)


@triton.jit
def activate(h, ACT: tl.constexpr):
    """The activations of one argument."""
    if ACT == "gelu":
        h = gelu(h)
    elif ACT == "silu":
        h = silu(h)
    return h


@triton.jit
def _dot(a, b, acc):
    # The interpreter's product of bfloat16 is garbage.
    if INTERPRETED and a.dtype == tl.bfloat16:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _load(desc, p, m, row, column, TMA: tl.constexpr):
    """A block through its descriptor at (row, column), or through pointers and mask."""
    if TMA:
        return desc.load([row, column])
    else:
        return tl.load(p, mask=m, other=0.0)


@triton.jit
def _block(ptr, rows, columns, ld, row, column, BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr):
    """-> descriptor, pointers and row and column indices of the block [BR, BC] at (row, column)."""
    i_row = row + tl.arange(0, BR)
    i_column = column + tl.arange(0, BC)
    p = ptr + i_row[:, None].to(tl.int64) * ld + i_column[None, :]
    # No descriptor has an extent of 0; a loop over no rows never uses it.
    extent = [tl.maximum(rows, 1), columns]
    desc = tl.make_tensor_descriptor(ptr, extent, [ld, 1], [BR, BC]) if TMA else 0
    return desc, p, i_row, i_column


@triton.jit
def _store(ptr, value, m0, n0, rows, N, ld, BM: tl.constexpr, BN: tl.constexpr):
    """The real rows and columns of the tile at (m0, n0), rounded to what `ptr` points at."""
    i_m = m0 + tl.arange(0, BM)
    i_n = n0 + tl.arange(0, BN)
    m = (i_m < rows)[:, None] & (i_n < N)[None, :]
    p = ptr + i_m[:, None].to(tl.int64) * ld + i_n[None, :]
    tl.store(p, value.to(ptr.dtype.element_ty), mask=m)


@triton.jit
def quarters(acc, BM: tl.constexpr, BN: tl.constexpr):
    """-> the four column blocks [BM, BN / 4] of a tile, from left to right.

    An epilogue on a whole 128x256 tile holds pointers, masks and a second operand of that size beside the
    accumulators: compiled for sm_90 it spills (gelu: 304 local loads and stores). A quarter at a time
    does not.
    """
    left, right = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
    q0, q1 = left.reshape(BM, 2, BN // 4).permute(0, 2, 1).split()
    q2, q3 = right.reshape(BM, 2, BN // 4).permute(0, 2, 1).split()
    return q0, q1, q2, q3


@triton.jit
def _add_bias(acc, bias_ptr, n0, N, BN: tl.constexpr):
    i_n = n0 + tl.arange(0, BN)
    b_bias = tl.load(bias_ptr + i_n, mask=i_n < N, other=0.0).to(tl.float32)
    return acc + b_bias[None, :]


@triton.jit
def product(
    x_ptr, w_ptr, rows, m0, n0, K, N,
    PAIR: tl.constexpr, TRANSPOSED: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """-> float32 [BM, BN] of x @ w, or of x @ w^T; with PAIR of x @ w[:, :N] and x @ w[:, N:] for one x.

    x [rows, K]; w [K, N], [K, 2N] with PAIR, [N, K] if TRANSPOSED. Without PAIR the second result is unused,
    and costs nothing.
    """
    x_desc, p_x, i_m, i_k = _block(x_ptr, rows, K, K, m0, 0, BM, BK, TMA)
    if TRANSPOSED:
        w_desc, p_w, i_n, _ = _block(w_ptr, N, K, K, n0, 0, BN, BK, TMA)
        step = 1
    else:
        ldw = 2 * N if PAIR else N
        w_desc, p_w, _, i_n = _block(w_ptr, K, ldw, ldw, 0, n0, BK, BN, TMA)
        step = ldw
    acc = tl.zeros((BM, BN), tl.float32)
    acc_up = acc
    for k in range(0, K, BK):
        m_k = i_k < K - k
        b_x = _load(x_desc, p_x, (i_m < rows)[:, None] & m_k[None, :], m0, k, TMA)
        if TRANSPOSED:
            b_w = _load(w_desc, p_w, (i_n < N)[:, None] & m_k[None, :], n0, k, TMA)
            acc = _dot(b_x, b_w.T, acc)
        else:
            m_w = m_k[:, None] & (i_n < N)[None, :]
            acc = _dot(b_x, _load(w_desc, p_w, m_w, k, n0, TMA), acc)
            if PAIR:
                acc_up = _dot(b_x, _load(w_desc, p_w + N, m_w, k, N + n0, TMA), acc_up)
        p_x += BK
        p_w += BK * step
    return acc, acc_up


@triton.jit
def forward_tile(
    x_ptr, w_ptr, bias_ptr, pre_ptr, out_ptr, rows, m0, n0, K, N,
    ACT: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[m0:m0+BM, n0:n0+BN] = act(x @ w + bias), for the rows < `rows`.

    x [rows, K]; w [K, N], for swiglu [K, 2N] = gate | up; bias [N] or [2N], or None; out [rows, N]; pre is
    the value before the activation, [rows, N] or [rows, 2N] without gaps. With swiglu a tile holds two
    accumulators: take BN half as wide.

    Floor: 2 * BM * BN * K FLOPs (twice that for swiglu), (BM + BN) * K elements read, BM * BN written.

    Example: rows = 3, K = N = 2, BM = 16, m0 = n0 = 0: x = [[1, 0], [0, 1], [2, 2]], w = [[1, 2], [3, 4]] ->
    pre[0:3] = [[1, 2], [3, 4], [8, 12]], out = act(pre); neither's row 3 is touched.
    """
    PAIR: tl.constexpr = ACT == "swiglu"
    WIDTH: tl.constexpr = BN // 4
    ld_pre = 2 * N if PAIR else N
    acc, acc_up = product(x_ptr, w_ptr, rows, m0, n0, K, N, PAIR, False, TMA, BM, BN, BK)
    quarter, quarter_up = quarters(acc, BM, BN), quarters(acc_up, BM, BN)
    for q in tl.static_range(4):
        n, value = n0 + q * WIDTH, quarter[q]
        if bias_ptr is not None:
            value = _add_bias(value, bias_ptr, n, N, WIDTH)
        _store(pre_ptr, value, m0, n, rows, N, ld_pre, BM, WIDTH)
        if PAIR:
            up = quarter_up[q]
            if bias_ptr is not None:
                up = _add_bias(up, bias_ptr + N, n, N, WIDTH)
            _store(pre_ptr + N, up, m0, n, rows, N, ld_pre, BM, WIDTH)
            value = silu(value) * up
        else:
            value = activate(value, ACT)
        _store(out_ptr, value, m0, n, rows, N, N, BM, WIDTH)


@triton.jit
def _load_pre(pre_ptr, m0, n0, rows, N, ld, BM: tl.constexpr, BN: tl.constexpr):
    i_m = m0 + tl.arange(0, BM)
    i_n = n0 + tl.arange(0, BN)
    m = (i_m < rows)[:, None] & (i_n < N)[None, :]
    return tl.load(pre_ptr + i_m[:, None].to(tl.int64) * ld + i_n[None, :], mask=m, other=0.0).to(tl.float32)


@triton.jit
def store_to_rows(p_row, m_row, acc, bias_ptr, n0, N, BM: tl.constexpr, BN: tl.constexpr):
    """Columns n0 to n0 + BN of acc [BM, BN], plus bias [N] or None, to the rows at p_row [BM] where m_row.

    The rows may be anywhere, on other PEs too; they are N wide. Rounded once.
    """
    quarter = quarters(acc, BM, BN)
    for q in tl.static_range(4):
        n = n0 + q * (BN // 4)
        value = quarter[q]
        if bias_ptr is not None:
            value = _add_bias(value, bias_ptr, n, N, BN // 4)
        i_n = n + tl.arange(0, BN // 4)
        m = m_row[:, None] & (i_n < N)[None, :]
        tl.store(p_row[:, None] + i_n[None, :], value.to(p_row.dtype.element_ty), mask=m)


@triton.jit
def backward_tile(
    dy_ptr, w_ptr, pre_ptr, weight_ptr, out_ptr, hidden_ptr, rows, m0, n0, K, N,
    ACT: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[m0:m0+BM, n0:n0+BN] = weight * (dy @ w^T) * act'(pre), for the rows < `rows`. -> float32 [BM].

    dy [rows, K]; w [N, K] as the forward has it. weight [rows], float32: dy is the gradient of weight * y,
    where y = act(pre) @ w is what the forward gave. pre is [rows, N], and out its gradient; for swiglu both
    are [rows, 2N] = gate | up, and the tile writes both halves. hidden [rows, N] = weight * act(pre), whose
    product with dy is the gradient of w. Returned is (dy @ w^T) . act(pre) over the columns of this tile:
    their sum over all tiles is dy . y, the gradient of the weight.

    Floor: 2 * BM * BN * K FLOPs; (BM + BN) * K elements and those of pre read, out and hidden written.
    In this order swiglu spills least: 20 bytes (128x128x64 in bfloat16, sm_90, Triton 3.9).

    Example: dy = [[1, 2]], w = [[1, 0], [0, 1], [1, 1]], silu, pre = [[0, 0, 9]] and weight [2]: hidden =
    [[0, 0, 18]], and 3 * 9 = 27 is returned.
    """
    WIDTH: tl.constexpr = BN // 4
    ld = 2 * N if ACT == "swiglu" else N
    acc, _ = product(dy_ptr, w_ptr, rows, m0, n0, K, N, False, True, TMA, BM, BN, BK)
    i_m = m0 + tl.arange(0, BM)
    b_weight = tl.load(weight_ptr + i_m, mask=i_m < rows, other=0.0)[:, None]
    dots = tl.zeros((BM,), tl.float32)
    quarter = quarters(acc, BM, BN)
    for q in tl.static_range(4):
        n, value = n0 + q * WIDTH, quarter[q]
        b_pre = _load_pre(pre_ptr, m0, n, rows, N, ld, BM, WIDTH)
        if ACT == "swiglu":
            b_act = silu(b_pre)
            _store(out_ptr + N, value * b_weight * b_act, m0, n, rows, N, ld, BM, WIDTH)
            b_up = _load_pre(pre_ptr + N, m0, n, rows, N, ld, BM, WIDTH)
            b_slope = b_up * dsilu(b_pre)
            b_act = b_act * b_up
        else:
            b_act = activate(b_pre, ACT)
            b_slope = dgelu(b_pre) if ACT == "gelu" else dsilu(b_pre)
        _store(out_ptr, value * b_weight * b_slope, m0, n, rows, N, ld, BM, WIDTH)
        _store(hidden_ptr, b_act * b_weight, m0, n, rows, N, N, BM, WIDTH)
        dots += tl.sum(value * b_act, 1)
    return dots


@triton.jit
def add_row_dots(acc, x_ptr, b_ptr, rows, m0, K, BM: tl.constexpr):
    """-> acc + x[m0:m0+BM] @ b, float32 [BM]; x [rows, K], b [K]. In blocks of DOT_BLOCK columns."""
    _, p_x, i_m, i_k = _block(x_ptr, rows, K, K, m0, 0, BM, DOT_BLOCK, False)
    for k in range(0, K, DOT_BLOCK):
        b_x = tl.load(p_x + k, mask=(i_m < rows)[:, None] & (i_k < K - k)[None, :], other=0.0)
        b_b = tl.load(b_ptr + k + i_k, mask=i_k < K - k, other=0.0)
        acc += tl.sum(b_x.to(tl.float32) * b_b.to(tl.float32)[None, :], 1)
    return acc


@triton.jit
def weight_gradient_tile(
    x_ptr, dy_ptr, dw_ptr, rows, m0, n0, A, B,
    TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dw[m0:m0+BM, n0:n0+BN] = x[:rows]^T @ dy[:rows], rounded once; x [rows, A], dy [rows, B], dw [A, B].

    Zeros for no rows.
    """
    x_desc, p_x, i_r, i_m = _block(x_ptr, rows, A, A, 0, m0, BK, BM, TMA)
    dy_desc, p_dy, _, i_n = _block(dy_ptr, rows, B, B, 0, n0, BK, BN, TMA)
    if not TMA:
        # sm_80 copies asynchronously what reaches the dot as it is; a transposed block it would not.
        p_x = x_ptr + i_r[None, :].to(tl.int64) * A + i_m[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for r in range(0, rows, BK):
        m_r = i_r < rows - r
        if TMA:
            b_x = x_desc.load([r, m0]).T
        else:
            b_x = tl.load(p_x, mask=m_r[None, :] & (i_m < A)[:, None], other=0.0)
        b_dy = _load(dy_desc, p_dy, m_r[:, None] & (i_n < B)[None, :], r, n0, TMA)
        acc = _dot(b_x, b_dy, acc)
        p_x += tl.cast(A, tl.int64) * BK
        p_dy += tl.cast(B, tl.int64) * BK
    quarter = quarters(acc, BM, BN)
    for q in tl.static_range(4):
        _store(dw_ptr, quarter[q], m0, n0 + q * (BN // 4), A, B, B, BM, BN // 4)


@triton.jit
def bias_gradient_tile(dy_ptr, db_ptr, weight_ptr, weighted, rows, n0, B, BN: tl.constexpr, BK: tl.constexpr):
    """db[n0:n0+BN] = the sums of dy[:rows] over its rows, rounded once.

    weight: float32, by which the first `weighted` rows count; the others count once.
    """
    _, p_dy, i_r, i_n = _block(dy_ptr, rows, B, B, 0, n0, BK, BN, False)
    acc = tl.zeros((BN,), tl.float32)
    for r in range(0, rows, BK):
        b_dy = tl.load(p_dy, mask=(i_r < rows - r)[:, None] & (i_n < B)[None, :], other=0.0)
        b_weight = tl.load(weight_ptr + r + i_r, mask=i_r < weighted - r, other=1.0)
        acc += tl.sum(b_dy.to(tl.float32) * b_weight[:, None], 0)
        p_dy += tl.cast(B, tl.int64) * BK
    tl.store(db_ptr + i_n, acc.to(db_ptr.dtype.element_ty), mask=i_n < B)
