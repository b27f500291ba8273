"""Torch ops of the MoE layer (routing, dispatch, all-to-all, experts, combine), and of PrimePar's linear.

One file per op; each is `torch.ops.lancet.<name>` with a fake and an autograd formula, and stands beside
a plain reference (`naive_*`) that tests compare it with.
"""

from lancet_kernels.ops.all_reduce import all_reduce_bucket, start_all_reduce
from lancet_kernels.ops.all_to_all import all_to_all, exchange_counts, start_all_to_all
from lancet_kernels.ops.combine import combine, combine_dweight
from lancet_kernels.ops.dispatch import dispatch
from lancet_kernels.ops.dropout import dropout
from lancet_kernels.ops.expert_activation import expert_activation, expert_activation_backward
from lancet_kernels.ops.gate import gate, gate_backward
from lancet_kernels.ops.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_dbias,
    grouped_gemm_dw,
    grouped_gemm_dx,
)
from lancet_kernels.ops.kept_counts import kept_counts
from lancet_kernels.ops.losses import MoELosses, RoutingSums, moe_losses, routing_sums, sum_over_ranks
from lancet_kernels.ops.parts import merge_parts, merge_rows, part_rows, window_counts, window_rows
from lancet_kernels.ops.router_logits import router_logits
from lancet_kernels.ops.send_rows import send_rows
from lancet_kernels.ops.shards import (
    all_gather,
    all_reduce,
    exchange_shards,
    place_shard,
    reduce_scatter,
    share_gradient,
    take_shard,
)
from lancet_kernels.ops.shift import shift, start_shift
from lancet_kernels.ops.square_linear import square_linear
from lancet_kernels.ops.tiles import gather_tiles, scatter_tiles
from lancet_kernels.ops.token_index import token_index
