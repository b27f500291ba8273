"""The list schedule is valid, never predicted worse, within memory, and near the optimum."""

from dataclasses import replace

import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from lancet_kernels.graph.costs.costs import durations
from lancet_kernels.schedules.order.best_order import OrderSearch
from lancet_kernels.schedules.order.list_schedule import FREE, LIMITED, ListScheduler, Policy, Work
from lancet_kernels.schedules.order.ordering import issue_early
from lancet_kernels.schedules.time.peak_memory import peak_memory
from lancet_kernels.schedules.time.simulate import critical_path, lower_bound_ms, simulate
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


@examples(150)
@hypothesis_given(LAYERS | random_programs(), st.randoms(use_true_random=False))
def test_more_memory_is_never_worse_and_limits_hold(p, random):
    sizes = {t: replace(spec, bytes=random.randrange(1000)) for t, spec in p.tensors.items()}
    p = replace(p, tensors=sizes)
    limits = [*(peaks * peak_memory(p) for peaks in (0.9, 1.0, 1.02, 1.03, 1.1, 1.24, 1.3, 1.6)), None]
    ordered = [OrderSearch(p, given).best(limit) for limit in limits]
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
    for layers in (2, 3):
        for all_to_all_ms in (2.0, 4.0, 7.0):
            for gradients in ([1.5, 1.5], [3.0, 2.0, 1.0], [5.0, 0.5, 2.5]):
                p = backward_of_layers(layers, all_to_all_ms, gradients)
                optimum = optimal_order(p, given, seconds=5)
                base = optimum.bound_ms
                gaps["original"].append(simulate(p, given).iteration_ms / base - 1)
                greedy = simulate(schedule_weight_gradients(p, given), given)
                gaps["greedy"].append(greedy.iteration_ms / base - 1)
                gaps["list"].append(OrderSearch(p, given).best().iteration_ms / base - 1)
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
