"""The protocol of the overlap kernel: epochs and rows kept, and ranks that do not come.

What comes too late is an error or NaN, never a wrong number; delays of all kinds: `fuzz_routings.py`.
"""

from contextlib import closing
from dataclasses import replace
from unittest import mock

import pytest
import torch

from lancet_kernels.errors import CommunicationError, UserError
from lancet_kernels.kernels import overlap
from lancet_kernels.kernels.protocol.exchange import Exchange
from lancet_kernels.kernels.runtime import launch
from lancet_kernels.kernels.symmetric import SharedMemory, virtual_memories
from tests.grids import few_of
from tests.lancet_kernels.kernels.fuzz_routings import fuzz_on_rank
from tests.lancet_kernels.kernels.overlap_cases import Answer, Case
from tests.lancet_kernels.kernels.overlap_ranks import Layer, answer_of, check_same, make_layer, same_bits
from tests.poisoned_buffers import poisoned_buffers
from tests.refusals import refusal

SHORT_S = 0.1  # for waits that nobody ends
ALL_TO_ALL = Case(tokens=6, choices=2, local=1, capacity=6, width=16, hidden=16)
TINY = Case(local=1, tokens=5, choices=1, capacity=5, width=16, hidden=16)


@pytest.mark.parametrize(
    ("first", "passes", "ranks"), few_of([(12, 6, 2), (0, 20, 2), (20, 20, 2), (40, 20, 2), (40, 20, 4)])
)
def test_fuzzed_routings(pool, first, passes, ranks):
    """One to three passes open at once, which end in any order; `fuzz_routings.py` runs any number."""
    pool.run(fuzz_on_rank, first, passes, 0.02, ranks=ranks, timeout_s=600)


@pytest.fixture
def layer() -> Layer:
    (memory,) = virtual_memories(1)
    return make_layer(memory, "layer", replace(TINY, world=1))


REFUSED = r"forward passes through layer\.forward before a backward: got one more while 2 wait"


@pytest.mark.long
def test_a_third_open_pass_is_refused_and_dropped_ones_are_not_open(layer):
    expected = layer.run()
    for _ in range(5):
        _, saved = layer.run_forward()
        del saved
    first, second = layer.run_forward(), layer.run_forward()
    with pytest.raises(UserError, match=REFUSED):
        layer.run_forward()
    check_same(answer_of(second[0], layer.run_backward(second[1])), expected, "after dropped passes")
    third = layer.run_forward()
    with pytest.raises(UserError, match=REFUSED):
        layer.run_forward()
    for out, saved in (first, third):
        check_same(answer_of(out, layer.run_backward(saved)), expected, "in any order")
    layer.check()


def test_release_again_is_harmless_and_a_released_pass_has_no_backward(layer):
    first, second = layer.run_forward()[1], layer.run_forward()[1]
    layer.forward.release(first.opened)
    third = layer.run_forward()[1]
    layer.forward.release(first.opened)
    assert layer.forward._open.keys() == {0, 1}
    with pytest.raises(UserError, match=r"backward of a pass of layer\.forward: got one that was released"):
        layer.run_backward(first)
    with pytest.raises(UserError, match="got a pass of another exchange"):
        layer.backward.release(second.opened)
    layer.run_backward(third)
    layer.run_backward(second)
    assert not layer.forward._open


def late_on_rank(at: str) -> str:
    """Two good passes, then rank 1 comes only when rank 0 has given up. -> what rank 0 says.

    at: "launch": before its forward; "second launch": rank 0 gave up in the first launch of two;
    "backward": before its backward; "release": before it releases rows that rank 0 needs.
    """
    with closing(SharedMemory(timeout_s=30)) as memory, poisoned_buffers():
        layer = make_layer(memory, "layer", ALL_TO_ALL)
        good = [layer.run() for _ in range(2)]
        check_same(*good, "again")
        memory.barrier()
        if at == "release":
            message = late_release(layer, memory)
        elif at == "second launch":
            message = late_between_launches(layer, memory)
        else:
            message = late_launch(layer, memory, at, good[0])
        memory.barrier()
    return message


def late_launch(layer: Layer, memory: SharedMemory, at: str, good: Answer) -> str:
    """A pass, or a backward, whose peer is not there in time: nothing of it looks like a number."""
    if at == "backward":
        _, saved = layer.run_forward()
        layer.forward.check()
        memory.barrier()
    if memory.rank == 1:
        memory.barrier()
    layer.forward.timeout_s = layer.backward.timeout_s = SHORT_S
    if at == "backward":
        made, late = layer.run_backward(saved), layer.backward
        # Rows of PE 0 had come before it gave up, so the weight gradients of PE 1 are right.
        by_pe = (made.dx, made.dw1, made.dw2, made.db1, made.db2), (made.dx,)
        assert all(gradient.isnan().all() for gradient in by_pe[layer.rank])
        assert layer.rank == 0 or all(map(torch.equal, (made.dw1, made.db2), (good.dw1, good.db2)))
    else:
        (out, _), late = layer.run_forward(), layer.forward
        assert out.isnan().all()
    message = refusal(late.check, CommunicationError)
    if memory.rank == 0:
        memory.barrier()
    return message


def late_between_launches(layer: Layer, memory: SharedMemory) -> str:
    """Rank 0 gives up in its first launch; rank 1's rows come before its second one, which adds up."""
    met = overlap.overlap_kernel if memory.rank else overlap.combine_results_kernel

    def launch_and_meet(kernel: object, *given: object, **options: object) -> None:
        """Rank 0 has given up, then rank 1's rows are there: two meetings."""
        if kernel is met:
            memory.barrier()
            if memory.rank == 0:
                memory.barrier()
        launch(kernel, *given, **options)
        if kernel is met and memory.rank == 1:
            memory.barrier()

    layer.forward.timeout_s = SHORT_S
    with mock.patch.object(overlap, "launch", launch_and_meet):
        out, _saved = layer.run_forward()
    assert out.isnan().all()
    assert memory.rank or layer.forward.buffers.poisoned.item() == 1, "what comes later could look right"
    return refusal(layer.forward.check, CommunicationError)


def late_release(layer: Layer, memory: SharedMemory) -> str:
    """Rank 1 has not released the rows of its third backward. Rank 0 must not put those of a fourth there."""
    _, saved = layer.run_forward()
    if memory.rank == 1:
        with mock.patch.object(Exchange, "_give_back"):
            layer.run_backward(saved)
    else:
        layer.run_backward(saved)
    _, saved = layer.run_forward()
    before = layer.backward.rows.local.clone()
    memory.barrier()
    if memory.rank == 1:
        memory.barrier()
        assert same_bits(before, layer.backward.rows.local), "rows overwritten"
        return ""
    layer.backward.timeout_s = SHORT_S
    layer.load(replace(layer.case, seed=9))
    assert layer.run_backward(saved).dx.isnan().all()
    memory.barrier()
    return refusal(layer.backward.check, CommunicationError)


SENDS_ROWS, SENDS_COUNTS = "to send its rows (dispatch)", "to send its counts (dispatch)"
RETURNS = "to return results (combine)"
RELEASES = "to release its rows (the backward before this one)"


@pytest.mark.parametrize(
    ("at", "what", "other"),
    few_of(
        [
            ("launch", SENDS_COUNTS, SENDS_ROWS),
            ("second launch", SENDS_ROWS, RETURNS),
            ("backward", SENDS_ROWS, RETURNS),
            ("release", RELEASES, ""),
        ]
    ),
)
def test_a_late_rank_is_an_error_on_both_sides(pool, at, what, other):
    messages = pool.run(late_on_rank, at)
    name = "layer.backward" if at in ("backward", "release") else "layer.forward"
    expected = f"{name}: PE 0 waited for PE 1 {what} more than {SHORT_S} s: expected epoch 3 at signal"
    assert messages[0].startswith(expected)
    # Counts of every other epoch have a word of their own.
    seen = 1 if at == "launch" else 2
    assert f"seen {seen}; PE 1 is late, dead, or in another layer" in messages[0]
    if at != "release":
        assert messages[1].startswith(f"{name}: PE 1 waited for PE 0 {other}")
