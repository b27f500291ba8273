"""List schedules and local search: valid, within memory, never predicted worse, and near the optimum."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from lancet_kernels.graph.costs.costs import durations
from lancet_kernels.graph.program import Program
from lancet_kernels.schedules.order.best_order import SEARCHED, LocalSearch, OrderSearch
from lancet_kernels.schedules.order.list_schedule import FREE, LIMITED, ListScheduler, Policy, Work
from lancet_kernels.schedules.order.ordering import issue_early
from lancet_kernels.schedules.strategies import Planner, PlanningOptions
from lancet_kernels.schedules.time.peak_memory import Storages, peak_memory
from lancet_kernels.schedules.time.simulate import critical_path, lower_bound_ms, run, simulate
from tests.examples import examples
from tests.schedules.optimum import optimal_order
from tests.schedules.small_programs import (
    backward_of_layers,
    given,
    list_schedule,
    program,
    random_programs,
    schedule_weight_gradients,
)


def test_critical_path_by_hand():
    p = program("A c f 2", "X a f 3 A", "B c f 1 A", "C c f 1 X B")
    assert critical_path(p, durations(p, given)) == [6, 4, 2, 1]


def test_lower_bound_by_hand():
    lines = ["A c f 2", "X a f 3 A", "B c f 1 A", "C c f 1 X B"]
    bounds = [
        (lines, 6),
        ([*lines, "D c f 4"], 8),
        ([*lines, "Y a f 4"], 7),
        ([*lines, "D c f 5", "Y a f 6"], 9),
    ]
    for made, bound in bounds:
        p = program(*made)
        assert lower_bound_ms(p, durations(p, given)) == bound
    assert lower_bound_ms(program(), []) == 0


def test_the_all_to_all_is_reached_before_other_ready_work():
    p = program("B c f 3", "A c f 1", "X a f 3 A", "C c f 1 X")
    assert [i.name for i in list_schedule(p, given).instructions] == ["A", "X", "B", "C"]


@examples(200)
@hypothesis_given(random_programs())
def test_never_worse_than_greedy_or_the_original_nor_better_than_the_bound(p):
    time = simulate(list_schedule(p, given), given).iteration_ms
    assert lower_bound_ms(p, durations(p, given)) <= time + 1e-9
    assert time <= simulate(p, given).iteration_ms + 1e-9
    assert time <= simulate(schedule_weight_gradients(p, given), given).iteration_ms + 1e-9


@examples(150)
@hypothesis_given(random_programs(), st.sampled_from([*FREE, *LIMITED]), st.floats(1.0, 1.5))
def test_every_list_schedule_is_valid_and_keeps_to_its_limit(p, policy, more):
    ms = durations(p, given)
    assert len(p.reordered(ListScheduler(Work(p, ms), policy, None).schedule())) == len(p)
    limit = more * peak_memory(p)
    order = ListScheduler(Work(p, ms), policy, limit).schedule()
    assert peak_memory(p.reordered(order)) == peak_memory(p, order) <= limit


LAYERS = st.builds(
    backward_of_layers,
    st.integers(2, 6),
    st.sampled_from([2.0, 4.0, 7.0]),
    st.lists(st.sampled_from([0.5, 1.0, 1.5, 3.0, 5.0]), min_size=1, max_size=3),
)


@pytest.mark.parametrize("search", [False, True])
@examples(40)
@hypothesis_given(p=LAYERS | random_programs(), random=st.randoms(use_true_random=False))
def test_more_memory_is_never_worse_and_limits_hold(p, random, search):
    sizes = {t: replace(spec, bytes=random.randrange(1000)) for t, spec in p.tensors.items()}
    p = replace(p, tensors=sizes)
    limits = [*(peaks * peak_memory(p) for peaks in (0.9, 1.0, 1.02, 1.03, 1.1, 1.24, 1.3, 1.6)), None]
    ordered = [OrderSearch(p, given).best(limit, search=search) for limit in limits]
    milliseconds = [one.iteration_ms for one in ordered]
    assert milliseconds == sorted(milliseconds, reverse=True)
    for limit, one in zip(limits[:-1], ordered, strict=False):
        assert peak_memory(p, one.order) == one.peak_memory_bytes <= max(limit, peak_memory(p))


@examples(25)
@hypothesis_given(random_programs(most=10, all_reduces=False))
def test_the_optimum_is_one(p):
    optimum = optimal_order(p, given, seconds=5)
    assert optimum.proven
    order = issue_early(p, optimum.order)
    assert simulate(p.reordered(order), given).iteration_ms == pytest.approx(optimum.iteration_ms)
    assert OrderSearch(p, given).best().iteration_ms >= optimum.iteration_ms - 1e-6


@pytest.mark.long
def test_gap_to_the_optimum(capsys):
    """Backward passes of 2 to 3 layers: how much longer than the proven optimum does each schedule take?"""
    gaps = {"original": [], "greedy": [], "list": []}
    gradients = [1.5, 1.5], [3.0, 2.0, 1.0], [5.0, 0.5, 2.5]
    for case in product((2, 3), (2.0, 4.0, 7.0), gradients):
        p = backward_of_layers(*case)
        bound_ms = optimal_order(p, given, seconds=5).bound_ms
        schedules = p, schedule_weight_gradients(p, given), list_schedule(p, given)
        for found, schedule in zip(gaps.values(), schedules, strict=True):
            found.append(simulate(schedule, given).iteration_ms / bound_ms - 1)
    with capsys.disabled():
        for name, found in gaps.items():
            mean = sum(found) / len(found)
            print(f"\ngap to the CP-SAT optimum, {name}: mean {mean:.1%}, most {max(found):.1%}", end="")
    assert max(gaps["greedy"]) < 0.25
    assert max(gaps["list"]) < 0.06
    assert sum(gaps["list"]) <= sum(gaps["greedy"])


def test_in_order_means_the_programs_order_as_far_as_inputs_are_there():
    """B has the longer path behind it; C waits for a message, and what is behind it goes first."""
    p = program("A c f 1", "B c f 1", "X a f 3 A", "C c f 1 X", "D c f 5 B", "Y a f 1 D C")
    ms = durations(p, given)

    def computed(policy: Policy) -> list[str]:
        order = ListScheduler(Work(p, ms), policy, None).schedule()
        return [name for i in order if (name := p.instructions[i].name) in "ABCD"]

    assert computed(Policy()) == ["B", "A", "D", "C"]
    assert computed(Policy(in_order=True)) == ["A", "B", "D", "C"]


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
