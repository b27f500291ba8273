"""The link: what it counts, and when an emulated wire is done. A fake clock, so that nothing waits."""

import time
from collections.abc import Iterator

import pytest
import torch

from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm import link as module
from lancet_kernels.ops.comm.link import Link, Traffic, Transfer, emulate_link


class FakeTime:
    """Stands for the module `time`: sleeping moves the clock."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class FakeWork:
    """A collective that takes so long once waited for."""

    def __init__(self, clock: FakeTime, seconds: float = 0.0) -> None:
        self.clock, self.seconds = clock, seconds

    def wait(self) -> None:
        self.clock.now += self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def unpaced() -> Iterator[None]:
    yield
    emulate_link(None)
    module.link.read()


def paced_transfer(link: Link, seconds: float, *starts: float, urgent: bool = True) -> Transfer:
    """A transfer that takes so long on the wire, whose ranks entered at `starts`; without a process group.

    Args: urgent: False for an all-reduce.
    """
    transfer = link.start(None, sent=1, received=0, cuda=False)
    transfer._starts = torch.tensor(starts, dtype=torch.float64)
    transfer.wire_seconds, transfer.is_urgent = seconds, urgent
    link._waiting.append(transfer)
    return transfer


def test_all_reduces_share_the_wire_by_the_rule_of_the_clock(clock: FakeTime) -> None:
    """As in `schedules.time.simulate`: R 100-105 is not interrupted by X at 102; X goes before S. T, which
    not all ranks have entered, holds nobody up."""
    link = Link()
    reduced = paced_transfer(link, 5, 100.0, 99.0, urgent=False)
    other = paced_transfer(link, 3, 101.0, 101.0, urgent=False)
    late = paced_transfer(link, 9, 101.5, 0.0, urgent=False)
    sent = paced_transfer(link, 2, 102.0, 102.0)
    sent.finish(FakeWork(clock))
    assert (reduced.wire_end, sent.wire_end, clock.now) == (105, 107, pytest.approx(107))
    assert link.read().all_to_all_ms == pytest.approx(7000)  # 100 to 107: it was issued at 100
    assert other.pace() == 110
    late._starts[1] = 120.0
    clock.now = 121.0
    assert late.pace() == 129
    assert reduced.pace() == 105
    assert clock.now == pytest.approx(129)


def test_unpaced_link_only_measures(clock: FakeTime) -> None:
    link = Link()
    transfer = link.start(None, sent=1000, received=3000, cuda=False)
    clock.now += 0.25
    transfer.finish(FakeWork(clock, 0.5))
    traffic = link.read()
    assert (traffic.bytes_sent, traffic.count) == (1000, 1)
    assert traffic.all_to_all_ms == pytest.approx(750)
    assert traffic.exposed_ms == pytest.approx(500)
    assert clock.slept == []
    assert link.read() == Traffic()


def test_a_transfer_lasts_as_long_as_its_bytes(clock: FakeTime) -> None:
    """One second, from when the last rank entered; computation hides it."""
    link = Link()
    transfer = paced_transfer(link, 1, 100.0, 100.5)
    clock.now = 100.7
    transfer.finish(FakeWork(clock))
    assert clock.now == pytest.approx(101.5)
    traffic = link.read()
    assert traffic.all_to_all_ms == pytest.approx(1500)
    assert traffic.exposed_ms == pytest.approx(800)
    hidden, slept = paced_transfer(link, 1, clock.now), len(clock.slept)
    clock.now += 3
    hidden.finish(FakeWork(clock))
    assert len(clock.slept) == slept
    assert link.read().exposed_ms == pytest.approx(0)


def test_waiting_is_part_of_the_transfer(clock: FakeTime) -> None:
    """A rank that is woken late waited longer than the bytes took: so long the transfer was."""
    link = Link()
    transfer = link.start(None, sent=1, received=1, cuda=False)

    class LateWork(FakeWork):
        def wait(self) -> None:
            transfer._done.append(self.clock.now + 0.25)
            super().wait()

    clock.now += 0.5
    transfer.finish(LateWork(clock, 1.0))
    traffic = link.read()
    assert (traffic.all_to_all_ms, traffic.exposed_ms) == (pytest.approx(1500), pytest.approx(1000))


def test_nobody_waits_for_what_is_done(clock: FakeTime) -> None:
    link = Link()
    transfer = link.start(None, sent=1, received=1, cuda=False)
    transfer._done.append(clock.now + 0.5)
    clock.now += 2
    transfer.finish(FakeWork(clock, 0.01))
    traffic = link.read()
    assert (traffic.all_to_all_ms, traffic.exposed_ms) == (pytest.approx(500), 0)


def test_the_wire_carries_one_transfer_at_a_time(clock: FakeTime) -> None:
    """Two of one second each, begun together, end after one and after two seconds; idle time is not saved."""
    link = Link()
    transfers = [paced_transfer(link, 1, begin) for begin in (100.0, 100.0, 110.0)]
    for transfer, begin, end in zip(transfers, (100.0, 101.0, 110.0), (101.0, 102.0, 111.0), strict=True):
        clock.now = begin
        transfer.finish(FakeWork(clock))
        assert clock.now == pytest.approx(end)


def test_full_duplex_the_larger_direction_counts() -> None:
    link = Link()
    link.start(None, sent=10, received=70, cuda=False)
    link.start(None, sent=90, received=70, cuda=False)
    traffic = link.read()
    assert (traffic.bytes_sent, traffic.bytes_on_wire) == (100, 160)


@pytest.mark.parametrize("gbps", [0, -1.0, float("nan")])
def test_bandwidth_must_be_positive(gbps: float) -> None:
    with pytest.raises(UserError, match=r"link bandwidth: got .*, expected Gbit/s > 0"):
        emulate_link(gbps)
    assert module.link.gbps is None


def test_emulation_can_be_turned_off() -> None:
    emulate_link(2.5)
    assert module.link.gbps == 2.5
    module.link._free_at = 1e9
    emulate_link(None)
    assert module.link.gbps is None
    assert module.link._free_at == 0.0


def test_a_rank_that_neither_sends_nor_receives_holds_nobody_up(clock: FakeTime) -> None:
    """What was sent has arrived before the second rank, which has no tokens, enters: 100 to 103."""
    link = Link()
    transfer = paced_transfer(link, 3, 100.0, 0.0)
    transfer.finish(FakeWork(clock))
    assert transfer.wire_end == 103.0
    assert clock.now == 103.0


def test_cores_are_timed_only_where_that_is_asked_for() -> None:
    link = Link()
    for asked in (False, True):
        link.times_cores = asked
        with link.waiting_for("all_to_all"):
            end = time.thread_time() + 0.002
            while time.thread_time() < end:
                pass
        traffic = link.read()
        assert traffic.waited_ms["all_to_all"] > 1.9
        assert (traffic.waiting_cpu_ms > 1.9) == asked
