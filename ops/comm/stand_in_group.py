"""Process groups of a process that stands for one of W ranks: collectives return its own values.

The W ranks are alike, so what would come from another rank is replaced by what this one, the first of them,
would send there. Nothing else differs: kernels, streams and plans are those of W ranks.

    collective           its result on this rank
    all-to-all           what it sent, rank by rank: as many rows come from a rank as go to it
    all-reduce           sum: W times its values; mean, least, most: its values
    all-gather, gather   W times its values
    reduce-scatter       its own slice, as of an all-reduce
    broadcast, barrier   nothing

So a layer with E experts, E / W of them here, sends every row to its own expert e mod (E / W): what the same
layer computes on one rank whose experts are these, W times over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    FakeProcessGroup,
    _create_work_from_future,
)
from torch.futures import Future

from lancet_kernels.errors import UserError

_DEVICES = ("cpu", "cuda")
_copy_streams: dict[torch.device, torch.cuda.Stream] = {}


def is_stand_in(group: dist.ProcessGroup | None) -> bool:
    """Are the other ranks of the group only stood for?"""
    return isinstance(group, StandInGroup)


class StandInGroup(dist.ProcessGroup):
    """A group of ranks that are alike, of which this process is one. Methods are those that torch calls."""

    def __init__(self, rank: int, ranks: int, timeout: timedelta) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]
        # Name, devices and timeout of a group are those of a backend; this one's collectives are not called.
        options = FakeProcessGroup.Options()  # type: ignore[call-arg]
        options._timeout = timeout
        backend = FakeProcessGroup._create_internal(rank, ranks, options)  # type: ignore[call-arg]
        for device in _DEVICES:
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)

    def barrier(self, opts: Any = None) -> dist.Work:
        return _work([])

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        return _work(tensors)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        def reduce() -> None:
            for tensor in tensors:
                self._reduce(tensor, opts)

        return _work(tensors, reduce)

    def allgather(  # type: ignore[override]
        self, received: list[list[Tensor]], sent: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def copy() -> None:
            for of_ranks, own in zip(received, sent, strict=True):
                for one in of_ranks:
                    one.copy_(own)

        return _work([one for of_ranks in received for one in of_ranks], copy)

    def copy_gathered(self, received: Tensor, sent: Tensor, opts: Any = None) -> dist.Work:
        """An all-gather that takes no time on the link."""

        def copy() -> None:
            slices, own = received.view(self.size(), -1), sent.reshape(1, -1)
            slices[1:].copy_(own)
            # Which it may be already: this rank is the first of all its groups.
            if slices.data_ptr() != own.data_ptr():
                slices[:1].copy_(own)

        return _work([received], copy)

    def copy_scattered(self, received: Tensor, sent: Tensor, opts: Any = None) -> dist.Work:
        """A reduce-scatter that takes no time on the link."""

        def copy() -> None:
            received.view(-1).copy_(sent.reshape(self.size(), -1)[self.rank()])
            self._reduce(received, opts)

        return _work([received], copy)

    def reduce_scatter(  # type: ignore[override]
        self, received: list[Tensor], sent: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        def copy() -> None:
            for own, of_ranks in zip(received, sent, strict=True):
                own.copy_(of_ranks[self.rank()])
                self._reduce(own, opts)

        return _work(received, copy)

    def alltoall_base(
        self, received: Tensor, sent: Tensor, receive: Sequence[int], send: Sequence[int], opts: Any = None
    ) -> dist.Work:
        if list(receive) != list(send):
            raise UserError(
                "all-to-all of a stand-in rank",
                got=f"rows {list(send)} to send, {list(receive)} to receive",
                expected="as many to receive from each rank as to send to it, because the ranks are alike",
                do="measure this step on real ranks",
            )
        return _work([received], lambda: received.copy_(sent))

    def alltoall(self, received: list[Tensor], sent: list[Tensor], opts: Any = None) -> dist.Work:
        return _work(received, lambda: [own.copy_(one) for own, one in zip(received, sent, strict=True)])

    def _refuse(self, *arguments: Any, **options: Any) -> dist.Work:
        raise UserError(
            "collective of a stand-in rank",
            got="a message to one rank, or from one",
            expected="all-to-all, all-reduce, all-gather, reduce-scatter or broadcast",
            do="measure this step on real ranks",
        )

    def _reduce(self, tensor: Tensor, opts: Any) -> None:
        """In place, what the reduction of W equal tensors is."""
        kind = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if kind == dist.ReduceOp.SUM:
            tensor.mul_(self.size())
        elif not any(kind == own for own in (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)):
            self._refuse()

    allreduce_coalesced, gather = allreduce, allgather  # type: ignore[assignment]
    # The name of `alltoall_base` since torch 2.13.
    all_to_all_single = alltoall_base  # type: ignore[assignment]
    send = recv = recv_anysource = scatter = reduce = _refuse


def _work(results: list[Tensor], copy: Callable[[], object] = lambda: None) -> dist.Work:
    """Copy, on CUDA on a stream beside that of the computation. -> the work that ends with it."""
    device = results[0].device if results else torch.device("cpu")
    if device.type != "cuda":
        future: Future = Future()
        copy()
        future.set_result(results)
        return _create_work_from_future(future)
    if device not in _copy_streams:
        _copy_streams[device] = torch.cuda.Stream(device)
    future, stream = Future(devices=[device]), _copy_streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy()
        future.set_result(results)
    return _create_work_from_future(future)
