"""A process group whose collectives are measured and paced by the emulated link; a wait that fails or times
out names the collective and the missing ranks.

    torch.ops._c10d_functional.all_reduce(x, "sum", link_group(name))

torch's functional collectives find it by the name that `link_group` gives: every start and every wait of
theirs goes through here, and the waits of our own.

A collective under way is a `Pending`, which the functions `start_...` of the ops return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _register_process_group

from lancet_kernels.ops.comm.cuda_transfer import CudaTransfer
from lancet_kernels.ops.comm.groups import group_of
from lancet_kernels.ops.comm.link import AnyTransfer, link
from lancet_kernels.ops.comm.stand_in_group import StandInGroup
from lancet_kernels.ops.comm.waiting import Waitable, current_layer, waiting

Result = TypeVar("Result")


@dataclass
class Pending(Generic[Result]):
    """A collective under way. work: None: nothing comes from another rank. finish: makes the result after
    it."""

    work: LinkWork | None
    finish: Callable[[], Result]

    @classmethod
    def here(cls, result: Result) -> Pending[Result]:
        """A result for which nothing travels."""
        return cls(None, lambda: result)

    def wait(self) -> Result:
        """The result. Bounded by the process group's timeout. Raises: CommunicationError."""
        if self.work is not None:
            self.work.wait()
        return self.finish()


def apart(result: Tensor, source: Tensor) -> Tensor:
    """The result, copied if it is the input itself, which torch forbids an op to return."""
    return result.clone(memory_format=torch.contiguous_format) if result is source else result


_PREFIX = "link of "
_LINK_GROUPS: WeakKeyDictionary[dist.ProcessGroup, LinkGroup] = WeakKeyDictionary()
"""By the group that each sends over. torch's registry does not keep them alive."""


def link_group(name: str) -> str:
    """The name by which functional collectives find the link group of a group; "" for the empty name."""
    return link_group_of(name).link_name if name else ""


def plain_group(name: str) -> str:
    """The group of a name from `link_group`."""
    return name.removeprefix(_PREFIX)


def link_group_of(name: str) -> LinkGroup:
    """The link group of a group (a name from `group_name`, not the empty one)."""
    group = group_of(name)
    if group not in _LINK_GROUPS:
        _LINK_GROUPS[group] = LinkGroup(name)
        # The name is of a type of torch's own, which older ones lack.
        _register_process_group(cast(Any, _PREFIX + name), _LINK_GROUPS[group])
    return _LINK_GROUPS[group]


class LinkWork(dist.Work):
    """A collective under way, of `group`, or an exchange with `peers`, places in it.

    Args: kept: what must stay in memory until it has arrived.
    """

    def __init__(
        self,
        what: str,
        group: dist.ProcessGroup,
        work: Waitable,
        transfer: AnyTransfer | None,
        layer: str = "",
        peers: Sequence[int] | None = None,
        kept: object = None,
    ) -> None:
        super().__init__()
        self._named = what, group, layer, peers
        self._work: Waitable | None = work
        self._transfer, self._kept = transfer, kept

    def wait(self, timeout: object = None) -> bool:
        """Bounded by the process group's timeout. Raises: CommunicationError."""
        if self._work is None:  # another one of its results was waited for
            return True
        work, self._work = self._work, None
        with waiting(*self._named), link.waiting_for(self._named[0]):
            if self._transfer is None:
                work.wait()
            else:
                self._transfer.finish(work)
        self._kept = self._transfer = None
        return True


class LinkGroup(dist.ProcessGroup):
    """The ranks of the group called `name`, and its communicator. Methods are those that torch calls, by
    position."""

    def __init__(self, name: str) -> None:
        group = group_of(name)
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        # Only its name: the table of link groups would keep the group alive.
        self._plain, self.link_name = name, _PREFIX + name

    def allreduce(self, tensors: list[Tensor], options: Any) -> LinkWork:  # type: ignore[override]
        return self._summed(group_of(self._plain).allreduce, tensors, options)

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any) -> LinkWork:  # type: ignore[override]
        return self._summed(group_of(self._plain).allreduce_coalesced, tensors, options)

    def _summed(self, start: Callable[..., dist.Work], tensors: list[Tensor], options: Any) -> LinkWork:
        group = group_of(self._plain)
        with waiting("all_reduce", group):
            transfer = link.start_all_reduce(group, sum(t.nbytes for t in tensors), tensors[0].is_cuda)
            work = start(tensors, options)
        if isinstance(transfer, CudaTransfer):
            transfer.watch(work)
        return LinkWork("all_reduce", group, work, transfer, kept=tensors)

    def allgather_into_tensor_coalesced(  # type: ignore[override]
        self, received: list[Tensor], sent: list[Tensor], options: Any
    ) -> LinkWork:
        group = group_of(self._plain)
        start = group.copy_gathered if isinstance(group, StandInGroup) else group._allgather_base
        return self._exchanged("all_gather", start, *received, *sent, options)

    def reduce_scatter_tensor_coalesced(  # type: ignore[override]
        self, received: list[Tensor], sent: list[Tensor], options: Any
    ) -> LinkWork:
        group = group_of(self._plain)
        start = group.copy_scattered if isinstance(group, StandInGroup) else group._reduce_scatter_base
        return self._exchanged("reduce_scatter", start, *received, *sent, options)

    def alltoall_base(  # type: ignore[override]
        self, received: Tensor, sent: Tensor, receive: list[int], send: list[int], options: Any
    ) -> LinkWork:
        return self.all_to_all(received, sent, receive, send, layer=current_layer(), options=options)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        receive: list[int],
        send: list[int],
        what: str = "all_to_all",
        layer: str = "",
        options: Any = None,
    ) -> LinkWork:
        """Start an all-to-all, and say what it is and in which layer, for the message if a rank stays away.

        Args: receive, send: rows from and to each rank.
        """
        group, options = group_of(self._plain), options or dist.AllToAllOptions()
        other_rows = [sum(rows) - rows[group.rank()] for rows in (receive, send)]
        bytes = [
            n * t.nbytes // max(1, t.shape[0]) for n, t in zip(other_rows, (received, sent), strict=True)
        ]
        return self._exchanged(
            what, group.alltoall_base, received, sent, receive, send, options, bytes=bytes, layer=layer
        )

    def _exchanged(
        self,
        what: str,
        start: Callable[..., dist.Work],
        received: Tensor,
        sent: Tensor,
        *options: Any,
        bytes: Sequence[int] = (),
        layer: str = "",
    ) -> LinkWork:
        """Start it. Args: bytes: from and to other ranks; by default all of the larger tensor but this rank's
        own slice, in both directions."""
        group, sent = group_of(self._plain), sent.contiguous()
        whole = max(sent.nbytes, received.nbytes)
        coming, leaving = bytes or [whole - whole // group.size()] * 2
        # Not every backend has collectives of truth values.
        wires = [t.view(torch.uint8) if t.dtype == torch.bool else t for t in (received, sent)]
        with waiting(what, group, layer):
            transfer = link.start(group, sent=leaving, received=coming, cuda=sent.is_cuda, collective=what)
            work = start(*wires, *options)
        transfer.watch(work)
        return LinkWork(what, group, work, transfer, layer, kept=sent)
