"""Which layers become fused launches: by what the tuner measured on this device, else by the formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lancet_kernels.fused_step import FusedChoice
from lancet_kernels.graph.cost_entry import INTERPRETER, CostPoint, LayerKind
from lancet_kernels.graph.program import Kind
from lancet_kernels.kernels import tuning
from lancet_kernels.kernels.tuning import TunedCache
from lancet_kernels.schedules.fused import best_fit
from lancet_kernels.schedules.fused_layers import match_layers
from lancet_kernels.schedules.fused_prediction import (
    EFFICIENCY,
    FormulaLaunch,
    MeasuredLaunch,
    Rider,
    kind_of,
)
from lancet_kernels.schedules.plan import Prediction
from tests.graph.cost_points import GPU, Truth, cost_entry, fast, put, slow, tuned_entry
from tests.planned_steps import SmallStep, StepCase, dear_communication
from tests.tuned_cache import cache as cache

BY_FORMULA = "by formula at efficiency 0.85: "


@pytest.fixture(scope="module")
def step() -> SmallStep:
    return SmallStep(StepCase(dtype=torch.float32))


@pytest.fixture(autouse=True)
def compiled(monkeypatch) -> None:
    monkeypatch.setattr(FusedChoice, "interpreted", False)


@pytest.fixture
def kind(step) -> LayerKind:
    layers, _ = match_layers(step.joint.graph)
    (kind,) = {kind_of(layer) for layer in layers}
    assert kind == LayerKind(8, 32, "gelu", "float32", 1)
    return kind


def chosen(step: SmallStep, *, lowering: str = "auto", here: bool = True, tokens: bool = False) -> list:
    """The groups that `optimize` would choose on the H100. tokens: layers keep tokens."""
    choice = FusedChoice("lancet-dw", None, lowering, None, torch.device("cpu"), here)
    object.__setattr__(choice, "device", torch.device("cuda", 0))
    groups = choice.groups(step.joint, step.program, dear_communication, lambda layer: tokens)
    explained = replace(step.by_hand([]), predicted=Prediction(1.0, 0.0, 0.0), fused=groups).explain()
    assert all(group.why in explained for group in groups)
    assert len(groups) == 2
    return list(groups)


def store(cache: TunedCache, kind: LayerKind, truth: Truth) -> None:
    put(cache, [tuned_entry(kind)], [cost_entry(kind, truth)])
    tuning.forget()


def test_measured_points_change_the_decision_there_and_back(cache, kind, step) -> None:
    by_formula = chosen(step)
    assert all(f"{BY_FORMULA}nothing is measured" in group.why for group in by_formula)
    for truth, fused in ((fast, True), (slow, False), (fast, True)):
        store(cache, kind, truth)
        groups = chosen(step)
        for group, before in zip(groups, by_formula, strict=True):
            assert group.fused is fused
            verdict = "fused" if fused else "streams"
            assert group.why.startswith(f"{verdict}: predicted faster (")
            assert f"measured 2026-11-21 on {GPU}, 1 ranks, 12 launches: 65536 rows take" in group.why
            assert "formula" not in group.why
            assert group.fused_ms != before.fused_ms


def test_a_backward_that_sends_tokens_again_takes_an_all_to_all_longer(cache, step) -> None:
    sent = next(i for i in step.program.instructions if i.kind is Kind.ALL_TO_ALL)
    again_ms = dear_communication(sent, step.program.tensors) / EFFICIENCY
    both_ways = (chosen(step, lowering="fused", tokens=tokens) for tokens in (False, True))
    for rows, tokens in zip(*both_ways, strict=True):
        assert tokens.backward_ms - rows.backward_ms == pytest.approx(again_ms)
        assert tokens.forward_ms == rows.forward_ms


def test_the_prediction_is_the_line_at_the_rows_of_the_layer(cache, kind, step) -> None:
    points = [CostPoint(d, rows, 0.0, rows / 10) for d in ("forward", "backward") for rows in (10, 110)]
    put(cache, [tuned_entry(kind)], [cost_entry(kind, points=tuple(points))])
    tuning.forget()
    group = chosen(step, lowering="fused")[0]
    # 48 tokens, 4 experts, capacity factor 0.75: 9 slots each.
    assert group.forward_ms == pytest.approx(3.6)
    assert group.why.startswith("fused: requested (")


def test_corrupt_few_foreign_or_old_measurements_leave_the_formula_and_say_so(cache, kind, step) -> None:
    expected = [(group.fused, group.fused_ms) for group in chosen(step)]

    def formula_is_taken(because: str) -> None:
        tuning.forget()
        groups = chosen(step)
        assert [(group.fused, group.fused_ms) for group in groups] == expected
        assert all(f"{BY_FORMULA}{because}" in group.why for group in groups)

    entry = cost_entry(kind, slow)
    put(cache, [tuned_entry(kind)], [replace(entry, points=entry.points[:3])])
    formula_is_taken("there are too few measurements for overlap width=8")
    put(cache, [tuned_entry(kind, replace(tuned_entry(kind).configuration(), comm_programs=8))], [entry])
    formula_is_taken("the measurements for overlap width=8")
    cache.path.write_text(cache.path.read_text().replace('"ms"', '"seconds"'))
    with pytest.warns(UserWarning, match="measured cost .* is ignored"):
        formula_is_taken("nothing is measured for overlap width=8")
    cache.path.unlink()
    foreign = cost_entry(kind, slow, device=INTERPRETER, how=INTERPRETER)
    elsewhere = cost_entry(kind, slow, device="NVIDIA A100-SXM4-80GB")
    more_ranks = cost_entry(replace(kind, ranks=8), slow)
    put(cache, [tuned_entry(kind)], [foreign, elsewhere, more_ranks])
    formula_is_taken("nothing is measured for overlap width=8")


def test_a_plan_for_another_machine_takes_nothing_that_was_measured_here(cache, kind, step) -> None:
    store(cache, kind, slow)
    groups = chosen(step, here=False)
    assert all(f"{BY_FORMULA}the plan is for another machine" in g.why for g in groups)


RIDERS = [Rider("long", 0.35, 0.2e12), Rider("short", 0.09, 0.05e12), Rider("longest", 20.0, 13e12)]


def measured(*points: tuple[int, float, float]) -> MeasuredLaunch:
    """A backward of 1000 rows, from launches (rows, rider FLOPs, ms)."""
    kind = LayerKind(8, 32, "gelu", "float32", 1)
    points = tuple(CostPoint("backward", *point) for point in points)
    return MeasuredLaunch(cost_entry(kind, points=points), "backward", 1000)


def test_riders_that_measured_launches_hide_are_taken_the_longest_that_fits_first() -> None:
    # 0.2 ms for 0.5e12 FLOPs, which take 0.9 on a stream.
    hidden = measured((1000, 0.0, 1.0), (1000, 0.5e12, 1.2), (2000, 0.0, 2.0), (2000, 0.5e12, 2.2))
    assert [r.name for r in best_fit(RIDERS, hidden)] == ["long", "short"]
    assert hidden.milliseconds(RIDERS[:2]) == pytest.approx(1.1)
    # As long as on a stream: nothing is gained.
    in_vain = measured((1000, 0.0, 1.0), (1000, 0.5e12, 1.9), (2000, 0.0, 2.0), (2000, 0.5e12, 2.9))
    assert best_fit(RIDERS, in_vain) == []


def test_riders_beyond_what_was_measured_cost_what_they_cost_on_a_stream() -> None:
    launch = measured((1000, 0.0, 1.0), (1000, 0.1e12, 1.0), (2000, 0.0, 2.0), (2000, 0.1e12, 2.0))
    # Of 0.2e12 FLOPs and 0.35 ms half is measured, and hidden.
    assert launch.milliseconds(RIDERS[:1]) == pytest.approx(1.0 + 0.35 / 2)
    without = measured((1000, 0.0, 1.0), (2000, 0.0, 2.0))
    assert without.milliseconds(RIDERS[:1]) == pytest.approx(1.35)
    assert best_fit(RIDERS, without) == []


def test_riders_by_formula_fill_what_communication_takes_longer() -> None:
    assert [r.name for r in best_fit(RIDERS, FormulaLaunch(0.55, 0.1))] == ["long", "short"]
    assert best_fit(RIDERS, FormulaLaunch(0.5, 0.6)) == []
    assert FormulaLaunch(0.5, 0.1).milliseconds(RIDERS[:1]) == pytest.approx(0.5 / 0.85 + 0.02)


def test_the_example_of_the_formula() -> None:
    launch, streams = FormulaLaunch(2.0, 1.5), Rider("rider", 0.8, 0.0)
    assert launch.milliseconds() == pytest.approx(2.37, abs=0.005)
    assert launch.milliseconds([replace(streams, ms=0.4)]) == launch.milliseconds()
    assert launch.milliseconds([streams]) - launch.milliseconds() == pytest.approx(0.35, abs=0.005)
