"""Do all ranks of a group run the same collective? With LANCET_CHECK=1 they tell each other.

Where ranks disagree, gloo ends the process and NCCL hangs, and neither names the collective. So each rank
puts a record of a collective into the group's store before it starts it, and compares it with those already
there: the later of two ranks sees what the earlier one entered, and raises instead of starting another one.
A rank that waits for a collective first reads the records of all ranks, so that it fails, too.

    rank 0   7: all_to_all of blocks.0.moe, 768 bytes    rank 1   7: all_reduce, 96 bytes    an error on both

Nothing waits for a record that the collective itself does not wait for: ranks may enter collectives of two
groups in different orders if they do not wait in between. Ranks that wait for each other in collectives of
different groups are an error after `MUTUAL_S`.

Compared is what Python calls on torch's process groups: collectives of plans, of MoE layers, of `fully_shard`
and of torch.distributed. Not compared is what torch starts in C++: collectives of DistributedDataParallel, of
DTensors outside of `fully_shard` (`full_tensor`), and functional ones that a step calls without a plan.

An all-reduce of 32 bytes takes 0.67 ms of CPU time in place of 0.30 (2 ranks, gloo, a file store; 2-core CPU,
2026-11-27).
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lancet_kernels.errors import CommunicationError, UserError
from lancet_kernels.ops.comm.groups import group_timeout_s, is_of_processes
from lancet_kernels.ops.comm.waiting import waiting, where_waiting

MUTUAL_S = 1.0
_RING = 4096
"""Records of a group that are kept: more than a rank can be ahead of another one."""
_LONGEST_PAUSE_S = 0.01
_SAME_SIZES = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 0),
    "_reduce_scatter_base": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    # Names since torch 2.13.
    "all_gather_single": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "reduce_scatter_single": ("reduce_scatter", 0),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 0),
}
"""By method of a process group: the collective, and the argument that is as large on all ranks."""
_ALL_TO_ALL = ("alltoall_base", "alltoall", "all_to_all_single")
_POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True)
class Record:
    """A collective as a rank has entered it. sent, received: bytes to and from each place of the group, or
    one number if these are equal."""

    number: int
    op: str
    where: str
    sent: list[int]
    received: list[int]

    def differs(self, place: int, other: Record, others_place: int) -> bool:
        """Can the two not be the same collective? Args: place, others_place: the ranks that entered them."""
        return (
            self.op != other.op
            or (self.named and other.named and self.named != other.named)
            or self.sent[others_place % len(self.sent)] != other.received[place % len(other.received)]
            or self.received[others_place % len(self.received)] != other.sent[place % len(other.sent)]
        )

    @property
    def named(self) -> str:
        """What is compared of `where`: not the layer of an exchange of counts, which checks it itself and
        says more about it."""
        return "exchange_counts" if self.where.startswith("exchange_counts ") else self.where

    @property
    def label(self) -> str:
        return self.where or self.op

    def text(self, place: int, rank: int) -> str:
        """For a message. Args: place, rank: of the peer."""
        name = self.label
        if len(self.sent) == 1:
            return f"{name} ({self.sent[0]} bytes)" if self.op != "barrier" else name
        return f"{name} ({self.sent[place]} bytes to rank {rank}, {self.received[place]} from it)"


class _Order:
    """The collectives that this rank has entered in one group."""

    def __init__(self, group: dist.ProcessGroup, store: dist.Store) -> None:
        self.name, self.place = group.group_name, group.rank()
        self.ranks = dist.get_process_group_ranks(group)
        self.count: Counter[str] = Counter()
        self.last: dict[str, _Entered] = {}
        self.store = dist.PrefixStore("lancet_check", store)

    def enter(self, op: str, sent: list[int], received: list[int], pair: Sequence[int]) -> _Entered:
        """Store a record, and compare it with those of other ranks.

        Args: pair: the places of sender and receiver of a point-to-point message. Raises: UserError.
        """
        channel = ">".join(map(str, pair))
        self.count[channel] += 1
        record = Record(self.count[channel], op, where_waiting(), sent, received)
        entered = _Entered(self, channel, record, set(pair or range(len(self.ranks))) - {self.place})
        self.last[channel] = entered
        self.store.set(entered.key(self.place), json.dumps(asdict(record)))
        entered.compare()
        return entered


class _Entered:
    """A collective that this rank has entered. missing: the places without a record of it so far."""

    def __init__(self, order: _Order, channel: str, record: Record, missing: set[int]) -> None:
        self.order, self.channel, self.record, self.missing = order, channel, record, missing

    def key(self, place: int) -> str:
        return f"{self.channel}/{self.record.number % _RING}/{place}"

    def compare(self) -> None:
        """Raise UserError if a rank has entered something else."""
        store, own, ranks = self.order.store, self.order.place, self.order.ranks
        for place in sorted(self.missing):
            if not store.check([self.key(place)]):
                continue
            other = Record(**json.loads(store.get(self.key(place))))
            if other.number < self.record.number:
                continue
            self.missing.discard(place)
            if other.number == self.record.number and self.record.differs(own, other, place):
                raise _other_collectives(
                    f"collective {self.record.number} of ranks {', '.join(map(str, ranks))}",
                    {
                        ranks[own]: self.record.text(place, ranks[place]),
                        ranks[place]: other.text(own, ranks[own]),
                    },
                )

    def until_all_have(self, work: dist.Work, timeout_s: float) -> None:
        """Wait until all ranks have entered it, or it has ended without them.

        Raises: UserError, CommunicationError.
        """
        order, begin, pause_s, is_noted = self.order, time.monotonic(), 1e-4, False
        self.compare()
        while self.missing and not work.is_completed():
            waited_s = time.monotonic() - begin
            if waited_s > timeout_s:
                raise CommunicationError(
                    "they have not entered it", missing=sorted(self.missing), timed_out=True
                )
            if not is_noted:
                waits = [order.name, self.record.number, order.ranks, self.record.label]
                _waits_of(order.ranks[order.place], json.dumps(waits))
                is_noted = True
            if waited_s > MUTUAL_S:
                self.refuse_waiting_for_each_other()
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            self.compare()
        if is_noted:
            _waits_of(order.ranks[order.place], "")

    def refuse_waiting_for_each_other(self) -> None:
        """Raise UserError if a rank that is missing waits for this one, in a collective of another group."""
        own = self.order.ranks[self.order.place]
        for place in sorted(self.missing):
            peer = self.order.ranks[place]
            if not (text := _waits_of(peer)):
                continue
            group, number, ranks, where = json.loads(text)
            # It may have come since the last look, and wait in the next collective by now.
            self.compare()
            if place in self.missing and own in ranks and _entered_in(group) < number:
                raise _other_collectives(
                    "collectives that wait for each other", {own: self.record.label, peer: where}
                )


class CheckedWork(dist.Work):
    """A collective under way; its wait begins when all ranks have entered it.

    Args: is_message: point to point; gloo does not say when it has arrived, so the wait begins at once.
    """

    def __init__(
        self, work: dist.Work, group: dist.ProcessGroup, entered: _Entered, is_message: bool
    ) -> None:
        super().__init__()
        self._work, self._group, self._entered, self._is_message = work, group, entered, is_message

    def wait(self, *timeout: Any) -> bool:
        """Raises: UserError where ranks have entered different collectives."""
        named = waiting(self._entered.record.label, self._group)
        with contextlib.nullcontext() if where_waiting() else named:
            if not self._is_message:
                # gloo ends by itself a little earlier.
                self._entered.until_all_have(self._work, group_timeout_s(self._group) + 1.0)
            try:
                return self._work.wait(*timeout)
            except RuntimeError as error:
                failure = error
            # The rank that has entered something else may have seen it first, and be gone by now.
            for entered in self._entered.order.last.values():
                entered.compare()
            self._entered.refuse_waiting_for_each_other()
            if not self._is_message:
                failure.missing = sorted(self._entered.missing)  # type: ignore[attr-defined]
            raise failure


def _delegated(name: str) -> Callable[..., Any]:
    return lambda checked, *arguments: getattr(checked._work, name)(*arguments)


for _name in (
    "exception",
    "get_future",
    "is_completed",
    "is_success",
    "result",
    "source_rank",
    "synchronize",
):
    setattr(CheckedWork, _name, _delegated(_name))


_ORDERS: WeakKeyDictionary[dist.ProcessGroup, _Order | None] = WeakKeyDictionary()


def _order_of(group: dist.ProcessGroup) -> _Order | None:
    """None for a group without other processes."""
    if group not in _ORDERS:
        _, store = distributed_c10d._world.pg_map.get(group, ("", None))
        is_compared = group.size() > 1 and is_of_processes(group)
        _ORDERS[group] = _Order(group, store) if store is not None and is_compared else None
    return _ORDERS[group]


def _entered_in(name: str) -> int:
    """The number of collectives that this rank has entered in the group of this name."""
    # A group that was destroyed may live on somewhere, and a new one have its name.
    groups = [group for group in distributed_c10d._world.pg_map if group.group_name == name]
    order = _order_of(groups[0]) if groups else None
    return order.count[""] if order is not None else 0


def _waits_of(rank: int, text: str | None = None) -> str:
    """The collective in which a rank waits for others, as JSON; a text is stored as that."""
    store = dist.PrefixStore("lancet_check_waits", distributed_c10d._get_default_store())
    if text is not None:
        store.set(str(rank), text)
        return text
    return store.get(str(rank)).decode() if store.check([str(rank)]) else ""


def _other_collectives(what: str, by_rank: Mapping[int, str]) -> UserError:
    return UserError(
        what,
        got=" and ".join(f"{text} on rank {rank}" for rank, text in sorted(by_rank.items())),
        expected="the same collective on every rank",
        do="let all ranks run the same layers, steps and number of batches, in the same order",
    )


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(map(_bytes, tensors))


def _of_rows(tensor: Tensor, rows: Sequence[int], ranks: int) -> list[int]:
    """Bytes of each rank's rows of a tensor; without `rows` all have as many."""
    if not rows:
        return [_bytes(tensor) // ranks] * ranks
    row = _bytes(tensor) // max(1, tensor.shape[0])
    return [row * n for n in rows]


def _sizes(
    group: dist.ProcessGroup, name: str, given: Sequence[Any]
) -> tuple[str, list[int], list[int], Sequence[int]]:
    """The collective, bytes sent and received, and of a message the places of sender and receiver.

    Args: name: of a method. given: its arguments.
    """
    if name == "barrier":
        return name, [0], [0], ()
    if name in _POINT_TO_POINT:
        size, pair = [_bytes(given[0])], (group.rank(), given[1])
        return "message", size, size, pair if name == "send" else pair[::-1]
    if name in _SAME_SIZES:
        op, position = _SAME_SIZES[name]
        size = [_bytes(given[position])]
        return op, size, size, ()
    received, sent = given[:2]
    if name == "alltoall":
        return "all_to_all", [*map(_bytes, sent)], [*map(_bytes, received)], ()
    receive, send = given[2:4]
    return "all_to_all", _of_rows(sent, send, group.size()), _of_rows(received, receive, group.size()), ()


def _checked(name: str, method: Callable[..., dist.Work]) -> Callable[..., dist.Work | None]:
    @functools.wraps(method)
    def start(group: dist.ProcessGroup, *given: Any, **by_name: Any) -> dist.Work | None:
        order = _order_of(group)
        if order is None:
            return method(group, *given, **by_name)
        entered = order.enter(*_sizes(group, name, [*given, *by_name.values()]))
        work = method(group, *given, **by_name)
        # None: several are started together.
        return work and CheckedWork(work, group, entered, is_message=name in _POINT_TO_POINT)

    return start


def install() -> None:
    """Compare collectives from here on, in this process; call it once."""
    for name in (*_SAME_SIZES, *_ALL_TO_ALL, *_POINT_TO_POINT, "barrier"):
        if (method := getattr(dist.ProcessGroup, name, None)) is not None:
            start = _checked(name, method)
            # pybind tells a call from an override by the name of the calling code object.
            start.__code__ = start.__code__.replace(co_name=name)
            setattr(dist.ProcessGroup, name, start)
