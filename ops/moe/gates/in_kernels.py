"""Gates in the routing kernels (`kernels.routing`): bitwise the same results as the gates in torch ops.

T  tokens on this rank      E  experts in all      N  choices
K  choices per token        C  capacity
"""

from __future__ import annotations

import torch
from torch import Tensor

from lancet_kernels.ops.fused.kernel_path import runs_in_kernels
from lancet_kernels.ops.moe.gates.base import Gate
from lancet_kernels.ops.moe.gates.counter import Hash, Random
from lancet_kernels.ops.moe.gates.sigmoid import Sigmoid
from lancet_kernels.ops.moe.gates.topk import Switch, TopK

SCORES = (torch.float32, torch.float64)


def route_in_kernels(
    gate: Gate,
    logits_TE: Tensor | None,
    used_E: Tensor,
    key_T: Tensor | None,
    bias_E: Tensor | None,
    top_k: int,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """-> expert_TK, slot_TK, used'_E; None for a gate, or a device, without these kernels.

    Gates that need the whole batch also use kernels, but in separate steps (`slots.top_k_stable`,
    `slots.slots_in_order`).
    """
    if not runs_in_kernels(used_E, (torch.int64,)):
        return None
    from lancet_kernels.kernels.moe.routing import route_keys, route_scores

    if isinstance(gate, Hash | Random):
        assert key_T is not None
        routed = route_keys(key_T.contiguous(), used_E, top_k, capacity, seed=gate.seed)
    elif logits_TE is None or logits_TE.dtype not in SCORES:
        return None
    elif isinstance(gate, TopK) and gate.top_groups < gate.groups:
        return None  # these kernels rate a group by its two best experts
    elif isinstance(gate, Switch | TopK):
        routed = route_scores(logits_TE.contiguous(), used_E, top_k, capacity)
    elif isinstance(gate, Sigmoid):
        score_TE = gate.biased_scores(logits_TE, bias_E).contiguous()
        routed = route_scores(
            score_TE, used_E, top_k, capacity, groups=gate.groups, top_groups=gate.top_groups
        )
    else:
        return None
    return routed.expert_TK, routed.slot_TK, routed.used_E
