"""Grouped GEMM over the real rows: each expert's rows times its weight; dX and dW as ops of their own.

    W  ranks, L experts here      A  input width       R  real rows (sum of counts)
    C  capacity                   B  output width

Work: 2 * R * A * B FLOPs for each of forward, dX, dW. Padding is never multiplied, and what it holds
does not matter. dX and dW are separate ops because a scheduler can only move what it can tell apart
(Lancet, section 4).

On a GPU the Triton kernels run (`lancet_kernels.kernels.grouped_gemm`): they read the counts where they are,
while torch's way below has to bring them to the host first.
"""

import torch
from torch import Tensor

from lancet_kernels.ops.kernel_path import runs_in_kernels
from lancet_kernels.ops.rows import Block, blocks, clear_padding, compact, expand, real_rows_by_expert


def naive_grouped_gemm(
    x_WLCA: Tensor, count_WL: Tensor, weight_LAB: Tensor, bias_LB: Tensor | None
) -> Tensor:
    """Reference, one row after the other."""
    ranks, local_experts, capacity, _ = x_WLCA.shape
    y_WLCB = x_WLCA.new_zeros(ranks, local_experts, capacity, weight_LAB.shape[2])
    for w in range(ranks):
        for e in range(local_experts):
            for c in range(int(count_WL[w, e])):
                row_B = x_WLCA[w, e, c] @ weight_LAB[e]
                y_WLCB[w, e, c] = row_B if bias_LB is None else row_B + bias_LB[e]
    return y_WLCB


def _has_fast_path(*operands: Tensor) -> bool:
    """torch's grouped_mm: bf16, rows of a multiple of 16 bytes (facts: torch 2.11 to 2.13)."""
    return all(t.dtype == torch.bfloat16 and t.shape[-1] % 8 == 0 for t in operands)


def _for_fast_path(weight_LAB: Tensor) -> Tensor:
    """The weight itself if grouped_mm takes its strides, else a contiguous copy.

    It takes matrices whose rows (or columns) are dense and 16 bytes apart, or a multiple of that. A slice
    of a wider weight need not be so.
    """
    _, rows, columns = weight_LAB.shape
    _, row_stride, column_stride = weight_LAB.stride()
    by_row = column_stride == 1 and row_stride >= columns and row_stride % 8 == 0
    by_column = row_stride == 1 and column_stride >= rows and column_stride % 8 == 0
    aligned = weight_LAB.stride(0) % 8 == 0 and weight_LAB.data_ptr() % 16 == 0
    if aligned and (by_row or by_column):
        return weight_LAB
    return weight_LAB.clone(memory_format=torch.contiguous_format)


def _group_bounds(count_WL: Tensor) -> list[int]:
    return [0, *count_WL.sum(0).cumsum(0).tolist()]


def _rows_times_weights(x_RA: Tensor, weight_LAB: Tensor, count_WL: Tensor) -> Tensor:
    """-> [R, B]: each expert's rows (R in expert order) times its weight."""
    if x_RA.shape[0] > 0 and _has_fast_path(x_RA, weight_LAB):
        end_L = count_WL.sum(0).cumsum(0).to(torch.int32)
        return torch.nn.functional.grouped_mm(x_RA, _for_fast_path(weight_LAB), offs=end_L)
    bounds = _group_bounds(count_WL)
    y_RB = x_RA.new_empty(x_RA.shape[0], weight_LAB.shape[2])
    for e, weight_AB in enumerate(weight_LAB):
        torch.mm(x_RA[bounds[e] : bounds[e + 1]], weight_AB, out=y_RB[bounds[e] : bounds[e + 1]])
    return y_RB


def _rows_times_rows(x_RA: Tensor, dy_RB: Tensor, count_WL: Tensor) -> Tensor:
    """-> [L, A, B]: x^T dy over each expert's rows, zero for an expert without rows."""
    if x_RA.shape[0] > 0 and _has_fast_path(x_RA, dy_RB):
        count_L = count_WL.sum(0)
        dw_LAB = torch.nn.functional.grouped_mm(x_RA.T, dy_RB, offs=count_L.cumsum(0).to(torch.int32))
        # An empty group leaves its part of the output unwritten.
        return dw_LAB.masked_fill_((count_L == 0)[:, None, None], 0)
    bounds = _group_bounds(count_WL)
    dw_LAB = x_RA.new_zeros(count_WL.shape[1], x_RA.shape[1], dy_RB.shape[1])
    for e, dw_AB in enumerate(dw_LAB):
        if bounds[e + 1] > bounds[e]:
            torch.mm(x_RA[bounds[e] : bounds[e + 1]].T, dy_RB[bounds[e] : bounds[e + 1]], out=dw_AB)
    return dw_LAB


def _forward_in_kernel(
    x_WLCA: Tensor, count_WL: Tensor, weight_LAB: Tensor, bias_LB: Tensor | None
) -> Tensor:
    from lancet_kernels.kernels.grouped_gemm import grouped_gemm_forward

    y_WLCB = x_WLCA.new_zeros(*x_WLCA.shape[:3], weight_LAB.shape[2])
    bias_LB = None if bias_LB is None else bias_LB.contiguous()
    grouped_gemm_forward(
        x_WLCA.contiguous(), count_WL.contiguous(), weight_LAB.contiguous(), bias_LB, out=y_WLCB
    )
    return y_WLCB


def _dx_in_kernel(dy_WLCB: Tensor, count_WL: Tensor, weight_LAB: Tensor) -> Tensor:
    from lancet_kernels.kernels.grouped_gemm import grouped_gemm_dx

    dx_WLCA = dy_WLCB.new_zeros(*dy_WLCB.shape[:3], weight_LAB.shape[1])
    return grouped_gemm_dx(dy_WLCB.contiguous(), count_WL.contiguous(), weight_LAB.contiguous(), out=dx_WLCA)


def _dw_in_kernel(x_WLCA: Tensor, dy_WLCB: Tensor, count_WL: Tensor) -> Tensor:
    from lancet_kernels.kernels.grouped_gemm import grouped_gemm_dw

    return grouped_gemm_dw(x_WLCA.contiguous(), dy_WLCB.contiguous(), count_WL.contiguous())[0]


def _masked_column_sums(dy_WLCB: Tensor, count_WL: Tensor) -> Tensor:
    """-> dbias [L, B] without the counts on the host, at the price of reading the padding."""
    slot_C = torch.arange(dy_WLCB.shape[2], device=dy_WLCB.device)
    real_WLC1 = (slot_C < count_WL[..., None])[..., None]
    return torch.where(real_WLC1, dy_WLCB, 0).sum((0, 2), dtype=torch.float32).to(dy_WLCB.dtype)


_LEAST_ROWS = 16
"""Blocks with fewer rows on average are put together for one larger product."""


def _blocks_in_place(x_WLCA: Tensor, other: Tensor, count_WL: Tensor) -> list[Block] | None:
    """The blocks, if it is best to multiply them where they lie; else None."""
    if x_WLCA.device.type != "cpu" or _has_fast_path(x_WLCA, other):
        return None
    found = blocks(count_WL)
    taken = [n for _, _, n in found if n]
    return found if sum(taken) >= _LEAST_ROWS * len(taken) else None


def _blocks_times_weights(
    x_WLCA: Tensor, weight_LAB: Tensor, of: list[Block], bias_LB: Tensor | None
) -> Tensor:
    """-> [W, L, C, B], zero where rows are not real."""
    y_WLCB = x_WLCA.new_empty(*x_WLCA.shape[:3], weight_LAB.shape[2])
    for w, e, n in of:
        if n and bias_LB is None:
            torch.mm(x_WLCA[w, e, :n], weight_LAB[e], out=y_WLCB[w, e, :n])
        elif n:
            torch.addmm(bias_LB[e], x_WLCA[w, e, :n], weight_LAB[e], out=y_WLCB[w, e, :n])
    return clear_padding(y_WLCB, of)


def _blocks_times_blocks(x_WLCA: Tensor, dy_WLCB: Tensor, of: list[Block]) -> Tensor:
    """-> [L, A, B], zero for an expert without rows."""
    dw_LAB = x_WLCA.new_empty(x_WLCA.shape[1], x_WLCA.shape[3], dy_WLCB.shape[3])
    begun = [False] * dw_LAB.shape[0]
    for w, e, n in of:
        if n and begun[e]:
            dw_LAB[e].addmm_(x_WLCA[w, e, :n].T, dy_WLCB[w, e, :n])
        elif n:
            torch.mm(x_WLCA[w, e, :n].T, dy_WLCB[w, e, :n], out=dw_LAB[e])
            begun[e] = True
    for e, has_rows in enumerate(begun):
        if not has_rows:
            dw_LAB[e].zero_()
    return dw_LAB


@torch.library.custom_op("lancet::grouped_gemm", mutates_args=())
def grouped_gemm(x_WLCA: Tensor, count_WL: Tensor, weight_LAB: Tensor, bias_LB: Tensor | None) -> Tensor:
    """y[w, l, c] = x[w, l, c] @ weight[l] (+ bias[l]) for c < counts[w, l]. -> [W, L, C, B].

    Args: count_WL int64; x and weight of one dtype.
    """
    if runs_in_kernels(x_WLCA):
        return _forward_in_kernel(x_WLCA, count_WL, weight_LAB, bias_LB)

    in_place = _blocks_in_place(x_WLCA, weight_LAB, count_WL)
    if in_place is not None:
        return _blocks_times_weights(x_WLCA, weight_LAB, in_place, bias_LB)
    row_R = real_rows_by_expert(count_WL, x_WLCA.shape[2])
    y_RB = _rows_times_weights(compact(x_WLCA, row_R), weight_LAB, count_WL)
    if bias_LB is not None:
        y_RB += bias_LB.repeat_interleave(count_WL.sum(0), dim=0, output_size=y_RB.shape[0])
    return expand(y_RB, row_R, x_WLCA.shape[:3])


@grouped_gemm.register_fake
def _(x_WLCA, count_WL, weight_LAB, bias_LB):
    return x_WLCA.new_empty(*x_WLCA.shape[:3], weight_LAB.shape[2])


@torch.library.custom_op("lancet::grouped_gemm_dx", mutates_args=())
def grouped_gemm_dx(dy_WLCB: Tensor, count_WL: Tensor, weight_LAB: Tensor) -> Tensor:
    """dx[w, l, c] = dy[w, l, c] @ weight[l]^T on the real rows. -> [W, L, C, A]."""
    if runs_in_kernels(dy_WLCB):
        return _dx_in_kernel(dy_WLCB, count_WL, weight_LAB)

    in_place = _blocks_in_place(dy_WLCB, weight_LAB, count_WL)
    if in_place is not None:
        return _blocks_times_weights(dy_WLCB, weight_LAB.transpose(1, 2), in_place, None)
    row_R = real_rows_by_expert(count_WL, dy_WLCB.shape[2])
    dx_RA = _rows_times_weights(compact(dy_WLCB, row_R), weight_LAB.transpose(1, 2), count_WL)
    return expand(dx_RA, row_R, dy_WLCB.shape[:3])


@grouped_gemm_dx.register_fake
def _(dy_WLCB, count_WL, weight_LAB):
    return dy_WLCB.new_empty(*dy_WLCB.shape[:3], weight_LAB.shape[1])


@torch.library.custom_op("lancet::grouped_gemm_dw", mutates_args=())
def grouped_gemm_dw(x_WLCA: Tensor, dy_WLCB: Tensor, count_WL: Tensor) -> Tensor:
    """dw[l] = sum over the real rows of x^T dy. -> [L, A, B], zero for an expert that got no row."""
    if runs_in_kernels(x_WLCA):
        return _dw_in_kernel(x_WLCA, dy_WLCB, count_WL)

    in_place = _blocks_in_place(x_WLCA, dy_WLCB, count_WL)
    if in_place is not None:
        return _blocks_times_blocks(x_WLCA, dy_WLCB, in_place)
    row_R = real_rows_by_expert(count_WL, x_WLCA.shape[2])
    return _rows_times_rows(compact(x_WLCA, row_R), compact(dy_WLCB, row_R), count_WL)


@grouped_gemm_dw.register_fake
def _(x_WLCA, dy_WLCB, count_WL):
    return x_WLCA.new_empty(x_WLCA.shape[1], x_WLCA.shape[3], dy_WLCB.shape[3])


@torch.library.custom_op("lancet::grouped_gemm_dbias", mutates_args=())
def grouped_gemm_dbias(dy_WLCB: Tensor, count_WL: Tensor) -> Tensor:
    """dbias[l] = sum over the real rows of dy, in at least float32, rounded once. -> [L, B]."""
    if runs_in_kernels(dy_WLCB):
        return _masked_column_sums(dy_WLCB, count_WL)
    row_R = real_rows_by_expert(count_WL, dy_WLCB.shape[2])
    dtype = torch.promote_types(dy_WLCB.dtype, torch.float32)
    dy_RB = compact(dy_WLCB, row_R).to(dtype)
    local_experts = count_WL.shape[1]
    expert_R = torch.arange(local_experts, device=dy_RB.device).repeat_interleave(
        count_WL.sum(0), output_size=dy_RB.shape[0]
    )
    dbias_LB = dy_RB.new_zeros(local_experts, dy_RB.shape[1]).index_add_(0, expert_R, dy_RB)
    return dbias_LB.to(dy_WLCB.dtype)


@grouped_gemm_dbias.register_fake
def _(dy_WLCB, count_WL):
    return dy_WLCB.new_empty(dy_WLCB.shape[1], dy_WLCB.shape[3])


def _setup_context(ctx, inputs, output) -> None:
    x_WLCA, count_WL, weight_LAB, _ = inputs
    needs_dx, _, needs_dw = ctx.needs_input_grad[:3]
    ctx.save_for_backward(x_WLCA if needs_dw else None, count_WL, weight_LAB if needs_dx else None)


def _backward(ctx, dy_WLCB):
    x_WLCA, count_WL, weight_LAB = ctx.saved_tensors
    needs_dx, _, needs_dw, needs_dbias = ctx.needs_input_grad[:4]
    ops = torch.ops.lancet
    dx = ops.grouped_gemm_dx(dy_WLCB, count_WL, weight_LAB) if needs_dx else None
    dw = ops.grouped_gemm_dw(x_WLCA, dy_WLCB, count_WL) if needs_dw else None
    dbias = ops.grouped_gemm_dbias(dy_WLCB, count_WL) if needs_dbias else None
    return dx, None, dw, dbias


grouped_gemm.register_autograd(_backward, setup_context=_setup_context)
