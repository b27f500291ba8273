"""Dropout whose mask does not depend on how a batch is cut or over how many ranks it is distributed.

T  tokens on this rank      D  features

torch's dropout takes numbers from a sequence, so they depend on what was drawn before: a plan may neither
cut it into parts nor move it past another random op. Here a number depends only on seed, call site,
training step, token of the global batch, and feature (`ops.random`).
"""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor, nn

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.layer.layer_checks import is_number
from lancet_kernels.ops.comm.groups import AnyGroups, data_group_name


def dropout(
    x: Tensor,
    p: float = 0.5,
    *,
    step: Tensor,
    site: int,
    seed: int = 0,
    training: bool = True,
    groups: AnyGroups | None = None,
) -> Tensor:
    """x [..., D] -> [..., D]: each feature of each token zero with probability p, else divided by 1 - p.

    The identity if not training or p = 0.

    Args:
        step: int64 scalar tensor. The mask is the same for the same step: increment it for every batch.
        site: number of this dropout in the model; two with the same number have the same mask.
        groups: the ranks over which the batch is distributed, with equal numbers of tokens, in the order of
            the ranks (of `Groups` the data group); None: all ranks.
    Raises: UserError for p outside [0, 1), x without dimensions.
    """
    _check_probability(p)
    if not training or p == 0:
        return x
    return _dropped(x, float(p), step, seed, site, data_group_name(groups))


class Dropout(nn.Module):
    """`dropout` as a module, in place of `nn.Dropout`.

    The mask changes when `set_routing_step(model, step)` sets another step: call it for every batch. Until
    then recomputation (activation checkpointing) and the backward use the mask of the forward. The step is a
    buffer, which a captured CUDA graph reads; it is not in the state dict.

    Args:
        p: probability of zero, in [0, 1).
        site: number of this dropout in the model. Two with the same number would share a mask.
        seed: the same on all ranks.
        groups: the ranks over which the batch is distributed (of `Groups` the data group); None: all ranks.
    Raises: UserError.
    """

    step: Tensor

    def __init__(
        self,
        p: float,
        site: int,
        *,
        seed: int = 0,
        groups: AnyGroups | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_probability(p)
        for what, value in (("site", site), ("seed", seed)):
            if not is_number(value, Integral) or not 0 <= value < 2**63:
                raise UserError(
                    f"{what} of Dropout", got=repr(value), expected="a whole number from 0", do="give one"
                )
        self.p, self.site, self.seed = float(p), int(site), int(seed)
        self._group = data_group_name(groups)
        # Without dropout a graph has nothing of it, not even an input.
        if self.p:
            self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        if not self.training or not self.p:
            return x
        return _dropped(x, self.p, self.step, self.seed, self.site, self._group)

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site}, seed={self.seed}"


def _dropped(x: Tensor, p: float, step: Tensor, seed: int, site: int, group: str) -> Tensor:
    if x.dim() < 1:
        raise UserError("input of dropout", got="a scalar", expected="[..., D]", do="drop something larger")
    tokens = x.shape[:-1]
    token = ops.token_index(tokens.numel(), group, x.device, True).view(tokens)
    feature_D = torch.arange(x.shape[-1], device=x.device)
    return ops.dropout(x, token, feature_D, step, p, seed, site)


def _check_probability(p: float) -> None:
    if not is_number(p) or not 0 <= p < 1:
        raise UserError("p of dropout", got=repr(p), expected="0 <= p < 1", do="use 0.1, say")
