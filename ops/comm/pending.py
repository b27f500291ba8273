"""Collectives under way: what the functions `start_...` of the ops return, so that computation can run
meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, Union

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.ops.comm.link import Transfer, Waitable, link
from lancet_kernels.ops.comm.waiting import waiting

Result = TypeVar("Result")


@dataclass
class Pending(Generic[Result]):
    """A collective under way.

    Attributes:
        what, layer, peers: for the message if a rank stays away (`ops.comm.waiting`).
        finish: makes the result of what has arrived.
        sent: what travels, where it must be kept until it has.
    """

    what: str
    group: dist.ProcessGroup
    work: Waitable
    transfer: Transfer | None
    finish: Callable[[], Result]
    layer: str = ""
    peers: Sequence[int] | None = None
    sent: object = None

    def wait(self) -> Result:
        """The result. Bounded by the process group's timeout. Raises: CommunicationError."""
        before = time.monotonic()
        with waiting(self.what, self.group, self.layer, self.peers):
            if self.transfer is None:
                self.work.wait()
            else:
                self.transfer.finish(self.work)
        link.waited(self.what, time.monotonic() - before)
        self.sent = None
        return self.finish()


@dataclass
class Here(Generic[Result]):
    """The same where nothing comes from another rank."""

    result: Result

    def wait(self) -> Result:
        return self.result


Started = Union[Pending[Result], Here[Result]]  # noqa: UP007  Python 3.10 cannot subscript the other form


def apart(result: Tensor, given: Tensor) -> Tensor:
    """The result of an op, which may not be its input."""
    return result.clone(memory_format=torch.contiguous_format) if result is given else result
