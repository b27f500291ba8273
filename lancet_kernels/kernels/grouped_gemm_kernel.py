"""Grouped GEMM over compact rows: every expert's rows times its weight, dX and dW, each in one launch.

    R  rows, by expert      L  experts here      A  input width, B  output width of the weights [L, A, B]

Expert l has the rows offset[l] to offset[l + 1]; offsets [L + 1] stay on the device, so the host need not
know them, and launches can be captured in CUDA graphs. Rows from offset[L] on are never written, and their
contents do not affect results.

A persistent kernel with one or a few programs per SM: program p computes tiles p, p + P, p + 2P, ... of the
real rows; an expert without rows has no tiles. `grouped_tiles` has the order of the tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lancet_kernels.kernels.activation_names import check_activation
from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.gemm_operands import (
    EPILOGUES,
    Launch,
    check_groups,
    check_operand,
    most_tiles,
)
from lancet_kernels.kernels.gemm_tile import (
    add_outer_products,
    dgrad_tile,
    forward_tile,
    store_weight_gradient,
)
from lancet_kernels.kernels.grouped_tiles import groups, in_bands, locate
from lancet_kernels.kernels.kernel_launch import launch


@triton.jit
def grouped_gemm_forward_kernel(
    x_ptr, offset_ptr, w_ptr, bias_ptr, pre_ptr, out_ptr, R, L, K, N,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE_PRE: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_M: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out = act(x @ weight[expert of the row] + bias), one launch for all experts.

    Grid: (programs,), resident ones; each walks over every programs-th tile of [BM, BN].
    x [R, K], w [L, K, N] (swiglu: [L, K, 2N] = gate | up), bias [L, N or 2N], pre as wide, out [R, N].
    GROUPS is a power of two >= L. An absent bias or pre is any pointer; it is not used.

    Floor for R real rows: 2 * R * K * N FLOPs (swiglu twice that); R * K + L * K * N + R * N elements moved.

    Example: L = 2, offset = [0, 1, 3], K = N = 1: x = [[3], [1], [2]], w = [[[10]], [[100]]] -> out = [[30],
    [100], [200]].
    """
    NW = 2 * N if ACT == "swiglu" else N
    num_n = tl.cdiv(N, BN)
    rows_L, first_L, end_L = groups(offset_ptr, L, R, GROUPS, BM)
    for tile in range(tl.program_id(0), tl.max(end_L, 0) * num_n, tl.num_programs(0)):
        expert, first, rows, m0, i_n = locate(tile, rows_L, first_L, end_L, num_n, GROUPS, GROUP_M, BM)
        forward_tile(
            x_ptr + first * K, w_ptr + expert.to(tl.int64) * K * NW, bias_ptr + expert * NW,
            pre_ptr + first * NW, out_ptr + first * N,
            rows, m0, i_n * BN, K, N, ACT, HAS_BIAS, SAVE_PRE, UPCAST, TMA, BM, BN, BK,
        )  # fmt: skip


@triton.jit
def grouped_gemm_dx_kernel(
    dy_ptr, offset_ptr, w_ptr, out_ptr, R, L, K, N, GROUPS: tl.constexpr, GROUP_M: tl.constexpr,
    UPCAST: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out = dy @ weight[expert of the row]^T, one launch for all experts.

    Grid: (programs,), resident ones; each walks over every programs-th tile of [BM, BN].
    dy [R, K], w [L, N, K], out [R, N].

    Floor for R real rows: 2 * R * K * N FLOPs; R * K + L * K * N + R * N elements moved.

    Example: L = 1, offset = [0, 1], K = 1, N = 2: dy = [[3]], w = [[[10], [20]]] -> [[30, 60]].
    """
    num_n = tl.cdiv(N, BN)
    rows_L, first_L, end_L = groups(offset_ptr, L, R, GROUPS, BM)
    for tile in range(tl.program_id(0), tl.max(end_L, 0) * num_n, tl.num_programs(0)):
        expert, first, rows, m0, i_n = locate(tile, rows_L, first_L, end_L, num_n, GROUPS, GROUP_M, BM)
        dgrad_tile(
            dy_ptr + first * K, w_ptr + expert.to(tl.int64) * K * N, out_ptr + first * N,
            rows, m0, i_n * BN, K, N, UPCAST, TMA, BM, BN, BK,
        )  # fmt: skip


@triton.jit
def grouped_gemm_dw_kernel(
    x_ptr, dy_ptr, offset_ptr, dw_ptr, R, L, A, B, GROUP_M: tl.constexpr,
    UPCAST: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dw[l] = sum over expert l's rows of x^T dy; zero for an expert without rows.

    Grid: (programs,), resident ones; each walks over every programs-th of the L * cdiv(A, BM) * cdiv(B, BN)
    tiles. x [R, A], dy [R, B], dw [L, A, B].

    Floor for R real rows: 2 * R * A * B FLOPs; R * (A + B) + L * A * B elements moved.

    Example: L = 1, offset = [0, 2], A = B = 1: x = [[2], [3]]; dy = [[10], [100]] -> [[[320]]].
    """
    num_m = tl.cdiv(A, BM)
    num_n = tl.cdiv(B, BN)
    for tile in range(tl.program_id(0), L * num_m * num_n, tl.num_programs(0)):
        expert = tile // (num_m * num_n)
        i_m, i_n = in_bands(tile % (num_m * num_n), num_m, num_n, GROUP_M)
        m0 = i_m * BM
        n0 = i_n * BN
        first = tl.load(offset_ptr + expert)
        rows = (tl.minimum(tl.load(offset_ptr + expert + 1), R) - first).to(tl.int32)
        acc = add_outer_products(
            tl.zeros((BM, BN), tl.float32), x_ptr + first * A, dy_ptr + first * B, rows, m0, n0, A, B,
            UPCAST, TMA, BM, BN, BK,
        )  # fmt: skip
        store_weight_gradient(dw_ptr + tl.cast(expert, tl.int64) * A * B, acc, m0, n0, A, B, BM, BN)


def grouped_gemm_forward(
    x: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    out: Tensor | None = None,
    pre: Tensor | None = None,
    config: GemmConfig | None = None,
    num_programs: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """act(x @ weight[expert] + bias[expert]) on the real rows. -> (out, the value before the activation).

    Args:
        x: [R, A]; bf16, fp16 or fp32, like all the others; no gaps.
        offset: int64 [L + 1], first row of each expert, and the end of the last.
        weight: [L, A, B], for swiglu [L, A, 2B] = gate | up; bias: [L, B] or [L, 2B].
        activation: "none", "gelu" (exact), "silu" or "swiglu".
        out, pre: where to write, shaped like x with B (pre of swiglu: 2B) columns; the value before the
            activation is stored only if there is a `pre`. Rows that belong to nobody are not changed.
        config: default_config if None. Its block_n is the width of each of swiglu's two accumulators.
        num_programs: how many walk over the tiles; None fills the GPU.

    Raises:
        UserError: shapes, dtypes, devices, gaps, an unknown activation, or a config that cannot run.
    """
    what = "grouped_gemm_forward"
    check_activation(activation, f"{what}: activation", EPILOGUES)
    halves = 2 if activation == "swiglu" else 1
    num_experts = check_groups(what, x, offset, weight)
    rows, (_, K, NW) = x.shape[0], weight.shape
    N = NW // halves
    check_operand(f"{what}: x", x, (rows, K), x)
    check_operand(f"{what}: weight", weight, (num_experts, K, N * halves), x)
    if bias is not None:
        check_operand(f"{what}: bias", bias, (num_experts, NW), x)
    out = check_operand(f"{what}: out", out, (rows, N), x)
    if pre is not None:
        check_operand(f"{what}: pre", pre, (rows, NW), x)
    if out.numel() == 0:
        return out, pre
    plan = Launch.of(what, config, rows // num_experts, N, K, (x, weight), halves)
    num_tiles = most_tiles(plan.config, rows, num_experts, N)
    launch(
        grouped_gemm_forward_kernel, plan.grid(num_tiles, num_programs),
        x_ptr=x, offset_ptr=offset, w_ptr=weight, bias_ptr=out if bias is None else bias,
        pre_ptr=out if pre is None else pre, out_ptr=out, R=rows, L=num_experts, K=K, N=N,
        ACT=activation, HAS_BIAS=bias is not None, SAVE_PRE=pre is not None,
        GROUPS=triton.next_power_of_2(num_experts), **plan.options(),
    )  # fmt: skip
    return out, pre


def grouped_gemm_dx(
    dy: Tensor, offset: Tensor, weight: Tensor, *, out: Tensor | None = None, config: GemmConfig | None = None
) -> Tensor:
    """dy @ weight[expert]^T on the real rows.

    Args:
        dy: [R, B]; offset, config: as for `grouped_gemm_forward`.
        weight: [L, A, B], as the forward has it.
        out: where to write, shaped like dy with A columns; a new one is not zeroed.

    Raises:
        UserError: as `grouped_gemm_forward`.
    """
    what = "grouped_gemm_dx"
    num_experts = check_groups(what, dy, offset, weight)
    rows, (_, N, K) = dy.shape[0], weight.shape
    check_operand(f"{what}: dy", dy, (rows, K), dy)
    check_operand(f"{what}: weight", weight, (num_experts, N, K), dy)
    out = check_operand(f"{what}: out", out, (rows, N), dy)
    if out.numel() == 0:
        return out
    plan = Launch.of(what, config, rows // num_experts, N, K, (dy, weight), 1)
    num_tiles = most_tiles(plan.config, rows, num_experts, N)
    launch(
        grouped_gemm_dx_kernel, plan.grid(num_tiles),
        dy_ptr=dy, offset_ptr=offset, w_ptr=weight, out_ptr=out, R=rows, L=num_experts, K=K, N=N,
        GROUPS=triton.next_power_of_2(num_experts), **plan.options(),
    )  # fmt: skip
    return out


def grouped_gemm_dw(
    x: Tensor, dy: Tensor, offset: Tensor, *, dw: Tensor | None = None, config: GemmConfig | None = None
) -> Tensor:
    """dw[l] = sum of x^T dy over expert l's real rows.

    Args:
        x: [R, A], dy: [R, B]; offset, config: as for `grouped_gemm_forward`.
        dw: where to write, [L, A, B]; every element is written.

    Raises:
        UserError: as `grouped_gemm_forward`.
    """
    what = "grouped_gemm_dw"
    num_experts = check_groups(what, x, offset)
    rows, A, B = *x.shape, dy.shape[-1]
    check_operand(f"{what}: x", x, (rows, A), x)
    check_operand(f"{what}: dy", dy, (rows, B), x)
    dw = check_operand(f"{what}: dw", dw, (num_experts, A, B), x)
    if dw.numel() == 0:
        return dw
    plan = Launch.of(what, config, A, B, rows // num_experts, (x, dy), 1)
    num_tiles = num_experts * triton.cdiv(A, plan.config.block_m) * triton.cdiv(B, plan.config.block_n)
    launch(
        grouped_gemm_dw_kernel, plan.grid(num_tiles),
        x_ptr=x, dy_ptr=dy, offset_ptr=offset, dw_ptr=dw, R=rows, L=num_experts, A=A, B=B,
        **plan.options(),
    )  # fmt: skip
    return dw
