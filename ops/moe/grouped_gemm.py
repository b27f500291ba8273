"""Grouped GEMM: each expert's rows times its weight; dX and dW as ops of their own.

    L  experts here      R  rows received, by expert (`ops.comm.all_to_all`), as counts [W, L] say
    A  input width       B  output width

Work: 2 * R * A * B FLOPs for each of forward, dX, dW. dX and dW are separate ops because a scheduler can
only move what it can tell apart (Lancet, section 4).

torch's `grouped_mm` computes them where it takes the operands: on a GPU bfloat16, with the counts read where
they are (sm_90 and sm_100; on others its fallback asks for them). Everything else runs as a GEMM for each
expert, for which the host needs the counts: on a GPU it waits for them.
"""

from itertools import pairwise

import torch
from torch import Tensor

from lancet_kernels.ops.base import op
from lancet_kernels.ops.comm.all_to_all import group_ends


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
    """Would a grouped GEMM of these make the host wait for a GPU? What is no matrix does not matter."""
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
    """-> [R] int64: which expert has each row, L for rows that are not real; the host need not know."""
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
        # An empty group may leave its part of the output unwritten. A GPU is not asked which; a CPU does not
        # go through all that is written.
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


def _setup_context(ctx, inputs, output) -> None:
    x_RA, count_WL, weight_LAB, _ = inputs
    needs_dx, _, needs_dw = ctx.needs_input_grad[:3]
    ctx.save_for_backward(x_RA if needs_dw else None, count_WL, weight_LAB if needs_dx else None)
    ctx.by_column = is_by_column(weight_LAB)


def _backward(ctx, dy_RB):
    x_RA, count_WL, weight_LAB = ctx.saved_tensors
    needs_dx, _, needs_dw, needs_dbias = ctx.needs_input_grad[:4]
    dx = grouped_gemm_dx(dy_RB, count_WL, weight_LAB) if needs_dx else None
    by_column = (True,) if ctx.by_column else ()
    dw = grouped_gemm_dw(x_RA, dy_RB, count_WL, *by_column) if needs_dw else None
    dbias = grouped_gemm_dbias(dy_RB, count_WL) if needs_dbias else None
    return dx, None, dw, dbias


grouped_gemm.register_autograd(_backward, setup_context=_setup_context)
