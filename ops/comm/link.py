"""The link that collectives use: bytes sent, time taken, and how long computation waited for it.

By default it only measures all-to-alls and shifts. With a bandwidth (`emulate_link`) it also paces them and
gradient all-reduces: none completes before a link of that bandwidth would have transferred its bytes (for an
all-reduce a part of them, see `GPUS_PER_NODE`). The wait is a deadline, not work, so computation hides it
like a real transfer. All output labels such times as emulated.

The emulated wire of a rank is full duplex and carries one collective at a time, without interrupting it, by
the rule that plans are simulated with (`schedules.time.simulate`): the one that could start first, from when
the last rank has entered; of those, all-to-alls before all-reduces; else in the order they were issued (on
CUDA in this order, `cuda_transfer`). Only ranks of one machine can share it (they compare one monotonic
clock).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist

from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.cuda_transfer import CudaStreams, CudaTransfer
from lancet_kernels.ops.comm.stand_in_group import is_stand_in
from lancet_kernels.ops.comm.waiting import Waitable, waiting

_INSTANT_S = 1e-4
"""A wait shorter than this counts as no wait: the message had already arrived."""
GPUS_PER_NODE = 8
"""Each rank stands for a GPU of a node with this many GPUs and shared network cards, as in p3dn and p4de:
each GPU sends its own rows over them, but gradients are summed inside the node and sent once
(`graph.costs.clusters`)."""


@dataclass
class Traffic:
    """Traffic on the link since it was last read."""

    all_to_all_ms: float = 0.0
    """Time during which an all-to-all, or a shift, was in flight."""
    exposed_ms: float = 0.0
    """The part of it for which the computing thread (CUDA: the compute stream) waited."""
    wire_exposed_ms: float = 0.0
    """The part of `exposed_ms` in which sender and receiver were both there and an emulated link still
    carried the bytes; the rest is waiting for a rank that came late."""
    bytes_sent: int = 0
    """Bytes of rows sent to other ranks; padding and rows that stay on this rank do not count."""
    bytes_on_wire: int = 0
    """Sum over all-to-alls of the larger of bytes sent and bytes received, because the link is full
    duplex."""
    count: int = 0
    waited_ms: dict[str, float] = field(default_factory=dict)
    """By collective: how long the computing thread (CUDA: the compute stream) waited for it, gradient
    all-reduces and the exchange of counts included. On CUDA all-reduces only of an emulated link."""
    waiting_cpu_ms: float = 0.0
    """CPU time of the computing thread while it waited, with `Link.times_cores`."""
    waiting_for_core_ms: float = 0.0
    """Time for which it could have run while it waited, and had no core, with `Link.times_cores`."""


AnyTransfer: TypeAlias = "Transfer | CudaTransfer"


class Link:
    """The link of this process. `link` below is the only one; ops report to it."""

    def __init__(self) -> None:
        self.gbps: float | None = None
        self._traffic = Traffic()
        self._free_at = 0.0
        self._last_end = 0.0
        self._boards = _Boards()
        self._waiting: list[Transfer] = []
        """Paced transfers in the order they were issued, without their time on the wire."""
        self._cuda_streams: dict[int, CudaStreams] = {}
        self.log: list[tuple[float, float]] | None = None
        """Start and end of every all-to-all, in seconds on the monotonic clock (CPU ranks)."""
        self.times_cores = False
        """Do waits also record CPU time and time without a core? Two system calls more at each end."""

    def read(self) -> Traffic:
        """The traffic since the last call; starts a new count. On CUDA this waits for the device."""
        traffic, self._traffic = self._traffic, Traffic()
        ended = [transfer for streams in self._cuda_streams.values() for transfer in streams.take_ended()]
        if ended:
            # The host only launched the waits.
            traffic.waited_ms = dict.fromkeys((transfer.collective for transfer in ended), 0.0)
        for transfer in ended:
            travelled_ms, waited_ms = transfer.times()
            traffic.waited_ms[transfer.collective] += waited_ms
            if transfer.is_urgent:
                traffic.all_to_all_ms += travelled_ms
                traffic.exposed_ms += waited_ms
                # Ranks that are alike are never late.
                traffic.wire_exposed_ms += waited_ms
        return traffic

    def start(
        self, group: dist.ProcessGroup, sent: int, received: int, cuda: bool, collective: str = "all_to_all"
    ) -> AnyTransfer:
        """Record the start of a transfer. Args: sent, received: bytes to and from other ranks."""
        self._traffic.bytes_sent += sent
        self._traffic.bytes_on_wire += max(sent, received)
        self._traffic.count += 1
        return self._transfer(group, max(sent, received), cuda, collective, is_urgent=True)

    def start_all_reduce(self, group: dist.ProcessGroup, size: int, cuda: bool) -> AnyTransfer | None:
        """The all-reduce of `size` bytes begins; None where nothing paces it. Each rank sends and receives
        its bytes twice, but for its own share; the GPUs of a node sum most of that among themselves."""
        if self.gbps is None:
            return None
        ranks = group.size()
        on_wire = 2 * size * (ranks - 1) // ranks // GPUS_PER_NODE
        return self._transfer(group, on_wire, cuda, "all_reduce", is_urgent=False)

    def _transfer(
        self, group: dist.ProcessGroup, size: int, cuda: bool, collective: str, is_urgent: bool
    ) -> AnyTransfer:
        if not cuda:
            return Transfer(self, group, size, is_urgent)
        if self.gbps is not None and not is_stand_in(group):
            raise UserError(
                "emulated link",
                got="several CUDA ranks",
                expected="CPU ranks, or one rank that stands for all (standing_for)",
                do="use the real link, or one of these",
            )
        device = torch.cuda.current_device()
        if device not in self._cuda_streams:
            self._cuda_streams[device] = CudaStreams(torch.device("cuda", device))
        wire_ns = 0 if self.gbps is None else round(size * 8 / self.gbps)
        return CudaTransfer(self._cuda_streams[device], collective, wire_ns, is_urgent)

    def start_shift(self, group: dist.ProcessGroup, source: int, size: int, cuda: bool) -> AnyTransfer:
        """A shift begins in which this rank sends and receives `size` bytes, these from the rank in the place
        `source` of the group."""
        transfer = self.start(group, size, size, cuda)
        if isinstance(transfer, Transfer):
            transfer.source = source
        return transfer

    def skip_shift(self, group: dist.ProcessGroup) -> None:
        """A shift begins in which nothing travels to or from this rank: ranks count their transfers alike."""
        if self.gbps is not None:
            self._boards.row(group)[group.rank()] = time.monotonic()

    def _put_on_wire(self, last: Transfer) -> float:
        """Give transfers their time on the wire, one after another, until `last` has its own. -> its end."""
        while last.wire_end is None:
            candidates = [
                (max(self._free_at, entered), not transfer.is_urgent, n)
                for n, transfer in enumerate(self._waiting)
                if (entered := transfer.entered_at()) is not None
            ]
            begin, _, n = min(candidates)
            chosen = self._waiting.pop(n)
            chosen.wire_end = self._free_at = begin + chosen.wire_seconds
        return last.wire_end

    @contextlib.contextmanager
    def waiting_for(self, collective: str) -> Iterator[None]:
        """A context in which the computing thread waits for a collective; without an error, its time
        counts."""
        before = self._clocks()
        yield
        wall, cpu, without = (1e3 * (e - b) for b, e in zip(before, self._clocks(), strict=True))
        ms = self._traffic.waited_ms
        ms[collective] = ms.get(collective, 0.0) + wall
        self._traffic.waiting_cpu_ms += cpu
        self._traffic.waiting_for_core_ms += without

    def _clocks(self) -> tuple[float, float, float]:
        if self.times_cores:
            return time.monotonic(), time.thread_time(), seconds_without_core()
        return time.monotonic(), 0.0, 0.0

    def _account(self, started: float, ended: float, waited: float) -> None:
        """A completed transfer: seconds on the monotonic clock, and how long computation waited."""
        begin = max(started, self._last_end)
        self._last_end = max(ended, begin)
        self._traffic.all_to_all_ms += (self._last_end - begin) * 1e3
        self._traffic.exposed_ms += waited * 1e3
        if self.log is not None:
            self.log.append((begin, self._last_end))


_SCHEDULER = threading.local()
"""Per thread: the open /proc file with its time on a core and in the run queue."""


def seconds_without_core() -> float:
    """Total time in which this thread was ready and had no core; 0 where the system does not tell."""
    if not hasattr(_SCHEDULER, "file"):
        try:
            _SCHEDULER.file = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115  kept open
        except OSError:
            _SCHEDULER.file = None
    if _SCHEDULER.file is None:
        return 0.0
    return int(os.pread(_SCHEDULER.file.fileno(), 64, 0).split()[1]) * 1e-9


class _Boards:
    """Where the ranks of a group write when they entered each collective: memory that they share.

    A collective for it would cost computation as much as a small all-to-all.
    """

    _ROWS = 4096
    """More than can be under way at a time."""

    def __init__(self) -> None:
        self._boards: dict[str, tuple[torch.Tensor, itertools.count]] = {}

    def row(self, group: dist.ProcessGroup) -> torch.Tensor:
        """[ranks] float64 for the next collective of the group, zero until a rank writes. The first call is
        collective."""
        if group.group_name not in self._boards:
            self._boards[group.group_name] = self._make(group), itertools.count()
        board, counter = self._boards[group.group_name]
        n = next(counter)
        # Each rank clears its own for the next round, long before any rank gets there.
        board[(n + self._ROWS // 2) % self._ROWS][group.rank()] = 0.0
        return board[n % self._ROWS]

    def _make(self, group: dist.ProcessGroup) -> torch.Tensor:
        size = self._ROWS * group.size()
        path = [""]
        if group.rank() == 0:
            folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            handle, path[0] = tempfile.mkstemp(prefix="lancet-link-", dir=folder)
            os.truncate(handle, 8 * size)
            os.close(handle)
        try:
            with waiting("the emulated link's first all-to-all", group):
                # A broadcast goes from rank to rank, and not all would wait for the one that is missing.
                dist.barrier(group)
                dist.broadcast_object_list(path, src=dist.get_global_rank(group, 0), group=group)
                board = torch.from_file(path[0], shared=True, size=size, dtype=torch.float64)
                dist.barrier(group)
        finally:
            if group.rank() == 0:
                os.unlink(path[0])
        return board.view(self._ROWS, group.size())


class Transfer:
    """One collective of CPU ranks on the link, from its start until `finish`."""

    def __init__(self, link: Link, group: dist.ProcessGroup, size: int, is_urgent: bool = True) -> None:
        self._link, self.is_urgent = link, is_urgent
        self.wire_seconds = 0.0
        self.wire_end: float | None = None
        """When the emulated wire has carried it, once that is known."""
        self.source: int | None = None
        """The rank from which a shift comes."""
        self._place = group.rank() if link.gbps is not None else 0
        self._starts: torch.Tensor | None = None
        self._has_arrived = False
        self._done: list[float] = []
        self.started = time.monotonic()
        if link.gbps is not None:
            self._starts = link._boards.row(group)
            # Of ranks that are alike, all enter when this one does.
            self._starts[slice(None) if is_stand_in(group) else group.rank()] = time.monotonic()
            self.wire_seconds = size * 8 / (link.gbps * 1e9)
            link._waiting.append(self)

    def watch(self, work: Waitable) -> None:
        """Record when the transfer completes; the wait for it may start much later."""
        assert isinstance(work, dist.Work)
        # gloo's reduce-scatter does not say when it is complete: that counts from when it is waited for.
        with contextlib.suppress(RuntimeError):
            work.get_future().add_done_callback(lambda _: self._done.append(time.monotonic()))

    def finish(self, work: Waitable) -> None:
        """Wait for the transfer (and for the emulated wire), and account for it if it is no all-reduce."""
        link, before = self._link, time.monotonic()
        if not self.is_urgent:
            work.wait()
            self.pace()
            return
        work.wait()
        done = self._done[0] if self._done else time.monotonic()
        if self.source is not None and done - before < _INSTANT_S:
            # gloo does not say when a message came: before this rank asked.
            done = self.started if self._starts is not None else before
        if self._starts is not None:
            wire_end, entered = self.pace(), self.entered_at()
            done = max(done, wire_end)
            link._traffic.wire_exposed_ms += 1e3 * max(0.0, wire_end - max(before, entered or before))
        now = time.monotonic()
        if done > before:
            # A thread that waited has the result when it wakes up, not before.
            link._account(self.started, now, now - before)
        else:
            link._account(self.started, done, 0.0)

    def pace(self) -> float:
        """Sleep until a wire would have carried the bytes. -> when that was.

        The real transfer is complete, so all ranks that send to this one or receive from it have written when
        they entered.
        """
        self._has_arrived = True
        end = self._link._put_on_wire(self)
        remaining = end - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)
        return end

    def entered_at(self) -> float | None:
        """When the last rank entered, of a shift the later one of source and receiver; None: not all have."""
        assert self._starts is not None
        starts = self._starts.tolist()
        if self.source is not None:
            starts = [starts[self._place], starts[self.source]]
        return max(starts) if all(starts) or self._has_arrived else None


link = Link()


def emulate_link(gbps: float | None) -> None:
    """Pace every all-to-all and all-reduce of this process as if the wire carried `gbps` Gbit/s; None: as
    fast as it goes.

    Call it on every rank with the same value. CPU ranks on one machine, or one rank that stands for all.
    Raises: UserError if the bandwidth is not a positive number.
    """
    if gbps is not None and not gbps > 0:
        raise UserError("link bandwidth", got=gbps, expected="Gbit/s > 0", do="leave it out for no emulation")
    link.gbps = gbps
    link._free_at = 0.0
    link._boards = _Boards()
    link._waiting.clear()
