"""What goes into a pass through the fused experts and comes out of it; letters as in `kernels.overlap`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lancet_kernels.kernels.protocol.exchange import OpenPass


@dataclass(frozen=True)
class Routing:
    """Where the tokens of this PE go (a gate's decision, as rows to send; `schedule.py`).

    Attributes:
        expert, row: int64 [T, K]; row: which row to send the choice is; negative: dropped.
        weight: float32 [T, K].
        choice: int32 [S], the choice t * K + k that each row to send is; beyond the last row anything.
        count: int64 [E], how many rows go to each expert.
    """

    expert: Tensor
    row: Tensor
    weight: Tensor
    choice: Tensor
    count: Tensor

    @classmethod
    def of(cls, expert: Tensor, row: Tensor, weight: Tensor, count: Tensor) -> Routing:
        """`choice` is the inverse of `row`."""
        row_N = row.reshape(-1)
        size = row_N.numel()
        choice = torch.zeros(size + 1, dtype=torch.int32, device=row.device)
        # Dropped choices all go behind the last row.
        place = torch.where(row_N < 0, size, row_N)
        choice.scatter_(0, place, torch.arange(size, dtype=torch.int32, device=row.device))
        return cls(expert, row.contiguous(), weight, choice, count)

    def token_of_row(self) -> Tensor:
        """int32 [S]: the token that each row to send is of."""
        return self.choice // self.expert.shape[1]

    def weight_of_row(self) -> Tensor:
        """float32 [S]: the weight of each row to send."""
        if self.weight.numel() == 0:
            return self.weight.new_zeros(self.choice.shape)
        return self.weight.reshape(-1)[self.choice.clamp(0, self.weight.numel() - 1)]


@dataclass(frozen=True)
class Experts:
    """The experts of this PE: w1 [L, D, H], b1 [L, H] or None, w2 [L, F, D], b2 [L, D] or None."""

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    activation: str

    @property
    def hidden(self) -> int:
        return self.w2.shape[1]


@dataclass(frozen=True)
class DenseGemm:
    """c [A, B] = a^T @ b of a [N, A] and b [N, B]; contiguous, of the launch's dtype."""

    a: Tensor
    b: Tensor
    c: Tensor


@dataclass
class SavedPass:
    """What the backward needs of a forward pass: the pass of the exchange, which says where the rows are, and
    there, in [A, H], the values before the activation, from which it makes those after it again."""

    opened: OpenPass
    pre: Tensor


@dataclass(frozen=True)
class ExpertGradients:
    """dx [T, D], of this PE's tokens; dweight float32 [T, K]; the others like the experts' parameters."""

    dx: Tensor
    dweight: Tensor
    dw1: Tensor
    db1: Tensor | None
    dw2: Tensor
    db2: Tensor | None
