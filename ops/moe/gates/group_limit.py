"""Group-limited selection: experts lie in equal groups, and a token chooses among its best groups alone.

DeepSeek-V2 (2024, section 2.2.2) rates a group by its best expert, DeepSeek-V3 by the sum of its two best.

T  tokens      E  experts in `groups` groups of S = E / groups
"""

import math

import torch
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.moe.gates.slots import top_k_stable


def mask_other_groups(score_TE: Tensor, groups: int, top_groups: int, best: int) -> Tensor:
    """-> [T, E]: the scores, -inf outside of the `top_groups` groups whose `best` highest sum to most."""
    if top_groups == groups:
        return score_TE
    size = score_TE.shape[1] // groups
    group_TG = score_TE.view(-1, groups, size).topk(min(best, size), dim=-1).values.sum(-1)
    allowed_TG = torch.zeros_like(group_TG, dtype=torch.bool)
    allowed_TG.scatter_(1, top_k_stable(group_TG, top_groups), True)
    return score_TE.masked_fill(~allowed_TG.repeat_interleave(size, dim=1), -torch.inf)


def check_groups(gate: str, groups: int, top_groups: int, num_experts: int, top_k: int) -> None:
    """Raise UserError unless the groups are equal and hold enough experts to choose from."""
    if groups < 1 or num_experts % groups:
        raise UserError(
            f"groups of gate {gate}",
            got=groups,
            expected=f"a divisor of num_experts ({num_experts})",
            do="choose how many equal groups the experts form",
        )
    reachable = top_groups * (num_experts // groups)
    if not 1 <= top_groups <= groups or top_k > reachable:
        raise UserError(
            f"top_groups of gate {gate}",
            got=top_groups,
            expected=f"1 to groups ({groups}) with at least top_k ({top_k}) experts in them",
            do="raise top_groups or lower top_k",
        )


def check_scale(gate: str, scale: float) -> None:
    """Raise UserError unless the weights are multiplied by a positive number."""
    if not (scale > 0 and math.isfinite(scale)):
        raise UserError(
            f"scale of gate {gate}",
            got=scale,
            expected="a positive number",
            do="leave it out for weights that are not scaled",
        )
