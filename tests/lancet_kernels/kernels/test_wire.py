"""The emulated wire: when is what due, who waits for it, and does pacing change anything but time?

In the interpreter the clock is a word that goes on by 100 ns with every look, so tests set it and read it.
"""

import math

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from lancet_kernels.errors import CommunicationError, UserError
from lancet_kernels.kernels import device, runtime, wire
from lancet_kernels.kernels.wire import TICK_NS, Wire, fs_per_byte
from lancet_kernels.symmetric import NvshmemMemory, virtual_memories
from tests.lancet_kernels.kernels.overlap_cases import Case
from tests.lancet_kernels.kernels.overlap_ranks import (
    GuardedMemory,
    check_rows,
    check_same,
    make_layer,
    poisoned_buffers,
)

pytestmark = pytest.mark.skipif(not runtime.INTERPRETED, reason="only the interpreter's clock can be set")
TICK = TICK_NS.value
MIB = 1 << 20
LOOKS = 10**6  # by the clock: plenty


@triton.jit
def book_kernel(wire_ptr, peer, num_bytes, out_ptr):
    tl.store(out_ptr, wire.book(wire_ptr, peer, tl.cast(num_bytes, tl.int64)))


@triton.jit
def put_due_kernel(dues_ptr, peers_ptr, peer, index, due):
    wire.put_due(dues_ptr, peers_ptr, peer, index, tl.cast(due, tl.int64))


@triton.jit
def wait_kernel(words_ptr, at_least, max_polls, report_ptr, wire_ptr, out_ptr):
    """Word 0 is due at word 1."""
    at_least = tl.cast(at_least, tl.int64)
    seen = device.wait(words_ptr, at_least, max_polls, report_ptr, 0, 1, 2, 0, False, wire_ptr, words_ptr + 1)
    tl.store(out_ptr, seen)


@triton.jit
def wait_all_kernel(words_ptr, at_least, max_polls, report_ptr, wire_ptr, SIZE: tl.constexpr):
    """Words [SIZE], then when they are due."""
    at_least = tl.cast(at_least, tl.int64)
    i = tl.arange(0, SIZE)
    device.wait_all(
        words_ptr + i, i >= 0, at_least, max_polls, report_ptr, 0, i, 2, i, SIZE, False, wire_ptr,
        words_ptr + SIZE + i,
    )  # fmt: skip


def book(of: Wire, peer: int, num_bytes: int, now_ns: int | None = None) -> int:
    """Book at the time now_ns, which is what the next look finds."""
    out = torch.zeros(1, dtype=torch.int64)
    if now_ns is not None:
        of.now().fill_(now_ns - TICK)
    book_kernel[(1,)](of.words, peer, num_bytes, out)
    return int(out)


def wires(world: int, gb_per_s: float, **options: bool) -> list[Wire]:
    made = [Wire(memory, **options) for memory in virtual_memories(world)]
    for each in made:
        each.pace(gb_per_s)
    return made


def test_bytes_become_time():
    assert fs_per_byte(40) == 25_000
    assert fs_per_byte(900) == 1_111
    assert fs_per_byte(math.inf) == 0


def test_the_wire_carries_one_thing_after_the_other():
    """The example of the module: 1 MiB takes 26,214 ns; the wire idles before the third."""
    (one,) = wires(1, 40, loopback=True)
    assert [book(one, 0, MIB, now) for now in (5_000, 6_000, 100_000)] == [31_214, 57_428, 126_214]
    assert book(one, 0, 0, 110_000) == 126_214, "nothing takes no time, but its turn"


def test_every_pe_has_a_wire_of_its_own():
    first, second = wires(2, 40)
    assert book(first, 1, MIB, 5_000) == 31_214
    # The other way at the same time, on the same clock.
    first.now().fill_(5_000 - TICK)
    assert book(second, 0, MIB) == 31_214
    assert int(first.now()) == 5_000


def test_rows_to_oneself_and_without_a_pace_are_there_at_once():
    first, _ = wires(2, 40)
    assert book(first, 0, MIB, 5_000) == 0
    first.pace(math.inf)
    assert book(first, 1, MIB, 5_000) == 0


def test_the_latest_of_several_dues_counts():
    memories = virtual_memories(2)
    dues = [memory.signals("dues", 3) for memory in memories]
    for due in (500, 700, 0, 600):
        put_due_kernel[(1,)](dues[0].local, dues[0].peers, 1, 2, due)
    assert dues[1].local.tolist() == [0, 0, 700]
    assert dues[0].local.tolist() == [0, 0, 0]


def test_a_wait_lasts_until_what_was_signalled_is_due():
    (one,) = wires(1, 40)
    report, out = torch.zeros(8, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    one.now().fill_(1_000)
    wait_kernel[(1,)](torch.tensor([7, 0]), 7, LOOKS, report, one.words, out)
    assert (int(out), int(one.now())) == (7, 1_000), "what took no wire is not timed"
    wait_kernel[(1,)](torch.tensor([7, 3_050]), 7, LOOKS, report, one.words, out)
    assert (int(out), int(one.now())) == (7, 3_100), "the first look at which it is due"
    words = torch.tensor([7, 7, 7, 7, 0, 5_000, 9_000, 4_000])
    wait_all_kernel[(1,)](words, 7, LOOKS, report, one.words, SIZE=4)
    assert int(one.now()) == 9_000
    assert not report.any()


def test_a_wait_for_what_is_due_too_late_is_reported():
    (one,) = wires(1, 40)
    for launch, words in (
        (lambda *a: wait_kernel[(1,)](*a, torch.zeros(1, dtype=torch.int64)), [7, 10**15]),
        (lambda *a: wait_all_kernel[(1,)](*a, SIZE=2), [7, 7, 10**15, 0]),
    ):
        report = torch.zeros(8, dtype=torch.int64)
        launch(torch.tensor(words), 7, 50, report, one.words)
        assert report[0] == 1, "claimed"


def test_bad_wires_are_refused():
    (one,) = wires(1, 40)
    for rate in (0.0, -1.0, math.nan):
        with pytest.raises(UserError, match="rate of an emulated wire"):
            one.pace(rate)
    with pytest.raises(UserError, match="emulated wire: got NvshmemMemory"):
        Wire(object.__new__(NvshmemMemory))


CASE = Case(local=1, tokens=24, capacity=20, width=32, hidden=16)


def paced_on_rank(case: Case, gb_per_s: float) -> tuple[list[int], int, int, int]:
    """Passes over a fast and a slow wire give the same bits.

    -> when rows and results here were due over the slow one, when its wire was free, rows sent away forward,
    and what the clock says in the end.
    """
    with GuardedMemory(timeout_s=30) as memory:
        answers = []
        for number, rate in enumerate((None, math.inf, gb_per_s)):
            link = None if rate is None else Wire(memory, f"wire{number}")
            if link is not None:
                link.pace(rate)
            with poisoned_buffers():
                layer = make_layer(memory, f"{number}", case, wire=link)
                answers.append(layer.run())
            layer.check()
            if rate is None:
                check_rows(layer)
        for answer in answers[1:]:
            check_same(answer, answers[0], f"{case} paced")
        # Whoever reads the clock last has seen everybody's last look.
        memory.barrier()
        banks = layer.forward.banks
        dues = [
            region.local[banks:].flatten()
            for exchange in (layer.forward, layer.backward)
            for region in (exchange.arrived, exchange.returned)
        ]
        count = layer.routing.count.view(case.world, -1).sum(1)
        away = int(count.sum() - count[memory.rank])
        return torch.cat(dues).tolist(), int(link.words[1]), away, int(link.now())


def test_pacing_changes_no_bit_and_everything_comes_when_due(pool):
    """Two processes on one clock. Row bytes: 4 * 32 = 128; at 2 GB/s one takes 64 ns."""
    found = pool.run(paced_on_rank, CASE, 2.0)
    now = found[0][3]
    for dues, free, away, _ in found:
        assert max(dues) <= now, "somebody went on before what it waited for was due"
        assert max(dues) <= max(other[1] for other in found)
        # Rows there and back, forward and backward: two of them are what came from the peer.
        back = sum(other[2] for other in found) - away
        booked = 2 * (away + back) * 64
        assert booked <= free <= now + booked, "what was booked one after the other"


def absent_on_rank(case: Case) -> str:
    with GuardedMemory(timeout_s=50) as memory:
        link = Wire(memory)
        link.pace(1.0)
        layer = make_layer(memory, "layer", case, wire=link)
        layer.forward.timeout_s = 0.2
        said = ""
        if dist.get_rank() == 0:
            layer.run_forward()
            try:
                layer.forward.check()
            except CommunicationError as error:
                said = str(error)
        memory.barrier()
        return said


def test_a_pe_that_never_comes_is_reported_all_the_same(pool):
    """Bounded is what answers at all."""
    assert "PE 0 waited for PE 1 to send its counts" in pool.run(absent_on_rank, CASE)[0]
