"""Torch ops of the MoE layer (routing, dispatch, all-to-all, experts, combine), and of PrimePar's linear.

One file per op, in folders; each is `torch.ops.lancet.<name>` with a fake and an autograd formula. Tests
compare it with a plain reference (`naive_*`).
"""

from lancet_kernels.ops import square_linear
from lancet_kernels.ops.comm import collectives, redistribute
from lancet_kernels.ops.comm.all_to_all import all_to_all, exchange_counts, start_all_to_all
from lancet_kernels.ops.moe.dispatch import (
    combine,
    combine_dweight,
    dispatch,
    kept_counts,
    merge_parts,
    merge_rows,
    part_rows,
    send_rows,
    window_counts,
    window_rows,
)
from lancet_kernels.ops.moe.expert_ops import (
    expert_activation,
    expert_activation_backward,
    grouped_gemm,
    grouped_gemm_dbias,
    grouped_gemm_dw,
    grouped_gemm_dx,
)
from lancet_kernels.ops.moe.router import (
    MoELosses,
    RoutingSums,
    assign_slots,
    gate,
    moe_losses,
    router_logits,
    routing_sums,
    sum_over_ranks,
)
from lancet_kernels.ops.random import dropout, token_index
