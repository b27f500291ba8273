"""No order exposes less of a kind of communication than its bound."""

from hypothesis import given, settings

from lancet_kernels.graph.costs.costs import durations
from lancet_kernels.graph.program.program import Program
from lancet_kernels.schedules.order.best_order import best_order
from lancet_kernels.schedules.time.hiding import Prediction, exposed_bounds
from lancet_kernels.schedules.time.simulate import Timeline, run
from tests.schedules.made_programs import given as as_given
from tests.schedules.made_programs import program, random_programs


def test_what_nothing_can_hide() -> None:
    p = program("A c f 1", "X a f 5 A", "B c f 2", "Y c f 1 X", "S r b 4 Y")
    assert exposed_bounds(p, durations(p, as_given)) == {"all_reduce": 4.0, "all_to_all": 3.0}


def test_messages_of_a_kind_share_what_hides_them() -> None:
    p = program("A c f 1", "X a f 5 A", "Z a f 5 A", "B c f 6", "Y c f 1 X Z")
    assert exposed_bounds(p, durations(p, as_given)) == {"all_to_all": 4.0}


@settings(max_examples=60, deadline=None)
@given(random_programs())
def test_every_order_exposes_as_much(p: Program) -> None:
    ms = durations(p, as_given)
    bounds = exposed_bounds(p, ms)
    for times in (run(p, ms, range(len(p))), best_order(p, as_given).times):
        exposed = Prediction.of(Timeline(p, times)).exposed_by
        for kind, bound in bounds.items():
            assert exposed.get(kind, 0.0) >= bound - 1e-9
