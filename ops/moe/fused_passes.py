"""Forward passes of fused layers that wait for their backward, each found by a ticket.

A ticket is a small tensor, int64 [1] on the CPU, which autograd saves like any other, and the pass lives as
long as the memory of that tensor. So what drops saved tensors gives the pass's bank back: a forward without a
backward, a deleted graph, or activation checkpointing, which runs the forward again and then hands the
ticket of that second pass to the backward.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lancet_kernels.errors import UserError

if TYPE_CHECKING:  # the kernels need Triton, which not every machine has
    from lancet_kernels.kernels.config import OverlapConfig
    from lancet_kernels.kernels.overlap import Experts, Routing, SavedPass
    from lancet_kernels.kernels.protocol.exchange import Exchange


@dataclass
class ForwardPass:
    """A pass with its `forward` and `backward` exchange, and what the backward needs of it."""

    exchanges: tuple[Exchange, Exchange]
    saved: SavedPass
    routing: Routing
    experts: Experts
    config: OverlapConfig


_passes: dict[int, ForwardPass] = {}
_tickets = itertools.count(1)


def ticket_of(forward_pass: ForwardPass) -> Tensor:
    """int64 [1]: the number of the pass, which is kept alive as long as the memory of this tensor."""
    number = next(_tickets)
    _passes[number] = forward_pass
    # Autograd may keep another tensor with the same memory; numpy's memory has a finalizer.
    memory = np.array([number])
    weakref.finalize(memory, _passes.pop, number, None).atexit = False
    return torch.from_numpy(memory)


def take_pass(ticket: Tensor) -> ForwardPass:
    """The pass of a ticket, once. Raises: UserError for a second backward."""
    forward_pass = _passes.pop(int(ticket), None)
    if forward_pass is None:
        raise UserError(
            "backward of fused experts",
            got="a second one",
            expected="one per forward",
            do="run forward again",
        )
    return forward_pass
