"""Moves rows of tokens to their experts and back, and activates them, each as a launch of its own.

    T  tokens    K  choices per token    D  model width    S  rows, one per kept choice
    R  rows, of which the first `count` are real    F  hidden width    H  F, or 2F for swiglu: [gate | up]

    permute            rows[row[t, k]] = x[t] * weight[t, k]                    backward of combine
    combine            out[t] = sum_k rows[row[t, k]] * weight[t, k]            backward of permute
    combine_dweight    dweight[t, k] = x[t] . rows[row[t, k]]                   weight gradient of both
    activation             a = act(h)            gelu (exact), silu, or swiglu: silu(gate) * up
    activation_backward    dh = act'(h) da

A choice with a negative row is dropped: it is never written, and it contributes zero. Rows that are not real
are neither read nor written; `count` is read on the device. Arithmetic is in float32, rounded once; products
are not fused into sums (`UNFUSED`). All raise UserError for wrong dtypes, shapes, layouts or devices.

permute is bitwise equal to `ops.moe.dispatch`. combine adds k = 0, 1, ..., K - 1, starting at zero; for
float32 rows on a CPU the op fuses products into sums, so the last bits differ. combine_dweight sums over D in
an order that depends only on D, so parts of a batch get bitwise the same results as the whole batch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.config import DTYPES, check_activation
from lancet_kernels.kernels.portable.gemm import activate, dgelu, dsilu, silu
from lancet_kernels.kernels.protocol.device import INTERPRETED
from lancet_kernels.kernels.runtime import check_tensor, launch

# Up to this many choices are unrolled, so that the loads of all rows of a token are in flight together.
UNROLLED = tl.constexpr(8)
# A program's tile: with 4 warps and bf16 two 16-byte loads per thread and choice.
VALUES, WARPS = 2048, 4
# A product is rounded before it is added, as torch does; the default changes in Triton 3.10.
UNFUSED = {"enable_fp_fusion": False}


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


@triton.jit
def permute_kernel(
    x_ptr, row_ptr, weight_ptr, rows_ptr, T, D,
    K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Copy each token's row to the rows of its choices, times their weights.

    Grid: (ceil(T / BT) * ceil(D / BD),), columns first. Each program owns a BT x BD tile of x.
    Shapes: x [T, D]; row [T, K] int64; weight [T, K]; rows [S, D], written only where a choice lies.
    Floor: reads T D, writes at most K T D elements; 8 T K bytes of indices per ceil(D / BD).

    Example: K = 1, x = [[1, 2], [3, 4]], row = [[1], [-1]], weight = [[10], [1]] -> rows[1] = [10, 20], and
    nothing else is written.
    """
    num_columns = tl.cdiv(D, BD)
    t = (tl.program_id(0) // num_columns).to(tl.int64) * BT + tl.arange(0, BT)
    i_d = (tl.program_id(0) % num_columns) * BD + tl.arange(0, BD)
    m_t, m_d = t < T, i_d < D
    # [BT, BD]
    b_x = tl.load(x_ptr + t[:, None] * D + i_d[None, :], mask=m_t[:, None] & m_d[None, :], other=0.0)
    if weight_ptr is not None:
        b_x = b_x.to(tl.float32)
    for first in range(0, K, UNROLLED):
        for j in tl.static_range(UNROLLED if K > UNROLLED else K):
            k = first + j
            offset, m_kept = place_row(row_ptr, t * K + k, m_t & (t * 0 + k < K), D)
            b_row = b_x
            if weight_ptr is not None:
                b_weight = tl.load(weight_ptr + t * K + k, mask=m_kept, other=0.0)
                b_row = round_to(b_x * b_weight[:, None], rows_ptr.dtype.element_ty)
            tl.store(rows_ptr + offset[:, None] + i_d[None, :], b_row, mask=m_kept[:, None] & m_d[None, :])


@triton.jit
def combine_kernel(
    rows_ptr, row_ptr, weight_ptr, out_ptr, T, D,
    K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gather each token's rows and add them with their weights, k = 0 first, rounded once.

    Grid: (ceil(T / BT) * ceil(D / BD),), columns first. Each program owns a BT x BD tile of out.
    Shapes: rows [S, D]; row [T, K] int64; weight [T, K]; out [T, D].
    Floor: reads at most K T D elements, writes T D; 2 K T D FLOPs. Rows of dropped choices are not read.

    Example: K = 2, rows = [[1], [3], [4]], row = [[0, 2], [1, -1]], weight = [[2, 10], [100, 1000]] -> out =
    [[42], [300]].
    """
    num_columns = tl.cdiv(D, BD)
    t = (tl.program_id(0) // num_columns).to(tl.int64) * BT + tl.arange(0, BT)
    i_d = (tl.program_id(0) % num_columns) * BD + tl.arange(0, BD)
    m_t, m_d = t < T, i_d < D
    acc = tl.zeros([BT, BD], tl.float32)
    for first in range(0, K, UNROLLED):
        for j in tl.static_range(UNROLLED if K > UNROLLED else K):
            k = first + j
            offset, m_kept = place_row(row_ptr, t * K + k, m_t & (t * 0 + k < K), D)
            acc = add_row(acc, rows_ptr, weight_ptr, t * K + k, offset, m_kept, i_d, m_d)
    b_out = round_to(acc, out_ptr.dtype.element_ty)
    tl.store(out_ptr + t[:, None] * D + i_d[None, :], b_out, mask=m_t[:, None] & m_d[None, :])


@triton.jit
def combine_dweight_kernel(
    x_ptr, rows_ptr, row_ptr, dweight_ptr, T, D,
    K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The dot product of each token's row with the rows of its choices; zero where dropped.

    Grid: (ceil(T / BT) * K,), choices first, so that programs that run together share rows of x. Each
    program owns one choice of BT tokens.
    Shapes: x [T, D]; rows [S, D]; row [T, K] int64; dweight [T, K] in the dtype of the sums.
    Floor: reads T D elements of x (K times from L2) and at most K T D of the rows; 2 K T D FLOPs.

    Example: K = 2, x = [[1], [7]], rows = [[1], [3], [4]], row = [[0, 2], [1, -1]] -> dweight = [[1, 4],
    [21, 0]].
    """
    k = tl.program_id(0) % K
    t = (tl.program_id(0) // K).to(tl.int64) * BT + tl.arange(0, BT)
    offset, m_kept = place_row(row_ptr, t * K + k, t < T, D)
    acc = tl.zeros([BT, BD], tl.float32)
    for d in range(0, D, BD):
        i_d = d + tl.arange(0, BD)
        m = m_kept[:, None] & (i_d < D)[None, :]
        # [BT, BD]
        b_x = tl.load(x_ptr + t[:, None] * D + i_d[None, :], mask=m, other=0.0).to(acc.dtype)
        b_row = tl.load(rows_ptr + offset[:, None] + i_d[None, :], mask=m, other=0.0).to(acc.dtype)
        acc += b_x * b_row
    tl.store(dweight_ptr + t * K + k, tl.sum(acc, 1), mask=t < T)


@triton.jit
def _tile(count_ptr, R, F, BR: tl.constexpr, BD: tl.constexpr):
    """-> the program's rows and columns, and which elements are real.

    Example: R = 10, BR = 4, F = 8, BD = 8, count = 5: program 1 has row 4, program 2 nothing.
    """
    num_columns = tl.cdiv(F, BD)
    i_r = (tl.program_id(0) // num_columns).to(tl.int64) * BR + tl.arange(0, BR)
    i_d = (tl.program_id(0) % num_columns) * BD + tl.arange(0, BD)
    return i_r, i_d, (i_r < tl.minimum(tl.load(count_ptr), R))[:, None] & (i_d < F)[None, :]


@triton.jit
def activation_kernel(h_ptr, count_ptr, a_ptr, R, F, KIND: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """a = act(h) on the real rows.

    Grid: (ceil(R / BR) * ceil(F / BD),), columns first. Each program owns a BR x BD tile of a.
    Shapes: h [R, H], count [1] int64, a [R, F].
    Floor for N real rows: reads N H, writes N F elements; some 20 FLOPs each.
    Example: silu, R = 2, F = 1, count = [1], h = [[1], [NaN]] -> a = [[0.7311], not written].
    """
    i_r, i_d, m = _tile(count_ptr, R, F, BR, BD)
    if KIND == "swiglu":
        p_gate = h_ptr + i_r[:, None] * (2 * F) + i_d[None, :]
        gate = tl.load(p_gate, mask=m, other=0.0).to(tl.float32)
        a = silu(gate) * tl.load(p_gate + F, mask=m, other=0.0).to(tl.float32)
    else:
        a = activate(tl.load(h_ptr + i_r[:, None] * F + i_d[None, :], mask=m, other=0.0).to(tl.float32), KIND)
    a = round_to(a, a_ptr.dtype.element_ty)
    tl.store(a_ptr + i_r[:, None] * F + i_d[None, :], a, mask=m)


@triton.jit
def activation_backward_kernel(
    da_ptr, h_ptr, count_ptr, dh_ptr, R, F,
    KIND: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dh = act'(h) da on the real rows.

    Grid and tiles: as the forward's. Shapes: da [R, F]; h, dh [R, H]; count [1] int64.
    Floor for N real rows: reads N (F + H), writes N H elements; some 30 FLOPs each.
    Example: silu, h = 0, da = 2 -> dh = 1; swiglu, gate = 0, up = 4, da = 2 -> dgate = 4, dup = 0.
    """
    i_r, i_d, m = _tile(count_ptr, R, F, BR, BD)
    da = tl.load(da_ptr + i_r[:, None] * F + i_d[None, :], mask=m, other=0.0).to(tl.float32)
    H = 2 * F if KIND == "swiglu" else F
    p_h = h_ptr + i_r[:, None] * H + i_d[None, :]
    p_dh = dh_ptr + i_r[:, None] * H + i_d[None, :]
    h = tl.load(p_h, mask=m, other=0.0).to(tl.float32)
    if KIND == "swiglu":
        up = tl.load(p_h + F, mask=m, other=0.0).to(tl.float32)
        tl.store(p_dh + F, round_to(da * silu(h), dh_ptr.dtype.element_ty), mask=m)
        dh = da * up * dsilu(h)
    elif KIND == "gelu":
        dh = da * dgelu(h)
    else:
        dh = da * dsilu(h)
    tl.store(p_dh, round_to(dh, dh_ptr.dtype.element_ty), mask=m)


def _tile_of(width: int) -> dict[str, int]:
    """Tokens and columns of a program's tile of [T, width]."""
    columns = min(1024, triton.next_power_of_2(max(1, width)))
    return {"BT": min(64, VALUES // columns), "BD": columns}


def _check(name: str, values: Tensor, row_TK: Tensor, weight_TK: Tensor | None = None) -> None:
    check_tensor(name, values, shape=(None, None), dtype=DTYPES)
    num_tokens, device = len(values) if name == "x_TD" else None, values.device
    check_tensor("row_TK", row_TK, shape=(num_tokens, None), dtype=torch.int64, device=device)
    if weight_TK is not None:
        check_tensor("weight_TK", weight_TK, shape=row_TK.shape, dtype=torch.float32, device=device)


def _move_rows(kernel: Any, row_TK: Tensor, weight_TK: Tensor | None, **operands: Tensor) -> None:
    """Launch the permute or the combine kernel. operands: x and rows, or rows and out."""
    (num_tokens, top_k), width = row_TK.shape, operands["rows_ptr"].shape[1]
    tile = _tile_of(width)
    grid = triton.cdiv(num_tokens, tile["BT"]) * triton.cdiv(width, tile["BD"])
    launch(
        kernel, (grid,), **operands, row_ptr=row_TK, weight_ptr=weight_TK,
        T=num_tokens, D=width, K=top_k, **tile, num_warps=WARPS, **UNFUSED,
    )  # fmt: skip


def permute(x_TD: Tensor, row_TK: Tensor, weight_TK: Tensor | None, num_rows: int) -> Tensor:
    """rows[row[t, k]] = x[t] * weight[t, k], where kept.

    Args: x_TD: float32, bfloat16 or float16; row_TK: int64, negative where dropped, no two alike, all below
        num_rows; weight_TK: float32, None means 1. num_rows: how many rows to make.
    Returns: [num_rows, D]; rows without a choice are not written.
    """
    _check("x_TD", x_TD, row_TK, weight_TK)
    rows_SD = x_TD.new_empty(num_rows, x_TD.shape[1])
    if x_TD.numel() and num_rows:
        _move_rows(permute_kernel, row_TK, weight_TK, x_ptr=x_TD, rows_ptr=rows_SD)
    return rows_SD


def combine(rows_SD: Tensor, row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    """out[t] = sum_k weight[t, k] * rows[row[t, k]], over the kept choices.

    Args: as of `permute`. Returns: [T, D] in the dtype of the rows, rounded once.
    """
    _check("rows_SD", rows_SD, row_TK, weight_TK)
    out_TD = rows_SD.new_empty(row_TK.shape[0], rows_SD.shape[1])
    if out_TD.numel():
        _move_rows(combine_kernel, row_TK, weight_TK, rows_ptr=rows_SD, out_ptr=out_TD)
    return out_TD


def combine_dweight(x_TD: Tensor, rows_SD: Tensor, row_TK: Tensor) -> Tensor:
    """dweight[t, k] = x[t] . rows[row[t, k]], zero where dropped: float32 [T, K].

    In combine x is the gradient of its output; in permute the rows are.
    """
    _check("x_TD", x_TD, row_TK)
    (num_tokens, top_k), width = row_TK.shape, x_TD.shape[1]
    check_tensor("rows_SD", rows_SD, shape=(None, width), dtype=x_TD.dtype, device=x_TD.device)
    dweight_TK = x_TD.new_empty(num_tokens, top_k, dtype=torch.float32)
    if dweight_TK.numel():
        tile = _tile_of(width)
        launch(
            combine_dweight_kernel, (triton.cdiv(num_tokens, tile["BT"]) * top_k,), x_ptr=x_TD,
            rows_ptr=rows_SD, row_ptr=row_TK, dweight_ptr=dweight_TK, T=num_tokens, D=width, K=top_k,
            **tile, num_warps=WARPS, **UNFUSED,
        )  # fmt: skip
    return dweight_TK


def activation(h_RH: Tensor, count: Tensor, kind: str) -> Tensor:
    """-> [R, F]: the activation of the real rows; the others are not written.

    Args: h: float32, bfloat16 or float16; count: int64 [1]. kind: "gelu", "silu" or "swiglu".
    """
    hidden = _check_activation(h_RH, count, kind)
    a_RF = h_RH.new_empty(len(h_RH), hidden)
    _activate(activation_kernel, a_RF, kind, h_ptr=h_RH, count_ptr=count, a_ptr=a_RF)
    return a_RF


def activation_backward(da_RF: Tensor, h_RH: Tensor, count: Tensor, kind: str) -> Tensor:
    """-> [R, H]: the gradient of h on the real rows; the others are not written.

    Args: da_RF: gradient of the output, in the dtype of h; the others as of `activation`.
    """
    hidden = _check_activation(h_RH, count, kind)
    check_tensor("da_RF", da_RF, shape=(len(h_RH), hidden), dtype=h_RH.dtype, device=h_RH.device)
    dh_RH = torch.empty_like(h_RH)
    _activate(
        activation_backward_kernel, da_RF, kind, da_ptr=da_RF, h_ptr=h_RH, count_ptr=count, dh_ptr=dh_RH
    )
    return dh_RH


def _check_activation(h_RH: Tensor, count: Tensor, kind: str) -> int:
    """-> F."""
    check_activation(kind)
    check_tensor("h_RH", h_RH, shape=(None, None), dtype=DTYPES)
    check_tensor("count", count, shape=(1,), dtype=torch.int64, device=h_RH.device)
    halves = 2 if kind == "swiglu" else 1
    if h_RH.shape[1] % halves:
        raise UserError(
            "width of h_RH", got=h_RH.shape[1], expected="an even one", do="swiglu takes two halves"
        )
    return h_RH.shape[1] // halves


def _activate(kernel: Any, a_RF: Tensor, kind: str, **pointers: Tensor) -> None:
    """Over the tiles of [R, F]; a_RF has that shape, and the dtype."""
    num_rows, hidden = a_RF.shape
    if not a_RF.numel():
        return
    columns = min(1024, triton.next_power_of_2(hidden))
    rows = VALUES // columns
    programs = triton.cdiv(num_rows, rows) * triton.cdiv(hidden, columns)
    launch(
        kernel, (programs,), **pointers, R=num_rows, F=hidden, KIND=kind,
        BR=rows, BD=columns, num_warps=WARPS, **UNFUSED,
    )  # fmt: skip
