"""The emulated wire: when is a signal handed on, which take it, and does pacing change anything but time?

In the interpreter the clock is a word that goes on by 100 ns with every look, so tests set it and read it.
"""

import math

import pytest
import torch
from emulated_wire import CLOCK, TICK_NS, Detour, Messages, Wire, chunks_of, fs_per_byte, relay_kernel
from gpu_paced import PacedLayer
from gpu_sizes import Sizes
from gpu_wire import JITTED, pace
from held_back import staged

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import runtime
from tests.lancet_kernels.kernels.overlap_cases import Case
from tests.lancet_kernels.kernels.overlap_ranks import (
    GuardedMemory,
    answer_of,
    check_rows,
    check_same,
    make_layer,
    poisoned_buffers,
)

interpreted = pytest.mark.skipif(not runtime.INTERPRETED, reason="only the interpreter's clock can be set")
MIB = 1 << 20
TICK = TICK_NS.value
CPU = torch.device("cpu")


def test_bytes_become_time() -> None:
    assert fs_per_byte(40) == 25_000
    assert fs_per_byte(900) == 1_111
    assert fs_per_byte(math.inf) == 0


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_bad_rates_are_refused(rate: float) -> None:
    with pytest.raises(UserError, match="rate of an emulated wire"):
        Wire(CPU, 0).pace(rate)


def relay(
    sizes: list[int], signalled: list[bool], until_ns: int, gb_per_s: float = 40.0
) -> tuple[list[bool], int]:
    """Messages of epoch 3, from 5,000 ns on, without a pause. -> which were handed on, and the time then."""
    word = 3 << 32
    source = torch.tensor([word if there else word - 1 for there in signalled])
    target = torch.zeros(2, len(sizes), dtype=torch.int64)
    wire = Wire(CPU, 0)
    wire.pace(gb_per_s)
    wire.words[CLOCK.value] = 5_000 - TICK
    addresses = [[t.data_ptr() + 8 * i for i in range(len(sizes))] for t in (source, target[1])]
    other_bank = [0] * len(sizes)
    looks = (until_ns - 5_000) // TICK + 1
    relay_kernel[(1,)](
        torch.tensor([3]), torch.tensor([other_bank, addresses[0]]), torch.tensor([other_bank, addresses[1]]),
        torch.tensor(sizes), wire.words, 2, len(sizes), looks, SIZE=4,
    )  # fmt: skip
    assert set(target.flatten().tolist()) <= {0, word}
    assert not target[0].any(), "a word of the other bank"
    return (target[1] != 0).tolist(), int(wire.words[CLOCK.value])


@interpreted
def test_the_wire_carries_one_thing_after_the_other() -> None:
    """1 MiB at 40 GB/s takes 26,214 ns: from 5,000 on they are due at 31,214 and 57,428."""
    assert relay([MIB, MIB], [True, True], 31_200)[0] == [False, False]
    assert relay([MIB, MIB], [True, True], 31_300)[0] == [True, False]
    assert relay([MIB, MIB], [True, True], 57_400)[0] == [True, False]
    assert relay([MIB, MIB], [True, True], 90_000) == ([True, True], 57_500), "and then it ends"


@interpreted
def test_what_is_not_signalled_does_not_take_the_wire() -> None:
    assert relay([MIB, MIB], [False, True], 31_300) == ([False, True], 31_300)


@interpreted
def test_without_a_pace_everything_is_handed_on_at_once() -> None:
    assert relay([MIB, 0], [True, True], 90_000, math.inf) == ([True, True], 5_000)


def test_the_example_of_the_schedule() -> None:
    """That of schedule.py: 2 PEs with 3 experts each, tiles of 4 rows; computed by hand."""
    count = [[2, 5, 0, 1, 0, 3], [3, 1, 0, 4, 2, 0]]
    there, back = chunks_of(count, 1, 3, 4)
    # Tiles 0, 1, 3 of PE 0; tiles 0, 1 and 2 of its own.
    assert there == [(0, 1, 2), (0, 3, 1), (0, 7, 1), (1, 1, 3), (1, 3, 1), (1, 5, 2)]
    # Chunk numbers: first_send // 4 + 2 e + tile - before // 4.
    assert back == [(0, 1 + 6, 1), (1, 1 + 6, 3), (1, 1 + 6 + 1, 1), (1, 2 + 8, 2), (0, 2 + 10, 3)]


CASE = Case(local=1, tokens=24, capacity=20, width=32, hidden=16)
PACE = 2.0


def paced_on_rank(case: Case) -> list[int]:
    """A pass over a slow wire gives the same bits. -> ns on its clock there and back, rows sent away."""
    with GuardedMemory(timeout_s=30) as memory:
        with poisoned_buffers():
            straight = make_layer(memory, "straight", case)
            expected = straight.run()
        straight.check()
        count = torch.zeros(case.world, case.experts, dtype=torch.int64)
        count[memory.rank] = straight.routing.count
        torch.distributed.all_reduce(count)
        with poisoned_buffers():
            layer = make_layer(memory, "paced", case)
            times = []

            def passed(exchange, run):
                wire = Wire(CPU, memory.rank)
                wire.pace(PACE)
                detour = Detour(exchange, count.tolist())
                with staged(lambda launch: detour.launch(launch, wire)):
                    answer = run()
                assert not any(box[memory.rank].any() for box in detour._outboxes), "own rows took the wire"
                times.append(int(wire.words[CLOCK.value]))
                return answer

            out, saved = passed(layer.forward, layer.run_forward)
            answer = answer_of(out, passed(layer.backward, lambda: layer.run_backward(saved)))
        layer.check()
        check_rows(layer)
        check_same(answer, expected, f"{case} paced")
        by_peer = count.view(case.world, case.world, -1).sum(2)
        away = by_peer.sum(1) + by_peer.sum(0) - 2 * by_peer.diag()
        return [*times, int(away[memory.rank])]


@interpreted
@pytest.mark.long
def test_pacing_changes_no_bit_and_takes_its_time(pool) -> None:
    """Two processes. Row bytes: 4 * 32 = 128; at 2 GB/s a row takes 64 ns of its sender's wire."""
    for forward_ns, backward_ns, away in pool.run(paced_on_rank, CASE):
        assert away > 0
        for taken in (forward_ns, backward_ns):
            assert taken >= 64 * away


@pytest.mark.gpu
def test_a_paced_layer_takes_its_time_and_changes_no_bit() -> None:
    """What a PE sends takes some 40 ms of its wire; unpaced far less. Fused alone: few kernels to compile."""
    sizes = Sizes("small", tokens=2048, width=256, hidden=192, experts=8, choices=2)
    paced = PacedLayer(sizes, 2, torch.device("cuda"), torch.bfloat16)
    paced.virtual.rehearse(
        lambda rank: (paced.forward("fused", rank), paced.backward("fused", rank)), *JITTED
    )

    def elapsed_ms(work) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    _, expected = paced.once("fused", elapsed_ms)
    pace(paced.pes, 2 * paced.traffic.bytes_of_a_pass / 40e6)
    ms, answers = paced.once("fused", elapsed_ms)
    paced.check()
    # Both PEs send nearly as much as the one that sends most.
    assert 35 < sum(ms.values()) < 120
    assert all(map(torch.equal, answers, expected))


def test_messages_of_both_ways_are_one_list() -> None:
    one, two = (Messages(torch.full((2, n), n), torch.full((2, n), -n), torch.arange(n)) for n in (1, 2))
    assert (one + two).source.tolist() == [[1, 2, 2], [1, 2, 2]]
    assert (one + two).num_bytes.tolist() == [0, 0, 1]
