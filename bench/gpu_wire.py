"""Ways to run a pass over an emulated (paced) wire: `none`, `streams`, `fused`. What does each expose?

    none      stage by stage: put, all-to-all over, GEMMs, all-to-all back, the rest. Nothing overlaps.
    streams   the same launches; an all-to-all is on a second stream, beside it what a plan puts there: in the
              backward pass weight gradients of other layers beside the first, this layer's own
              weight gradients beside the second. A layer's forward pass alone has nothing to put there: it is
              that of `none`.
    fused     one launch; every chunk of rows and every tile of results counts as arrived when it is due.

    exposed communication of a way = its time - its time over an infinitely fast link, same launches

`none` and `streams` are given a good collective: on each PE it is over when the wires of all that send to it,
busy with it from its start, have carried it. The rows of the way there are stored by a put that takes no
longer than the wire, those of the way back by the second GEMM for nothing; waiting takes one warp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from emulated_wire import Detour, Messages, Wire, relay_kernel
from gpu_overlap import FusedLayer
from held_back import HeldLaunch
from virtual_pes import VirtualPes

from lancet_kernels.kernels import device, runtime
from lancet_kernels.kernels.failure_report import WAIT_ROWS, FailureReport, timed_out

WAYS = ("none", "streams", "fused")
COMM_SHARE = 0.4  # of the time of `none`, as in the Lancet paper's figure 2
TIMEOUT_S = 10.0


@triton.jit(do_not_specialize=["rank", "W", "max_polls"])
def receive_kernel(epoch_ptr, signals_ptr, rank, W, max_polls, report_ptr):
    """An all-to-all is over: what every PE sends to this one is here. Those to itself need no wire.

    Grid: (1,). signals int64 [W], by source. Example: epoch 3, W 2, rank 0: waits for 3 << 32 at [1].
    """
    epoch = tl.load(epoch_ptr)
    for step in range(1, W):
        peer = (rank + step) % W
        word = device.word(epoch, tl.full((), 0, tl.int64))
        device.wait(signals_ptr + peer, word, max_polls, report_ptr, rank, peer, WAIT_ROWS, peer)


JITTED = (relay_kernel, receive_kernel)


class Pe:
    """One PE with its wire, a second stream, and all-to-alls that are over when the wire has carried them."""

    def __init__(self, pes: VirtualPes, rank: int) -> None:
        memory = pes.memories[rank]
        self.rank, self.world, self.device = rank, pes.world, pes.device
        self.wire = Wire(pes.device, rank)
        self._signals = memory.signals("all-to-all", pes.world)
        self._epoch = torch.zeros(1, dtype=torch.int64, device=pes.device)
        self._failures = FailureReport(pes.device)
        self._side = _side_stream(pes.device, rank) if pes.device.type == "cuda" else None

    def messages(self, bytes_to: list[int]) -> Messages:
        """One to each other PE, with so many bytes; one PE has none to send to, and sends to itself."""
        peers = self._signals.peers.tolist()
        far = [p for p in range(self.world) if p != self.rank or self.world == 1]
        words = [[peers[p] + 8 * self.rank for p in far]]
        target = torch.tensor(words, dtype=torch.int64, device=self.device)
        num_bytes = torch.tensor([bytes_to[p] for p in far], dtype=torch.int64, device=self.device)
        return Messages(torch.zeros_like(target), target, num_bytes)

    def send(self, messages: Messages) -> None:
        """An all-to-all starts: the wire carries it, beside what the current stream is given."""
        self._epoch += 1
        self.wire.carry(messages, self._epoch)

    def receive(self) -> None:
        """It is over: what this PE sent and what it is sent has been carried."""
        self.wire.join()
        receive_kernel[(1,)](
            self._epoch, self._signals.local, self.rank, self.world, runtime.max_polls(TIMEOUT_S),
            self._failures.words, num_warps=1,
        )  # fmt: skip

    def check(self) -> None:
        """Raise CommunicationError if an all-to-all was not over in time."""
        failure = self._failures.first()
        if failure is not None:
            expected, seen = (f"epoch {word >> 32}" for word in (failure.expected, failure.seen))
            raise timed_out("emulated all-to-all", failure, TIMEOUT_S, expected, seen)

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
    """What a layer's routing sends, in one pass.

    Attributes:
        there, back: by PE, the messages of an all-to-all of all rows, and of their results.
        forwards, backwards: by PE, the detours of the signals of its exchanges.
        bytes_of_a_pass: of the PE that has most to send, each way.
    """

    def __init__(self, layer: FusedLayer, pes: list[Pe]) -> None:
        count_WE = torch.stack([routing.count for routing in layer.routings])
        row_bytes = layer.sizes.width * layer.x[0].element_size()
        bytes_WW = count_WE.view(layer.world, layer.world, -1).sum(2) * row_bytes
        self.there = [pe.messages(sent) for pe, sent in zip(pes, bytes_WW.tolist(), strict=True)]
        self.back = [pe.messages(sent) for pe, sent in zip(pes, bytes_WW.t().tolist(), strict=True)]
        self.forwards, self.backwards = (
            [Detour(exchange, count_WE.tolist(), loopback=layer.world == 1) for exchange in exchanges]
            for exchanges in (layer.forwards, layer.backwards)
        )
        if layer.world > 1:
            bytes_WW.fill_diagonal_(0)
        self.bytes_of_a_pass = int(bytes_WW.sum(1).max() + bytes_WW.sum(0).max())


def played(
    way: str, pe: Pe, traffic: Traffic, beside: Callable[[], object] = lambda: None
) -> tuple[Callable[[HeldLaunch], None], Callable[[HeldLaunch], None]]:
    """How the launch of a forward and of a backward pass of a PE is done the given way.

    beside: other work that a plan puts beside the backward's first all-to-all; done there on streams, before
        the pass blocking, and not at all fused, where it rides along in the launch.
    """
    there, back = traffic.there[pe.rank], traffic.back[pe.rank]

    def all_to_all(launch: HeldLaunch | None, messages: Messages) -> None:
        pe.send(messages)
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
        all_to_all(launch, there)
        launch("in")
        launch("out")
        all_to_all(None, back)
        launch("wgrad")
        launch("reduce")

    def backward_streams(launch: HeldLaunch) -> None:
        with pe.beside():
            all_to_all(launch, there)
        beside()
        pe.join()
        launch("in")
        launch("out")
        with pe.beside():
            all_to_all(None, back)
        launch("wgrad")
        pe.join()
        launch("reduce")

    def fused(detour: Detour) -> Callable[[HeldLaunch], None]:
        return lambda launch: detour.launch(launch, pe.wire)

    return {
        "none": (forward, backward_blocking),
        "streams": (forward, backward_streams),
        "fused": (fused(traffic.forwards[pe.rank]), fused(traffic.backwards[pe.rank])),
    }[way]


def rate_for(bytes_sent: int, none_ms: float) -> float:
    """GB/s with which communication takes COMM_SHARE of `none`, whose time with a fast link is none_ms.

    Example: 60 ms and 1 GB: 40 ms of wire make 100 ms, so 25 GB/s.
    """
    if runtime.INTERPRETED:
        none_ms = 0.001  # on its clock, which counts looks: a few
    return bytes_sent / (COMM_SHARE / (1 - COMM_SHARE) * none_ms) * 1e-6
