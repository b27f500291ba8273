"""Collectives under way: what the functions `start_...` of the ops return, so that computation can run
meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, Union

import torch
from torch import Tensor

from lancet_kernels.ops.comm.link_group import LinkWork

Result = TypeVar("Result")


@dataclass
class Pending(Generic[Result]):
    """A collective under way. finish: makes the result of what has arrived."""

    work: LinkWork
    finish: Callable[[], Result]

    def wait(self) -> Result:
        """The result. Bounded by the process group's timeout. Raises: CommunicationError."""
        self.work.wait()
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
