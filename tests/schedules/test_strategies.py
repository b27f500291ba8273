"""Plans: valid, ordered as promised, never predicted worse, saved and read back."""

import json
from dataclasses import replace

import pytest
from hypothesis import given as hypothesis_given

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.clusters import load_cluster
from lancet_kernels.graph.costs.costs import CostModel
from lancet_kernels.graph.program import Kind
from lancet_kernels.graph.rules.rules import PARTIAL, WINDOW
from lancet_kernels.layer.gpt2_moe import ModelConfig, model_config
from lancet_kernels.predict.simulate import Setting, captured_program
from lancet_kernels.schedules.cut.partition_range import PartitionOptions
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.rewrite.apply import instruction_order
from lancet_kernels.schedules.rewrite.walk import PLANNED, Step, walk
from lancet_kernels.schedules.strategies import (
    AUTO,
    FAMILIES,
    STRATEGY_NAMES,
    Planner,
    PlanningOptions,
    fastest_that_fits,
)
from lancet_kernels.schedules.time.simulate import simulate
from lancet_kernels.schedules.time.timeline import Prediction
from tests.examples import examples
from tests.schedules.small_programs import given, list_schedule, make_plan, program, random_programs


def planner(step, options=None):
    options = options or PlanningOptions(PartitionOptions(most_parts=2))
    return Planner(step.program, step.cost, options, step.cutter)


@pytest.fixture(scope="module")
def small():
    return Setting("gpt2-s-moe", "p4de", 16, layers=2, padded=True).priced


@pytest.fixture(scope="module")
def planner_of_small(small):
    return planner(small)


@pytest.fixture(scope="module")
def plans(planner_of_small):
    return planner_of_small.plans()


def test_predictions_are_what_the_planned_graph_simulates_to(small, planner_of_small, plans):
    assert list(plans) == list(STRATEGY_NAMES)
    for name, plan in plans.items():
        timeline = planner_of_small.timeline(plan)
        order = [node for node in plan.order if not node.endswith(".sgd")]
        planned = walk(small, replace(plan, order=tuple(order)), PLANNED)
        assert instruction_order(planned.module.graph) == order
        assert plan.strategy == name
        assert timeline.iteration_ms == pytest.approx(plan.report.predicted.iteration_ms)
        assert timeline.exposed_ms == pytest.approx(plan.report.predicted.exposed_ms)
        assert timeline.peak_memory_bytes / 1e9 == pytest.approx(plan.report.predicted.peak_memory_gb)
        assert tuple(timeline.program.instructions[i].name for i in timeline.times.order) == plan.order


def test_none_hides_nothing_of_the_all_to_alls(small, plans):
    step, cost = small.program, small.cost
    all_to_all = sum(cost(i, step.tensors) for i in step.instructions if i.kind is Kind.ALL_TO_ALL)
    assert plans["none"].report.predicted.exposed_ms >= all_to_all
    assert plans["none"].ranges == ()
    assert plans["none"].order == tuple(i.name for i in step.instructions)


def test_tutel_pipelines_nothing_but_all_to_alls_and_experts(small, plans):
    ops = set()
    for r in plans["tutel"].ranges:
        assert set(r.forms.values()) <= {WINDOW, PARTIAL}
        first, last = small.program.index[r.first], small.program.index[r.last]
        ops |= {i.op for i in small.program.instructions[first : last + 1]}
    assert all("all_to_all" in op or "expert" in op or "grouped_gemm" in op for op in ops)
    assert len(plans["tutel"].ranges) == 2  # an MoE layer, forward and backward


def test_each_half_helps_and_both_help_more(plans):
    times = {name: plan.report.predicted.iteration_ms for name, plan in plans.items()}
    assert times["lancet"] < min(times["lancet-dw"], times["lancet-partition"])
    assert max(times["lancet-dw"], times["lancet-partition"]) < times["none"]
    assert times["lancet"] < times["tutel"] < times["none"]


@pytest.mark.long
def test_memory_limit(small, plans):
    need = plans["none"].report.predicted.peak_memory_gb
    options = PlanningOptions(PartitionOptions(most_parts=2), memory_limit_gb=need)
    for name, plan in planner(small, options).plans().items():
        assert plan.report.predicted.peak_memory_gb <= need, name


def test_the_default_limit_and_what_it_costs():
    # 100 bytes each: G before A would need 300 while B runs, and the original order needs 200.
    p = program("A c f 4", "B c f 4 A", "G a f 4", "W c f 1 G")
    plan = make_plan(p, given, "lancet-dw")
    assert plan.report.memory_limit_gb == pytest.approx(220e-9)
    assert (plan.report.predicted.iteration_ms, plan.report.predicted.lower_bound_ms) == (13, 9)
    assert "Memory limit: 2.2e-07 GB; it costs 4.00 ms (without it, 9.00 ms)." in plan.explain()
    assert "at least ms" in plan.explain(details=True)
    free = make_plan(p, given, "lancet-dw", PlanningOptions(free_memory_gb=300e-9))
    assert free.report.predicted.iteration_ms == 9
    assert free.report.predicted.peak_memory_gb == pytest.approx(300e-9)
    assert "it costs nothing." in free.explain()
    assert free.report.options == plan.report.options
    stated = make_plan(p, given, "lancet-dw", PlanningOptions(memory_limit_gb=200e-9, free_memory_gb=1.0))
    for nonsense in (0, float("nan")):
        with pytest.raises(UserError, match=r"memory_limit_gb: got .*, expected more than 0"):
            PlanningOptions(memory_limit_gb=nonsense)
    assert stated.report.predicted.iteration_ms == 13
    assert make_plan(p, given, "none").report.predicted.lower_bound_ms == 9
    short = make_plan(p, given, "none", PlanningOptions(memory_limit_gb=1e-9))
    assert "Memory limit: 1e-09 GB; the plan needs more." in short.explain()


def test_fewer_parts_where_memory_is_short():
    """Every part of an irregular buffer has the size of the whole: on many parts, memory decides."""
    config = ModelConfig("wide", 2, 64, 4, 32, vocab=64, num_experts=32, capacity_factor=16.0)
    cost = CostModel.for_cluster(load_cluster("p3dn"), 16)
    step = Step(*captured_program(config, 16, 64, padded=True), cost)
    free = planner(step).plan("lancet-partition")
    limit = free.report.predicted.peak_memory_gb * 0.9
    bound = planner(step, PlanningOptions(memory_limit_gb=limit))
    least = max(limit, bound.plan("none").report.predicted.peak_memory_gb)
    assert bound.plan("lancet-partition").report.predicted.peak_memory_gb <= least


def test_save_load_and_explain(small, plans, tmp_path):
    for plan in plans.values():
        path = tmp_path / "plan.json"
        plan.save(path)
        again = Plan.load(path, small.program)
        assert again == plan
        assert again.fingerprint == plan.fingerprint
    text = plans["lancet"].explain(details=True)
    assert "tutel" in text
    assert "irregular" in text
    assert "lancet.sum_over_ranks" in text
    assert len({p.fingerprint for p in plans.values()}) == len(plans)
    other = plan.reported(predicted=replace(plan.report.predicted, iteration_ms=1.0), compared={})
    assert other.fingerprint == plan.fingerprint


def test_a_plan_for_another_program_is_refused(plans, tmp_path):
    plans["lancet"].save(tmp_path / "plan.json")
    with pytest.raises(UserError, match="plan again"):
        Plan.load(tmp_path / "plan.json", program("A c f 1"))
    with pytest.raises(UserError, match="plan again"):
        plans["lancet"].check(program("A c f 1"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "lancet-plan", "version": 1}'])
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UserError):
        Plan.load(path)
    with pytest.raises(UserError, match="plan file"):
        Plan.load(tmp_path / "nothing.json")


@pytest.mark.parametrize("figure", ["iteration_ms", "lower_bound_ms"])
@pytest.mark.parametrize("value", [None, "4 ms", []])
def test_a_file_whose_figures_are_of_another_type_is_refused(plans, tmp_path, figure, value):
    path, data = tmp_path / "plan.json", plans["lancet"].to_json()
    data["report"]["predicted"][figure] = value
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=f"plan file {path}: got .*; plan again"):
        Plan.load(path)


@examples(60)
@hypothesis_given(random_programs(most=16))
def test_every_plan_of_a_random_program_is_valid_and_never_worse(p):
    planner = Planner(p, given)
    plans = planner.plans()
    for name, plan in plans.items():
        assert len(p.reordered(plan.order)) == len(p)
        assert planner.candidates(name)
    halves = [plans[name].report.predicted.iteration_ms for name in ("none", "lancet-dw", "lancet-partition")]
    best_known = min(simulate(p, given).iteration_ms, *halves)
    assert plans["lancet"].report.predicted.iteration_ms <= best_known + 1e-9
    assert json.loads(json.dumps(plans["lancet"].to_json())) is not None


@pytest.mark.long
def test_ten_thousand_instructions_are_planned():
    module, step = captured_program(model_config("gpt2-l-moe", layers=96, num_experts=32), 16, 8)
    assert len(step) > 10_000
    cost = CostModel.for_cluster(load_cluster("p4de"), 16)
    assert len(make_plan(step, cost, module=module).order) >= len(step)


def test_group_size_and_range_length_are_respected(small):
    options = PlanningOptions(PartitionOptions(most_parts=2, longest_range_ms=8.0))
    plan, step, cost = planner(small, options).plan("lancet-partition"), small.program, small.cost
    assert all(r.parts <= 2 for r in plan.ranges)
    for r in plan.ranges:
        inside = step.instructions[step.index[r.first] : step.index[r.last] + 1]
        assert sum(cost(i, step.tensors) for i in inside) <= 8.0


def test_no_all_to_all_at_all():
    p = program("A c f 1", "B c b 1 A", "C c b 2 A")
    for plan in Planner(p, given).plans().values():
        assert plan.report.predicted.iteration_ms == 4
    assert list_schedule(p, given).instructions[0].name == "A"


def test_the_fastest_plan_that_fits():
    plan = make_plan(program("A c f 1"), given, "none")

    def of(ms, gigabytes, limit):
        return plan.reported(predicted=Prediction(ms, 0.0, gigabytes), memory_limit_gb=limit)

    assert fastest_that_fits([of(3, 1, 2), of(2, 2, 2), of(1, 3, 2)]) == 1
    assert fastest_that_fits([of(1, 4, 2), of(2, 3, 2), of(3, 5, 2)]) == 1
    assert fastest_that_fits([of(3, 1, None), of(1, 9, None)]) == 1


@pytest.mark.parametrize("cut", [True, False])
def test_plans_of_several_planners_are_those_of_one(small, cut):
    options, cutter = PlanningOptions(PartitionOptions(most_parts=2)), small.cutter if cut else None
    alone, first, second = (Planner(small.program, small.cost, options, cutter) for _ in range(3))
    first.add_plans([first.plans_or_reasons(FAMILIES[0]), second.plans_or_reasons(FAMILIES[1])])
    assert first.candidates(AUTO) == alone.candidates(AUTO)
    assert bool(alone.impossible) == (not cut)
