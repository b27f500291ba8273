"""One training step as a module: model, loss and router losses in, one scalar to differentiate out.

`optimize` plans exactly what it is given, so the loss belongs in. B sequences, S tokens each, W ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lancet_kernels.layer.model_layers import moe_losses


class StepResult(NamedTuple):
    """What a step of this rank gives."""

    objective: Tensor
    """To differentiate: the whole loss divided by W, so that sums over the ranks are averages."""
    loss: Tensor
    """Mean cross-entropy per token; no gradient."""
    balance: Tensor
    """Mean load-balance loss of the MoE layers; no gradient."""
    dropped: Tensor
    """Share of assignments without a slot, over layers and ranks."""
    assigned: Tensor
    """[layers, E] int64: assignments of each expert, over all ranks."""


class TrainingStep(nn.Module):
    """(tokens[B, S], targets[B, S]) -> StepResult.

    Args:
        model: tokens -> (logits[B, S, V], RoutingSums of each layer).
        ranks: W. balance_weight, z_weight: of the router losses. autocast: the dtype to compute in on CUDA.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: int,
        balance_weight: float = 0.01,
        z_weight: float = 0.0,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model, self.ranks = model, ranks
        self.balance_weight, self.z_weight, self.autocast = balance_weight, z_weight, autocast

    def forward(self, token_BS: Tensor, target_BS: Tensor) -> StepResult:
        with torch.autocast(token_BS.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            logits_BSV, sums = self.model(token_BS)
        if logits_BSV.dtype in (torch.bfloat16, torch.float16):
            logits_BSV = logits_BSV.float()
        loss = nn.functional.cross_entropy(logits_BSV.flatten(0, 1), target_BS.flatten())
        moe = moe_losses(sums)
        objective = loss + self.balance_weight * moe.balance.mean() + self.z_weight * moe.z.mean()
        return StepResult(
            objective / self.ranks,
            loss.detach(),
            moe.balance.detach().mean(),
            moe.dropped.mean(),
            moe.assigned,
        )
