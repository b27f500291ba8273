"""Collectives on CUDA over an emulated wire: its kernels in the interpreter, its streams without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
import triton.language as tl

from lancet_kernels.kernels import runtime, wire
from lancet_kernels.ops.comm import cuda_transfer
from lancet_kernels.ops.comm.cuda_transfer import CudaStreams, CudaTransfer
from lancet_kernels.ops.comm.link import Link, Traffic

interpreted = pytest.mark.skipif(not runtime.INTERPRETED, reason="a GPU's timer cannot be set")


class Timer:
    """The GPU's timer: each look at it takes 10 ns. `events`: what happens at which time."""

    def __init__(self, now: int) -> None:
        self.now = now
        self.events: dict[int, Callable[[], object]] = {}

    def __call__(self) -> tl.tensor:
        self.now += 10
        for time in [time for time in self.events if time <= self.now]:
            self.events.pop(time)()
        return tl.full((), self.now, tl.int64)


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    timer = Timer(290)
    monkeypatch.setattr(wire, "globaltimer", timer)
    return timer


def word(value: int) -> torch.Tensor:
    return torch.tensor([value])


@interpreted
@pytest.mark.parametrize(("free", "end"), [(500, 540), (200, 340)])
def test_an_urgent_message_takes_the_wire_when_it_enters(timer: Timer, free: int, end: int) -> None:
    free_at, arrived = word(free), word(0)
    wire.take_wire_kernel[(1,)](free_at, arrived, 40)
    assert (free_at.item(), arrived.item(), timer.now) == (end, end, 300)


@interpreted
@pytest.mark.parametrize(
    ("free", "urgent_at", "end"), [(200, None, 350), (500, None, 540), (500, 400, 580), (500, 500, 580)]
)
def test_another_message_lets_urgent_ones_go_first(
    timer: Timer, free: int, urgent_at: int | None, end: int
) -> None:
    """The last: an urgent one of 40 takes the wire between the look and the taking."""
    free_at, arrived = word(free), word(0)
    if urgent_at is not None:
        timer.events[urgent_at] = lambda: free_at.add_(40)
    wire.take_free_wire_kernel[(1,)](free_at, arrived, 40)
    assert (free_at.item(), arrived.item()) == (end, end)


@interpreted
def test_a_wait_ends_with_the_message_and_in_any_case(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    wire.await_wire_kernel[(1,)](word(540))
    assert timer.now == 540
    monkeypatch.setattr(wire, "LONGEST_WAIT_NS", tl.constexpr(1000))
    wire.await_wire_kernel[(1,)](word(2**62))
    assert timer.now == 540 + 10 + 1000
    wire.take_free_wire_kernel[(1,)](word(2**62), word(0), 40)


@dataclass
class FakeStream:
    """A stream of a GPU that there is not: it notes what it is to do."""

    name: str
    log: list[str]

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits for event {event.number}")


@dataclass
class FakeGpu:
    """Takes the place of torch.cuda."""

    log: list[str] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    events: int = 0

    def __post_init__(self) -> None:
        self.current = FakeStream("compute", self.log)
        self.names = iter(("entry", "urgent", "other"))

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(next(self.names), self.log)

    def Event(self, enable_timing: bool) -> FakeEvent:
        self.events += 1
        return FakeEvent(self, self.events)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def current_stream(self) -> FakeStream:
        return self.current

    def synchronize(self) -> None:
        self.log.append("host waits")


@dataclass
class FakeEvent:
    gpu: FakeGpu
    number: int

    def record(self) -> None:
        self.gpu.log.append(f"{self.gpu.current.name} records event {self.number}")

    def elapsed_time(self, other: FakeEvent) -> float:
        return float(other.number - self.number)


class FakeWork:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    def wait(self) -> None:
        self.gpu.log.append(f"{self.gpu.current.name} waits for the copy")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr(torch, "cuda", gpu)

    def launch(kernel: object, grid: tuple[int, ...], **arguments: object) -> None:
        gpu.log.append(f"{gpu.current.name} runs {kernel.__name__.removesuffix('_kernel')}")

    monkeypatch.setattr("lancet_kernels.kernels.runtime.launch", launch)
    return gpu


@pytest.mark.parametrize(
    ("urgent", "wire_ns", "log"),
    [
        (
            True,
            40,
            "compute records event 1, entry waits for the copy, entry runs take_wire, "
            "urgent waits for entry, urgent waits for the copy, urgent runs await_wire, "
            "urgent records event 2, compute records event 3, compute waits for the copy, "
            "compute waits for event 2, compute records event 4",
        ),
        (
            False,
            40,
            "compute records event 1, other waits for the copy, other runs take_free_wire, "
            "other runs await_wire, other records event 2, compute records event 3, "
            "compute waits for the copy, compute waits for event 2, compute records event 4",
        ),
        (
            True,
            0,
            "compute records event 1, urgent waits for the copy, urgent records event 2, "
            "compute records event 3, compute waits for the copy, compute waits for event 2, "
            "compute records event 4",
        ),
    ],
)
def test_computation_waits_for_the_wire_where_it_reads(
    gpu: FakeGpu, urgent: bool, wire_ns: int, log: str
) -> None:
    transfer = CudaTransfer(CudaStreams(torch.device("cpu")), "all_to_all", wire_ns, urgent)
    transfer.watch(FakeWork(gpu))
    transfer.finish(FakeWork(gpu))
    assert ", ".join(gpu.log) == log


def test_times_are_added_by_collective(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of gradients is no all-to-all, and the host's own waits do not count."""
    own, streams = Link(), CudaStreams(torch.device("cpu"))
    own._cuda_streams[0] = streams
    own._traffic.waited_ms["all_to_all"] = 7.0
    for collective, urgent in (("all_to_all", True), ("all_reduce", False), ("all_to_all", True)):
        CudaTransfer(streams, collective, 40, urgent).finish(FakeWork(gpu))
    traffic = own.read()
    assert traffic.waited_ms == {"all_to_all": 2.0, "all_reduce": 1.0}
    assert (traffic.all_to_all_ms, traffic.exposed_ms, traffic.wire_exposed_ms) == (2.0, 2.0, 2.0)
    assert own.read() == Traffic()


def test_each_message_has_its_own_word(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_transfer, "_SLOTS", 3)
    streams = CudaStreams(torch.device("cpu"))
    words = [streams.next_end().data_ptr() for _ in range(4)]
    assert len(set(words[:3])) == 3
    assert words[3] == words[0]
