"""Local search keeps orders valid and within memory, and never makes a step longer."""

from dataclasses import replace

import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from lancet_kernels.graph.costs.costs import durations
from lancet_kernels.graph.program import Program
from lancet_kernels.schedules.order.best_order import SEARCHED, LocalSearch, OrderSearch
from lancet_kernels.schedules.strategies import Planner, PlanningOptions
from lancet_kernels.schedules.time.peak_memory import Storages, peak_memory
from lancet_kernels.schedules.time.simulate import run
from tests.examples import examples
from tests.schedules.optimum import optimal_order
from tests.schedules.small_programs import given, program, random_programs


@examples(40)
@hypothesis_given(random_programs(), st.floats(1.0, 1.5))
def test_the_order_is_valid_within_its_limit_and_never_slower(p, more):
    ms, original = durations(p, given), list(range(len(p)))
    limit = more * peak_memory(p)
    order = LocalSearch(p, ms, original, Storages(p), limit).run()
    assert peak_memory(p.reordered(order)) <= limit
    assert run(p, ms, order).iteration_ms <= run(p, ms, original).iteration_ms
    assert LocalSearch(p, ms, original, Storages(p), limit).run() == order


def test_the_sum_behind_a_gradient_follows_it():
    """W is computed before B or C, and R travels behind it, not behind C."""
    p = program("A c b 4", "B c b 4 A", "C c b 4 B", "W c b 2", "R r b 8 W")
    order = LocalSearch(p, durations(p, given), range(5), Storages(p), None).run()
    assert run(p, durations(p, given), order).iteration_ms == 14


def three_layers() -> Program:
    """Three layers of a backward: gradient G, its weight gradient W, the sum R of that, an all-to-all X."""
    return program(
        *("G0 c b 1", "W0 c b 4 G0", "R0 r b 4 W0", "X0 a b 2 G0"),
        *("G1 c b 1 X0", "W1 c b 1 G1", "R1 r b 2 W1", "X1 a b 3 G1"),
        *("G2 c b 3 X1", "W2 c b 1 G2", "R2 r b 4 W2", "X2 a b 3 G2"),
    )


def test_it_finds_what_list_schedules_miss():
    p = three_layers()
    listed, searched = OrderSearch(p, given).best(), OrderSearch(p, given).best(search=True)
    assert (listed.iteration_ms, searched.iteration_ms) == (22, 20)
    assert searched.method == listed.method + SEARCHED
    assert optimal_order(p, given, seconds=5).bound_ms <= 20


@pytest.mark.parametrize(("search", "ms"), [(True, 20), (False, 22)])
def test_a_planner_searches_unless_its_plans_are_ordered_again(search, ms):
    options = PlanningOptions(memory_limit_gb=1.0)
    plan = Planner(three_layers(), given, options, search=search).plan("lancet-dw")
    assert plan.report.predicted.iteration_ms == ms
    assert plan.report.method.endswith(SEARCHED) == search


@examples(8)
@hypothesis_given(random_programs(), st.randoms(use_true_random=False))
def test_more_memory_is_never_worse(p, random):
    sizes = {t: replace(spec, bytes=random.randrange(1000)) for t, spec in p.tensors.items()}
    p = replace(p, tensors=sizes)
    limits = [*(peaks * peak_memory(p) for peaks in (0.9, 1.0, 1.03, 1.24, 1.6)), None]
    searched = [OrderSearch(p, given).best(limit, search=True) for limit in limits]
    milliseconds = [one.iteration_ms for one in searched]
    assert milliseconds == sorted(milliseconds, reverse=True)
    peaks = [one.peak_memory_bytes for one in searched[:-1]]
    assert all(peak <= max(limit, peak_memory(p)) for peak, limit in zip(peaks, limits, strict=False))
