"""The nonlinearity of the experts as a separate op on real rows, and its derivative.

    R  rows, of which the first `count` are real
    F  hidden width      H  width of the input: F, or 2F for swiglu, [gate | up]

    activation             a = act(h)             gelu (exact), silu, or swiglu: silu(gate) * up
    activation_backward    dh = act'(h) da

The count is read on the device, so the host need not know it. Rows that are not real are neither read nor
written. Computed in float32, rounded once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.activation_names import check_activation
from lancet_kernels.kernels.moe.permute import UNFUSED, round_to
from lancet_kernels.kernels.portable.gemm import activate, dgelu, dsilu, silu
from lancet_kernels.kernels.runtime import check_tensor, launch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A program's tile: 16 values a thread, so that a few loads of 16 bytes are in flight.
VALUES, WARPS = 2048, 4


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
def activation_kernel(
    h_ptr, count_ptr, a_ptr, R, F,
    KIND: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
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


def activation(h_RH: Tensor, count: Tensor, kind: str) -> Tensor:
    """-> [R, F]: the activation of the real rows; the others are not written.

    Args: h: float32, bfloat16 or float16; count: int64 [1]. kind: "gelu", "silu" or "swiglu".
    Raises: UserError for wrong dtypes, shapes, layouts or devices.
    """
    hidden = _check(h_RH, count, kind)
    a_RF = torch.empty(len(h_RH), hidden, dtype=h_RH.dtype, device=h_RH.device)
    _launch(activation_kernel, a_RF, kind, h_ptr=h_RH, count_ptr=count, a_ptr=a_RF)
    return a_RF


def activation_backward(da_RF: Tensor, h_RH: Tensor, count: Tensor, kind: str) -> Tensor:
    """-> [R, H]: the gradient of h on the real rows; the others are not written.

    Args: da_RF: gradient of the output, in the dtype of h; the others as of `activation`.
    Raises: UserError for wrong dtypes, shapes, layouts or devices.
    """
    hidden = _check(h_RH, count, kind)
    check_tensor("da_RF", da_RF, shape=(len(h_RH), hidden), dtype=h_RH.dtype, device=h_RH.device)
    dh_RH = torch.empty_like(h_RH)
    _launch(activation_backward_kernel, da_RF, kind, da_ptr=da_RF, h_ptr=h_RH, count_ptr=count, dh_ptr=dh_RH)
    return dh_RH


def _check(h_RH: Tensor, count: Tensor, kind: str) -> int:
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


def _launch(kernel: Any, a_RF: Tensor, kind: str, **pointers: Tensor) -> None:
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
