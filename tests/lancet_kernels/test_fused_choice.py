"""Which layers become fused launches: by what the tuner measured on this device, else by the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lancet_kernels.fused_step import FusedChoice
from lancet_kernels.kernels import measured_cost as module
from lancet_kernels.kernels import tuning
from lancet_kernels.kernels.cost_entry import INTERPRETER, LayerKind
from lancet_kernels.kernels.fused_cost import LaunchWork
from lancet_kernels.kernels.tuning import TunedCache
from lancet_kernels.schedules.fused import _best_fit
from lancet_kernels.schedules.fused_layers import match_layers
from lancet_kernels.schedules.fused_prediction import MeasuredLaunch, ModelledLaunch, Rider, kind_of
from lancet_kernels.schedules.plan import Prediction
from tests.lancet_kernels.kernels.cost_points import GPU, TRUTH, cost_entry, tuned_entry
from tests.planned_steps import SmallStep, StepCase, dear_communication

FAST = TRUTH
SLOW = replace(TRUTH, launch_ms=500.0)
MODELLED = "modelled at efficiency 0.9: nothing is measured"


@pytest.fixture(scope="module")
def step() -> SmallStep:
    return SmallStep(StepCase(dtype=torch.float32))


@pytest.fixture
def cache(tmp_path, monkeypatch) -> TunedCache:
    """The user's cache; the machine has an H100 that nobody may touch."""
    monkeypatch.setenv(tuning.CACHE_VARIABLE, str(tmp_path / "tuned.json"))
    for asked in (tuning, module):
        monkeypatch.setattr(asked, "PACKAGE_TABLE", tmp_path / "package.json")
        monkeypatch.setattr(asked, "device_name", lambda device: (GPU, 90))
    monkeypatch.setattr(FusedChoice, "interpreted", False)
    tuning.forget()
    yield TunedCache(tuning.default_cache())
    tuning.forget()


@pytest.fixture
def kind(step) -> LayerKind:
    layers, _ = match_layers(step.joint.graph)
    (kind,) = {kind_of(layer) for layer in layers}
    assert kind == LayerKind(8, 32, "gelu", "float32", 1)
    return kind


def chosen(step: SmallStep, *, lowering: str = "auto", here: bool = True) -> list:
    """The groups that `optimize` would choose on the H100, and the text of a plan that has them."""
    choice = FusedChoice("lancet-dw", None, lowering, None, torch.device("cpu"), here)
    object.__setattr__(choice, "device", torch.device("cuda", 0))
    groups = choice.groups(step.joint, step.program, dear_communication)
    explained = replace(step.by_hand([]), predicted=Prediction(1.0, 0.0, 0.0), fused=groups).explain()
    assert all(group.why in explained for group in groups)
    assert len(groups) == 2
    return list(groups)


def store(cache: TunedCache, kind: LayerKind, truth) -> None:
    cache.put([tuned_entry(kind)], [cost_entry(kind, truth)])
    tuning.forget()


def test_measured_points_change_the_decision_there_and_back(cache, kind, step) -> None:
    modelled = chosen(step)
    assert all(MODELLED in group.why for group in modelled)
    for truth, fused in ((FAST, True), (SLOW, False), (FAST, True)):
        store(cache, kind, truth)
        groups = chosen(step)
        for group, before in zip(groups, modelled, strict=True):
            assert group.fused is fused
            verdict = "fused" if fused else "streams"
            assert group.why.startswith(f"{verdict}: predicted faster (")
            assert f"measured 2026-11-21 on {GPU}, 1 ranks, 75 launches: efficiency 0.9" in group.why
            assert "modelled" not in group.why
            assert group.fused_ms != before.fused_ms


def test_the_prediction_is_the_function_at_the_rows_of_the_layer(cache, kind, step) -> None:
    store(cache, kind, FAST)
    group = chosen(step, lowering="fused")[0]
    # 48 tokens, 4 experts, capacity factor 0.75: 9 slots each.
    work = LaunchWork.of_pass("forward", 36, 8, 32, "gelu", 4, 1, programs=132, comm_programs=16)
    assert group.forward_ms == pytest.approx(FAST.milliseconds(work), rel=1e-2)
    assert group.why.startswith("fused: requested (")


def test_corrupt_few_foreign_or_old_measurements_leave_the_model_and_say_so(cache, kind, step) -> None:
    expected = [(group.fused, group.fused_ms) for group in chosen(step)]

    def model_is_taken(because: str) -> None:
        tuning.forget()
        groups = chosen(step)
        assert [(group.fused, group.fused_ms) for group in groups] == expected
        assert all(f"modelled at efficiency 0.9: {because}" in group.why for group in groups)

    entry = cost_entry(kind, SLOW)
    cache.put([tuned_entry(kind)], [replace(entry, points=entry.points[:3])])
    model_is_taken("no function fits the measurements for overlap width=8")
    cache.put([tuned_entry(kind, replace(tuned_entry(kind).configuration(), comm_programs=8))], [entry])
    model_is_taken("the measurements for overlap width=8")
    cache.path.write_text(cache.path.read_text().replace('"ms"', '"seconds"'))
    with pytest.warns(UserWarning, match="measured cost .* is ignored"):
        model_is_taken("nothing is measured for overlap width=8")
    cache.path.unlink()
    foreign = cost_entry(kind, SLOW, device=INTERPRETER, how=INTERPRETER)
    elsewhere = cost_entry(kind, SLOW, device="NVIDIA A100-SXM4-80GB")
    more_ranks = cost_entry(replace(kind, ranks=8), SLOW)
    cache.put([tuned_entry(kind)], [foreign, elsewhere, more_ranks])
    model_is_taken("nothing is measured for overlap width=8")


def test_a_plan_for_another_machine_takes_nothing_that_was_measured_here(cache, kind, step) -> None:
    store(cache, kind, SLOW)
    groups = chosen(step, here=False)
    assert all("modelled at efficiency 0.9: the plan is for another machine" in g.why for g in groups)


RIDERS = [Rider("long", 0.35, 0.2e12), Rider("short", 0.09, 0.05e12), Rider("longest", 20.0, 13e12)]
WORK = LaunchWork(400e6, 0.1e12, 0.0, 132, 16)


def test_riders_fill_the_time_that_rows_take_the_longest_that_fits_first() -> None:
    # 16 programs fill this link, the others are free: of 8 ms there and back 13e12 FLOPs take 20.
    full_link = replace(TRUTH, link_gb_per_s=100.0)
    assert [r.name for r in _best_fit(RIDERS, MeasuredLaunch(full_link, WORK))] == ["long", "short"]
    # Nothing is put: what rides only makes it longer.
    nothing_to_hide = MeasuredLaunch(full_link, replace(WORK, bytes=0.0, expert_flops=5e12))
    assert _best_fit(RIDERS, nothing_to_hide) == []


def test_riders_of_a_modelled_launch_fill_what_communication_takes_longer() -> None:
    assert [r.name for r in _best_fit(RIDERS, ModelledLaunch(0.5, 0.1))] == ["long", "short"]
    assert _best_fit(RIDERS, ModelledLaunch(0.5, 0.6)) == []
    assert ModelledLaunch(0.5, 0.1).milliseconds(RIDERS[:1]) == pytest.approx(0.5 / 0.9 + 0.02)
