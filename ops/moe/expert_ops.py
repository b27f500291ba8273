"""Computation of experts: grouped GEMMs, each expert's rows times its weight, and the activation between.

    L  experts here      R  rows received, by expert (`ops.comm.all_to_all`), with counts [W, L]
    A  input width       B  output width
    F  hidden width (gated: input is [gate | up], 2F wide; interleaved: gate, up, gate, ...)

A grouped GEMM: 2 * R * A * B FLOPs for each of forward, dX, dW. dX and dW are separate ops because a
scheduler can only move what it can tell apart (Lancet, section 4).

torch's `grouped_mm` computes them where it takes the operands: on a GPU bfloat16, with the counts read on the
device (sm_90 and sm_100; elsewhere its fallback copies them to the host). Everything else runs as a GEMM for
each expert, for which the host needs the counts: on a GPU it waits for them.

Activations:

    swiglu            silu(gate) * up
    clamped-swiglu    gate' * sigmoid(1.702 gate') * (up' + 1),  gate' = min(gate, 7), up' = clamp(up, -7, 7)
                      (GPT-OSS; in plain torch on every device)
    interleaved-clamped-swiglu    the same

Others are expressions: functions of rows, [R, H] -> [R, F], that a converted model brings along.
They are differentiated by autograd, in plain torch on every device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from lancet_kernels.kernels.config import ACTIVATIONS, GATED, INTERLEAVED
from lancet_kernels.ops.base import op
from lancet_kernels.ops.comm.all_to_all import group_ends
from lancet_kernels.ops.moe.dispatch import runs_in_kernels

SLOPE, CLAMP = 1.702, 7.0
"""Constants of the clamped activations."""
Expression = Callable[[Tensor], Tensor]
EXPRESSIONS: dict[str, Expression] = {}
"""Activations that are not built in. Equal names stand for equal functions, on all ranks."""
_BLOCK = 1024
"""Rows that are widened to float32 at a time."""


def _has_fast_path(*operands: Tensor) -> bool:
    """Does torch's grouped_mm take them? Rows of a multiple of 16 bytes; bf16 on a GPU since sm_80, on a CPU
    also float32 and float16 (torch 2.11 to 2.13)."""
    device = operands[0].device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return all(
        t.dtype in ((torch.bfloat16,) if t.is_cuda else (torch.float32, torch.bfloat16, torch.float16))
        and all(n * t.element_size() % 16 == 0 for n in t.shape[1:])
        and t.numel() > 0
        for t in operands
    )


def waits_for_counts(*operands: Tensor) -> bool:
    """Would a grouped GEMM of these make the host wait for a GPU? Only matrices count."""
    matrices = [t for t in operands if t.is_floating_point() and t.dim() > 1]
    device = matrices[0].device
    reads_counts = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)
    are_supported = all(t.dtype == torch.bfloat16 and all(n % 8 == 0 for n in t.shape[1:]) for t in matrices)
    return not (reads_counts and are_supported)


def _for_fast_path(tensor: Tensor) -> Tensor:
    """The tensor itself if grouped_mm takes its strides, else a contiguous copy.

    It takes matrices whose rows (or columns) are dense and 16 bytes apart, or a multiple of that. A slice
    of a wider weight need not be so.
    """
    rows, columns = tensor.shape[-2:]
    row_stride, column_stride = tensor.stride()[-2:]
    unit = 16 // tensor.element_size()
    by_row = column_stride == 1 and row_stride >= columns and row_stride % unit == 0
    by_column = row_stride == 1 and column_stride >= rows and column_stride % unit == 0
    aligned = tensor.data_ptr() % 16 == 0 and (tensor.dim() == 2 or tensor.stride(0) % unit == 0)
    if aligned and (by_row or by_column):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def is_by_column(weight_LAB: Tensor) -> bool:
    """Is each matrix stored by columns: a transposed view of what torch.nn.Linear would have?"""
    _, rows, columns = weight_LAB.shape
    return weight_LAB.stride() == (rows * columns, 1, rows) and not weight_LAB.is_contiguous()


def _rows_times_weights(x_RA: Tensor, weight_LAB: Tensor, count_WL: Tensor) -> Tensor:
    """-> [R, B]: each expert's rows times its weight."""
    if _has_fast_path(x_RA, weight_LAB):
        x_RA, weight_LAB = _for_fast_path(x_RA), _for_fast_path(weight_LAB)
        return torch.nn.functional.grouped_mm(x_RA, weight_LAB, offs=group_ends(count_WL).int())
    y_RB = x_RA.new_empty(x_RA.shape[0], weight_LAB.shape[2])
    for weight_AB, x_GA, y_GB in zip(
        weight_LAB, _groups(x_RA, count_WL), _groups(y_RB, count_WL), strict=True
    ):
        torch.mm(x_GA, weight_AB, out=y_GB)
    return y_RB


def _groups(rows: Tensor, count_WL: Tensor) -> list[Tensor]:
    """Views of each expert's rows."""
    return [rows[begin:end] for begin, end in pairwise([0, *group_ends(count_WL).tolist()])]


@op("lancet::grouped_gemm")
def grouped_gemm(x_RA: Tensor, count_WL: Tensor, weight_LAB: Tensor, bias_LB: Tensor | None) -> Tensor:
    """y[r] = x[r] @ weight[l] (+ bias[l]) for the rows r of expert l. -> [R, B].

    Args: count_WL int64: rows that rank w sent for expert l; x and weight of one dtype.
    """
    y_RB = _rows_times_weights(x_RA, weight_LAB, count_WL)
    if bias_LB is None:
        return y_RB
    if y_RB.is_cuda:
        return y_RB.add_(bias_LB[_experts_of_rows(y_RB, count_WL).clamp_(max=len(bias_LB) - 1)])
    for bias_B, y_GB in zip(bias_LB, _groups(y_RB, count_WL), strict=True):
        y_GB += bias_B
    return y_RB


def _experts_of_rows(rows: Tensor, count_WL: Tensor) -> Tensor:
    """-> [R] int64: the expert of each row, L for rows that are not real; without a host sync."""
    row_R = torch.arange(len(rows), device=rows.device)
    return torch.bucketize(row_R, group_ends(count_WL), right=True)


@grouped_gemm.register_fake
def _(x_RA, count_WL, weight_LAB, bias_LB):
    return x_RA.new_empty(x_RA.shape[0], weight_LAB.shape[2])


@op("lancet::grouped_gemm_dx")
def grouped_gemm_dx(dy_RB: Tensor, count_WL: Tensor, weight_LAB: Tensor) -> Tensor:
    """dx[r] = dy[r] @ weight[l]^T for the rows r of expert l. -> [R, A]."""
    return _rows_times_weights(dy_RB, weight_LAB.transpose(1, 2), count_WL)


@grouped_gemm_dx.register_fake
def _(dy_RB, count_WL, weight_LAB):
    return dy_RB.new_empty(dy_RB.shape[0], weight_LAB.shape[1])


@op("lancet::grouped_gemm_dw")
def grouped_gemm_dw(x_RA: Tensor, dy_RB: Tensor, count_WL: Tensor, by_column: bool = False) -> Tensor:
    """dw[l] = x^T dy over the rows of expert l. -> [L, A, B], zero for an expert that got no row.

    Args: by_column: each [A, B] by columns in memory, as torch.nn.Linear has the gradient of its weight.
    """
    if by_column:
        return grouped_gemm_dw.function(dy_RB, x_RA, count_WL).transpose(1, 2)
    if _has_fast_path(x_RA, dy_RB):
        x_RA, dy_RB = _for_fast_path(x_RA), _for_fast_path(dy_RB)
        dw_LAB = torch.nn.functional.grouped_mm(x_RA.T, dy_RB, offs=group_ends(count_WL).int())
        # An empty group may leave its part of the output unwritten: on a GPU masked without a host sync, on a
        # CPU without a pass over all of it.
        empty_L = count_WL.sum(0) == 0
        if dw_LAB.is_cuda:
            return dw_LAB.masked_fill_(empty_L[:, None, None], 0)
        for expert in empty_L.nonzero():
            dw_LAB[expert] = 0
        return dw_LAB
    dw_LAB = x_RA.new_empty(count_WL.shape[1], x_RA.shape[1], dy_RB.shape[1])
    for dw_AB, x_GA, dy_GB in zip(dw_LAB, _groups(x_RA, count_WL), _groups(dy_RB, count_WL), strict=True):
        torch.mm(x_GA.T, dy_GB, out=dw_AB)
    return dw_LAB


@grouped_gemm_dw.register_fake
def _(x_RA, dy_RB, count_WL, by_column=False):
    if by_column:
        return x_RA.new_empty(count_WL.shape[1], dy_RB.shape[1], x_RA.shape[1]).transpose(1, 2)
    return x_RA.new_empty(count_WL.shape[1], x_RA.shape[1], dy_RB.shape[1])


@op("lancet::grouped_gemm_dbias")
def grouped_gemm_dbias(dy_RB: Tensor, count_WL: Tensor) -> Tensor:
    """dbias[l] = sum of dy over the rows of expert l, in at least float32, rounded once. -> [L, B]."""
    dtype = torch.promote_types(dy_RB.dtype, torch.float32)
    if dy_RB.is_cuda:
        sums = dy_RB.new_zeros(count_WL.shape[1] + 1, dy_RB.shape[1], dtype=dtype)
        return sums.index_add_(0, _experts_of_rows(dy_RB, count_WL), dy_RB.to(dtype))[:-1].to(dy_RB.dtype)
    dbias_LB = dy_RB.new_empty(count_WL.shape[1], dy_RB.shape[1])
    for dbias_B, dy_GB in zip(dbias_LB, _groups(dy_RB, count_WL), strict=True):
        dbias_B.copy_(dy_GB.sum(0, dtype=dtype))
    return dbias_LB


@grouped_gemm_dbias.register_fake
def _(dy_RB, count_WL):
    return dy_RB.new_empty(count_WL.shape[1], dy_RB.shape[1])


def _save_for_gemms(ctx, inputs, output) -> None:
    x_RA, count_WL, weight_LAB, _ = inputs
    needs_dx, _, needs_dw = ctx.needs_input_grad[:3]
    ctx.save_for_backward(x_RA if needs_dw else None, count_WL, weight_LAB if needs_dx else None)
    ctx.by_column = is_by_column(weight_LAB)


def _gemm_backward(ctx, dy_RB):
    x_RA, count_WL, weight_LAB = ctx.saved_tensors
    needs_dx, _, needs_dw, needs_dbias = ctx.needs_input_grad[:4]
    dx = grouped_gemm_dx(dy_RB, count_WL, weight_LAB) if needs_dx else None
    by_column = (True,) if ctx.by_column else ()
    dw = grouped_gemm_dw(x_RA, dy_RB, count_WL, *by_column) if needs_dw else None
    dbias = grouped_gemm_dbias(dy_RB, count_WL) if needs_dbias else None
    return dx, None, dw, dbias


grouped_gemm.register_autograd(_gemm_backward, setup_context=_save_for_gemms)


def input_width(kind: str, hidden_width: int) -> int:
    """The width of the activation's input, for F outputs."""
    return 2 * hidden_width if kind in GATED else hidden_width


def _gate_and_up(h: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Views of the input of a gated activation."""
    if kind == INTERLEAVED:
        return h[..., ::2], h[..., 1::2]
    gate, up = h.chunk(2, -1)
    return gate, up


def activate(h: Tensor, kind: str) -> Tensor:
    """The activation in plain torch, differentiable: gelu (exact, erf), silu, a gated one, an expression."""
    if kind in EXPRESSIONS:
        return EXPRESSIONS[kind](h)
    if kind == "gelu":
        return torch.nn.functional.gelu(h)
    if kind == "silu":
        return torch.nn.functional.silu(h)
    gate, up = _gate_and_up(h, kind)
    if kind == "swiglu":
        return torch.nn.functional.silu(gate) * up
    gate = gate.clamp(max=CLAMP)
    return gate * torch.sigmoid(SLOPE * gate) * (up.clamp(-CLAMP, CLAMP) + 1)


def _activate_backward_into(dh: Tensor, da: Tensor, h: Tensor, kind: str) -> None:
    """Write the gradient of the input, in the dtype of the operands, into `dh`."""
    if kind == "gelu":
        torch.ops.aten.gelu_backward.grad_input(da, h, grad_input=dh)
    elif kind == "silu":
        torch.ops.aten.silu_backward.grad_input(da, h, grad_input=dh)
    else:
        (gate, up), (dgate, dup) = _gate_and_up(h, kind), _gate_and_up(dh, kind)
        if kind == "swiglu":
            torch.mul(da, torch.nn.functional.silu(gate), out=dup)
            torch.ops.aten.silu_backward.grad_input(da * up, gate, grad_input=dgate)
            return
        clamped = gate.clamp(max=CLAMP)
        open_share = torch.sigmoid(SLOPE * clamped)
        slope = open_share * (1 + SLOPE * clamped * (1 - open_share)) * (gate <= CLAMP)
        torch.mul(da * slope, up.clamp(-CLAMP, CLAMP) + 1, out=dgate)
        torch.mul(da * clamped * open_share, up.abs() <= CLAMP, out=dup)


def _activate_backward(da: Tensor, h: Tensor, kind: str) -> Tensor:
    dh = torch.empty_like(h)
    _activate_backward_into(dh, da, h, kind)
    return dh


@op("lancet::expert_activation")
def expert_activation(h_RF: Tensor, count_WL: Tensor, kind: str) -> Tensor:
    """-> [R, F]: the activation of all rows.

    Args: count_WL: read on a GPU, where there may be more rows than real ones. kind: of ALL_ACTIVATIONS or
        EXPRESSIONS.
    """
    if runs_in_kernels(h_RF) and kind in ACTIVATIONS:
        from lancet_kernels.kernels.rows import activation

        return activation(h_RF.contiguous(), count_WL.sum().view(1), kind)
    h_RF = h_RF.contiguous()
    if kind not in GATED:
        return activate(h_RF, kind).contiguous()
    gate, up = h_RF.chunk(2, -1)
    dtype = torch.promote_types(h_RF.dtype, torch.float32)
    if dtype == h_RF.dtype:
        if kind != "swiglu":
            return activate(h_RF, kind)
        return torch.nn.functional.silu(gate).mul_(up)
    return _in_blocks(lambda h: activate(h.to(dtype), kind), h_RF.new_empty(len(h_RF), gate.shape[1]), h_RF)


@expert_activation.register_fake
def _(h_RF, count_WL, kind):
    width = h_RF.shape[1] // 2 if kind in GATED else h_RF.shape[1]
    if kind in EXPRESSIONS:
        width = EXPRESSIONS[kind](h_RF.new_empty(1, h_RF.shape[1])).shape[1]
    return h_RF.new_empty(h_RF.shape[0], width)


def _in_blocks(function: Callable[..., Tensor], out: Tensor, *operands: Tensor) -> Tensor:
    """out[r] = function(operands[r]), some rows at a time."""
    for begin in range(0, out.shape[0], _BLOCK):
        rows = slice(begin, begin + _BLOCK)
        out[rows] = function(*(operand[rows] for operand in operands))
    return out


def _differentiated(da_RF: Tensor, h_RF: Tensor, expression: Expression) -> Tensor:
    with _recording():
        h_RF = h_RF.detach().requires_grad_()
        (dh_RF,) = torch.autograd.grad(expression(h_RF), h_RF, da_RF)
    return dh_RF.contiguous()


@contextmanager
def _recording() -> Iterator[None]:
    """Let autograd record inside an op, which torch runs below it (private API, alike in 2.11 to 2.13)."""
    keys = torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView
    excluded = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in keys]
    try:
        for key in keys:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        with torch.enable_grad():
            yield
    finally:
        for key, before in zip(keys, excluded, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, before)


@op("lancet::expert_activation_backward", like="h_RF")
def expert_activation_backward(da_RF: Tensor, h_RF: Tensor, count_WL: Tensor, kind: str) -> Tensor:
    """-> gradient of h, shaped like h; computed in at least float32, rounded once."""
    if runs_in_kernels(h_RF) and kind in ACTIVATIONS:
        from lancet_kernels.kernels.rows import activation_backward

        return activation_backward(da_RF.contiguous(), h_RF.contiguous(), count_WL.sum().view(1), kind)
    if kind in EXPRESSIONS:
        return _differentiated(da_RF, h_RF, EXPRESSIONS[kind])
    dtype = torch.promote_types(h_RF.dtype, torch.float32)
    dh_RF = torch.empty_like(h_RF, memory_format=torch.contiguous_format)
    if dtype == h_RF.dtype:
        _activate_backward_into(dh_RF, da_RF, h_RF, kind)
        return dh_RF
    return _in_blocks(lambda da, h: _activate_backward(da.to(dtype), h.to(dtype), kind), dh_RF, da_RF, h_RF)


def _save_for_activation(ctx, inputs, output) -> None:
    h_RF, count_WL, ctx.kind = inputs
    ctx.save_for_backward(h_RF, count_WL)


def _activation_backward(ctx, da_RF):
    h_RF, count_WL = ctx.saved_tensors
    return expert_activation_backward(da_RF, h_RF, count_WL, ctx.kind), None, None


expert_activation.register_autograd(_activation_backward, setup_context=_save_for_activation)
