"""Fused launches or streams: by the formula for a cluster, by measuring both where the step runs here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from lancet_kernels.optimization.planning import FusedChoice, fuse_layers
from lancet_kernels.optimization.step import ModelStep, capture_step
from lancet_kernels.schedules import plan as fused_prediction
from lancet_kernels.schedules.plan import FusedGroup, LaunchWork, Plan, best_fit
from lancet_kernels.schedules.rewrite.walk import Step
from lancet_kernels.schedules.strategies import PlanningOptions
from tests.grids import few_of
from tests.planned_steps import StepCase, build_step

CLUSTER = "p3dn"


@pytest.fixture(scope="module")
def times(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of measured times: every op is measured once."""
    return tmp_path_factory.mktemp("times") / "times.json"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the times of launches mean something."""
    monkeypatch.setattr(FusedChoice, "interpreted", False)


def chosen(
    lowering: str, cluster: str | None, times: Path, stored: Path | None = None
) -> tuple[ModelStep, tuple[FusedGroup, ...]]:
    """The step, its layers fused or not, and what was chosen."""
    model, inputs = build_step(StepCase(dtype=torch.float32, layers=2, batch=2, sequence=5))
    choice = FusedChoice(
        "lancet-dw", PlanningOptions(), lowering, stored, torch.device("cpu"), cluster is None
    )
    step = capture_step(model, (inputs, {}), times=times).costed(cluster)
    return fuse_layers(step, choice, cluster)


def launches(graph: Step) -> list[float]:
    """Milliseconds of the fused launches."""
    of = [i for i in graph.program.instructions if i.op.startswith("lancet.fused_experts")]
    return [graph.cost(i, graph.program.tensors) for i in of]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("launch_ms", "verdict"), few_of([(1e6, "streams"), (0.0, "fused")]))
def test_the_formula_decides_for_a_cluster(monkeypatch, times, launch_ms, verdict) -> None:
    """The whole step must be faster with launches that take this much more."""
    monkeypatch.setattr(fused_prediction, "LAUNCH_MS", launch_ms)
    monkeypatch.setattr(fused_prediction, "EFFICIENCY", 1.0)
    step, groups = chosen("auto", CLUSTER, times)
    (group,) = groups
    assert (group.fused, group.measured) == (verdict == "fused", False)
    assert group.why.startswith(f"{verdict}: the step is predicted faster (")
    assert "launches by formula" in group.why
    works = [group.forward, group.backward] if group.fused else []
    assert launches(step) == [pytest.approx(work.milliseconds()) for work in works]
    assert len(step.context.layers) == group.fused


@pytest.mark.long
@pytest.mark.usefixtures("compiled")
def test_both_are_measured_here(monkeypatch, times) -> None:
    """In the interpreter a launch takes longer than what it replaces; the formula has no say."""
    monkeypatch.setattr(fused_prediction, "LAUNCH_MS", 1e6)
    with mock.patch.object(
        FusedChoice, "confirmed", autospec=True, side_effect=FusedChoice.confirmed
    ) as confirmed:
        step, groups = chosen("auto", None, times)
    measured = launches(confirmed.call_args.args[3])
    assert len(measured) == 2
    assert all(0 < ms < 1e5 for ms in measured)
    (group,) = groups
    assert (group.fused, group.measured, launches(step)) == (False, True, [])
    assert group.why.startswith("streams: the step is predicted faster (")
    assert group.why.endswith("launches measured here)")


@pytest.mark.long
def test_in_the_interpreter_the_formula_stands_in_for_times(times) -> None:
    step, groups = chosen("auto", None, times)
    (group,) = groups
    assert (group.fused, group.measured, group.why) == (True, False, "fused: requested")
    assert launches(step)[0] == pytest.approx(group.forward.milliseconds())


@pytest.mark.long
def test_streams_on_request(times) -> None:
    step, groups = chosen("streams", CLUSTER, times)
    assert [(group.fused, group.why) for group in groups] == [(False, "streams: requested")]
    assert not launches(step)


@pytest.mark.long
@pytest.mark.usefixtures("compiled")
def test_a_stored_plan_keeps_its_choice(monkeypatch, times, tmp_path) -> None:
    """Also where the formula would choose otherwise by now; and it survives the file."""
    step, groups = chosen("fused", CLUSTER, times)
    plan = replace(step.planner().plan("none"), fused=groups)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").fused == groups
    assert all(group.why in plan.explain() for group in groups)
    monkeypatch.setattr(fused_prediction, "LAUNCH_MS", 1e6)
    _, again = chosen("auto", CLUSTER, times, tmp_path / "plan.json")
    assert again == groups


FILLERS = {"long": 0.35, "short": 0.09, "longest": 20.0}


def test_fillers_fill_what_communication_takes_longer() -> None:
    assert best_fit(FILLERS, LaunchWork(0.55, 0.1)) == ["long", "short"]
    assert best_fit(FILLERS, LaunchWork(0.5, 0.6)) == []
    assert LaunchWork(0.5, 0.1).milliseconds(0.35) == pytest.approx(0.5 / 0.85 + 0.02)


def test_the_example_of_the_formula() -> None:
    work = LaunchWork(2.0, 1.5)
    assert work.milliseconds() == pytest.approx(2.37, abs=0.005)
    assert work.milliseconds(0.4) == work.milliseconds()
    assert work.milliseconds(0.8) - work.milliseconds() == pytest.approx(0.35, abs=0.005)
