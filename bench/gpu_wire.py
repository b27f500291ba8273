"""Ways to run a pass over an emulated (paced) wire: `none`, `streams`, `fused`. What does each expose?

    none      stage by stage: put, all-to-all over, GEMMs, all-to-all back, the rest. Nothing overlaps.
    streams   the same launches; an all-to-all is on a second stream, beside it what a plan puts there: in the
              backward pass weight gradients of other layers and dweight beside the first, this layer's own
              weight gradients beside the second. A layer's forward pass alone has nothing to put there: it is
              that of `none`.
    fused     one launch; every chunk of rows and every tile of results counts as arrived when it is due.

    exposed communication of a way = its time - its time over an infinitely fast link, same launches

`none` and `streams` are given a good collective: the rows of the way there are stored by a put that takes no
longer than the wire, those of the way back by the second GEMM for nothing, and waiting takes one warp.
Its bytes are booked when it starts; it is over when all that was sent to this PE is due.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from gpu_overlap import FusedLayer
from held_back import HeldLaunch, staged
from torch import Tensor
from virtual_pes import VirtualPes

from lancet_kernels.errors import CommunicationError
from lancet_kernels.kernels import device, runtime, wire
from lancet_kernels.kernels.wire import Wire

WAYS = ("none", "streams", "fused")
COMM_SHARE = 0.4  # of the time of `none`, as in the Lancet paper's figure 2
TIMEOUT_S = 10.0


@triton.jit(do_not_specialize=["rank", "W", "row_bytes"])
def send_kernel(
    epoch_ptr, rows_ptr, row_bytes, signals_ptr, peers_ptr, rank, W, wire_ptr
):  # fmt: skip
    """An all-to-all starts: book the wire for rows[p] * row_bytes to each PE p, tell it when they are due.

    Grid: (1,). rows int64 [W]; signals [2, 2, W]: words by parity of the epoch and source, then their dues.
    Example: epoch 3, rank 0, rows [4, 2], 100 bytes each: PE 1 finds 3 << 32 at [0, 1, 0], at [1, 1, 0] when
    200 bytes are there.
    """
    epoch = tl.load(epoch_ptr) + 1
    for step in range(1, W + 1):
        peer = (rank + step) % W
        due = wire.book(wire_ptr, peer, tl.load(rows_ptr + peer) * row_bytes)
        index = epoch % 2 * W + rank
        wire.put_due(signals_ptr, peers_ptr, peer, 2 * W + index, due)
        device.put_signal(signals_ptr, peers_ptr, peer, index, device.word(epoch, 0), False)
    tl.store(epoch_ptr, epoch)


@triton.jit(do_not_specialize=["rank", "W", "max_polls"])
def receive_kernel(epoch_ptr, signals_ptr, rank, W, max_polls, report_ptr, wire_ptr):
    """An all-to-all is over: what every PE sends to this one is due.

    Grid: (1,). Example: epoch 3, W 2: waits for 3 << 32 at [0, 1, 0] and [0, 1, 1] and their dues.
    """
    epoch = tl.load(epoch_ptr)
    for peer in range(W):
        index = epoch % 2 * W + peer
        device.wait(
            signals_ptr + index, device.word(epoch, 0), max_polls, report_ptr, rank, peer, 0, index, False,
            wire_ptr, signals_ptr + 2 * W + index,
        )  # fmt: skip


JITTED = (send_kernel, receive_kernel)


class Pe:
    """One PE with its wire, a second stream, and all-to-alls that are over when the wire has carried them."""

    def __init__(self, pes: VirtualPes, rank: int) -> None:
        memory = pes.memories[rank]
        self.rank, self.world, self.device = rank, pes.world, pes.device
        # One PE has none to send to: in smoke runs it sends to itself.
        self.wire = Wire(memory, loopback=pes.world == 1)
        self._signals = memory.signals("all-to-all", 4 * pes.world)
        self._epoch = torch.zeros(1, dtype=torch.int64, device=pes.device)
        self._report = torch.zeros(device.REPORT_WORDS.value, dtype=torch.int64, device=pes.device)
        self._side = _side_stream(pes.device, rank) if pes.device.type == "cuda" else None

    def send(self, rows_W: Tensor, row_bytes: int) -> None:
        send_kernel[(1,)](
            self._epoch, rows_W, row_bytes, self._signals.local, self._signals.peers, self.rank, self.world,
            self.wire.words, num_warps=1,
        )  # fmt: skip

    def receive(self) -> None:
        receive_kernel[(1,)](
            self._epoch, self._signals.local, self.rank, self.world, runtime.max_polls(TIMEOUT_S),
            self._report, self.wire.words, num_warps=1,
        )  # fmt: skip

    def check(self) -> None:
        """Raise CommunicationError if an all-to-all was not over in time."""
        claimed, rank, peer, *_ = self._report.tolist()
        if claimed:
            raise CommunicationError(f"emulated all-to-all: PE {rank} waited for PE {peer} too long")

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, launches go to the second stream, after what the first one has been given."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """What comes waits for the second stream."""
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)


@functools.cache
def _side_stream(device: torch.device, rank: int) -> torch.cuda.Stream:
    """The same one for every part that is measured: the memory freed on it is used again on it."""
    return torch.cuda.Stream(device)


def pace(pes: list[Pe], gb_per_s: float) -> None:
    for pe in pes:
        pe.wire.pace(gb_per_s)


class Traffic:
    """What a layer's routing sends: rows[p] of this PE to PE p on the way there, and on the way back."""

    def __init__(self, layer: FusedLayer) -> None:
        count = torch.stack([routing.count.view(layer.world, -1).sum(1) for routing in layer.routings])
        self.there = list(count)
        self.back = [c.contiguous() for c in count.t()]
        self.row_bytes = layer.sizes.width * layer.x[0].element_size()
        away = count if layer.world == 1 else count * ~torch.eye(layer.world, dtype=bool, device=count.device)
        # Of the PE that has most to send, each way.
        self.bytes_of_a_pass = int(away.sum(1).max() + away.sum(0).max()) * self.row_bytes


def played(
    way: str, layer: FusedLayer, pe: Pe, traffic: Traffic, beside: Callable[[], object] = lambda: None
) -> tuple[Callable[[HeldLaunch], None], Callable[[HeldLaunch], None]]:
    """How the launch of a forward and of a backward pass of a PE is done the given way.

    beside: other work that a plan puts beside the backward's first all-to-all; done there on streams, before
        the pass blocking, and not at all fused, where it rides along in the launch.
    """
    there, back, row_bytes = traffic.there[pe.rank], traffic.back[pe.rank], traffic.row_bytes

    def all_to_all(launch: HeldLaunch | None, rows_W: Tensor) -> None:
        pe.send(rows_W, row_bytes)
        if launch is not None:
            launch("put")
        pe.receive()

    def forward(launch: HeldLaunch) -> None:
        all_to_all(launch, there)
        launch("in")
        launch("out")
        all_to_all(None, back)
        launch("reduce")

    def backward_blocking(launch: HeldLaunch) -> None:
        beside()
        launch("dweight")
        all_to_all(launch, there)
        launch("in")
        launch("out")
        all_to_all(None, back)
        launch("wgrad")
        launch("reduce")

    def backward_streams(launch: HeldLaunch) -> None:
        with pe.beside():
            all_to_all(launch, there)
        launch("dweight")
        beside()
        pe.join()
        launch("in")
        launch("out")
        with pe.beside():
            all_to_all(None, back)
        launch("wgrad")
        pe.join()
        launch("reduce")

    def one(launch: HeldLaunch) -> None:
        launch("put in out wgrad dense reduce dweight")

    return {
        "none": (forward, backward_blocking),
        "streams": (forward, backward_streams),
        "fused": (one, one),
    }[way]


@contextmanager
def on_the_way(way: str, exchanges: list, pe: Pe, run: Callable[[HeldLaunch], None]) -> Iterator[None]:
    """Inside, a pass of a PE is launched by `run`; chunks and tiles take the wire only if fused."""
    for exchange in exchanges:
        exchange.wire = pe.wire if way == "fused" else None
    with staged(run):
        yield


def rate_for(bytes_sent: int, none_ms: float) -> float:
    """GB/s with which communication takes COMM_SHARE of `none`, whose time with a fast link is none_ms.

    Example: 60 ms and 1 GB: 40 ms of wire make 100 ms, so 25 GB/s.
    """
    if runtime.INTERPRETED:
        none_ms = 0.01  # on its clock, which counts looks
    return bytes_sent / (COMM_SHARE / (1 - COMM_SHARE) * none_ms) * 1e-6
