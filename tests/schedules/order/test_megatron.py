"""Megatron's order on two microbatches that a hand can check, and its delayed weight gradients."""

from lancet_kernels.schedules.order.megatron import paired_order, with_delayed_weight_gradients
from lancet_kernels.schedules.time.simulate import run
from tests.schedules.small_programs import program

BACKWARD = "B0 c b 1;B1dw c b 1 B0;B1 a b 1 B0;B2 c b 1 B1;B3dw c b 1 B2;B3 a b 1 B2;B4 c b 1 B3".split(";")
FORWARD = "F0 c f 1;F1 a f 1 F0;F2 c f 1 F1;F3 a f 1 F2;F4 c f 1 F3".split(";")
"""A layer with a dispatch and a combine, in the backward with a weight gradient before each."""
PAIR = program(*BACKWARD, *FORWARD)
BACK, FORTH = [*range(len(BACKWARD))], [*range(len(BACKWARD), len(PAIR))]


def test_pieces_of_a_backward_and_a_forward_take_turns():
    names = [PAIR.instructions[i].name for i in paired_order(PAIR, [BACK], [FORTH])]
    without_gradients = [name for name in names if not name.endswith("dw")]
    assert without_gradients == "B0 B1 F0 B2 F1 B3 F2 B4 F3 F4".split()


def test_delayed_weight_gradients_fill_what_waits():
    """A backward alone, in which nothing else is left to compute while messages travel."""
    order, ms = [*FORTH, *BACK], [1.0] * len(PAIR)
    gradients = [n for n, i in enumerate(PAIR.instructions) if i.name.endswith("dw")]
    delayed = with_delayed_weight_gradients(PAIR, ms, order, gradients)
    assert PAIR.reordered(delayed)
    names = [PAIR.instructions[i].name for i in delayed]
    assert names[names.index("B1") + 1].endswith("dw")
    assert run(PAIR, ms, delayed).iteration_ms < run(PAIR, ms, order).iteration_ms
