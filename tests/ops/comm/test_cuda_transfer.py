"""Collectives on CUDA over an emulated wire: its streams without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from lancet_kernels.ops.comm import cuda_transfer
from lancet_kernels.ops.comm.cuda_transfer import CudaStreams, CudaTransfer
from lancet_kernels.ops.comm.link import Link, Traffic


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
        self.names = iter(("wire",))

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

    def sleep_on_stream(stream: FakeStream, duration_ns: int) -> None:
        gpu.log.append(f"{stream.name} sleeps {duration_ns} ns")

    monkeypatch.setattr(cuda_transfer, "sleep_on_stream", sleep_on_stream)
    return gpu


@pytest.mark.parametrize(("wire_ns", "sleep"), [(40, "wire sleeps 40 ns, "), (0, "")])
def test_computation_waits_for_the_wire_where_it_reads(gpu: FakeGpu, wire_ns: int, sleep: str) -> None:
    transfer = CudaTransfer(CudaStreams(torch.device("cpu")), "all_to_all", wire_ns, is_urgent=True)
    transfer.watch(FakeWork(gpu))
    transfer.finish(FakeWork(gpu))
    assert ", ".join(gpu.log) == (
        f"compute records event 1, wire waits for the copy, {sleep}wire records event 2, "
        "compute records event 3, compute waits for the copy, compute waits for event 2, "
        "compute records event 4"
    )


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


@pytest.mark.parametrize(("code", "duration_ns"), [(0, 30_000_000), (0, 10**15), (719, 0)])
def test_the_driver_is_told_to_sleep(monkeypatch: pytest.MonkeyPatch, code: int, duration_ns: int) -> None:
    """A driver that runs host functions at once, and may refuse."""

    class Driver:
        def cuLaunchHostFunc(
            self, stream: ctypes.c_void_p, function: ctypes.c_void_p, data: ctypes.c_void_p
        ) -> int:
            assert stream.value == 5
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.value)(data)
            return code

    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver() if name == "libcuda.so.1" else load(name))
    monkeypatch.setattr(cuda_transfer, "_LONGEST_SLEEP_NS", 50_000_000)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="error 719") if code else contextlib.nullcontext():
        cuda_transfer.sleep_on_stream(SimpleNamespace(cuda_stream=5), duration_ns)
    assert time.monotonic() - begin >= min(duration_ns, 50_000_000) * 1e-9
