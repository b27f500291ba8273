"""What goes into a pass through the fused experts and comes out of it; letters: `protocol`.

Whether a pass can run with it is checked before anything is sent: no peer waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.config import check_activation
from lancet_kernels.kernels.protocol.exchange import Exchange, OpenPass
from lancet_kernels.kernels.runtime import check_tensor


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


def check_pass(
    exchange: Exchange,
    x: Tensor,
    routing: Routing,
    experts: Experts,
) -> None:
    """Raise UserError unless a pass with these can run: before anything is sent."""
    experts_in_all = exchange.world * exchange.local_experts
    num_tokens, num_choices = x.shape[0], routing.expert.shape[-1]
    local, width, hidden = exchange.local_experts, exchange.width, experts.hidden
    width_in = 2 * hidden if experts.activation == "swiglu" else hidden
    runtime.check_runs_on("input of the fused experts", x.device)
    check_activation(experts.activation)
    checks = (
        ("x", x, (num_tokens, width), exchange.dtype),
        ("expert", routing.expert, (num_tokens, num_choices), torch.int64),
        ("row", routing.row, (num_tokens, num_choices), torch.int64),
        ("weight", routing.weight, (num_tokens, num_choices), torch.float32),
        ("choice", routing.choice, (num_tokens * num_choices + 1,), torch.int32),
        ("count", routing.count, (experts_in_all,), torch.int64),
        ("w1", experts.w1, (local, width, width_in), exchange.dtype),
        ("w2", experts.w2, (local, hidden, width), exchange.dtype),
        ("b1", experts.b1, (local, width_in), exchange.dtype),
        ("b2", experts.b2, (local, width), exchange.dtype),
    )
    for name, tensor, shape, dtype in checks:
        if tensor is not None:
            check_tensor(f"{name} of the fused experts", tensor, shape=shape, dtype=dtype, device=x.device)
    check_routing(routing)
    if (experts.b1 is None) != (experts.b2 is None):
        raise UserError("biases", got="one of b1 and b2", expected="both or neither", do="give zeros")


def check_routing(routing: Routing) -> None:
    """Raise UserError unless the tables of a routing on the CPU are each other's inverse. On a GPU nothing is
    looked at, since that would wait for the device."""
    if routing.expert.device.type != "cpu":
        return
    count, kept = routing.count, routing.row >= 0
    row, choice = routing.row[kept], kept.view(-1).nonzero().view(-1)
    # Rows lie by expert; each one is a choice's, and the choice is the row's.
    num_rows = int(count.clamp(min=0).sum())
    sound = bool((count >= 0).all()) and torch.equal(row.sort()[0], torch.arange(num_rows))
    sound = sound and torch.equal(
        torch.arange(len(count)).repeat_interleave(count)[row], routing.expert[kept]
    )
    if not (sound and torch.equal(routing.choice[row], choice.int())):
        raise UserError(
            "routing",
            got=f"{len(row)} choices with a row and counts of {int(count.sum())} rows, not the same ones",
            expected="rows by expert, as the counts say, and choice to be the inverse of row",
            do="make the tables from one call of a gate",
        )
