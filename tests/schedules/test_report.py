"""`Plan.explain` says what is so: the text of plans, for models, links and limits, against their numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lancet_kernels.graph.capture.trace import layers_of
from lancet_kernels.graph.program import Kind, original_name, whole_name
from lancet_kernels.predict.simulate import Setting, Simulated, simulate_setting
from lancet_kernels.schedules.cut.partition_range import PartitionOptions
from lancet_kernels.schedules.order.ordering import weight_gradients
from lancet_kernels.schedules.plan import PLAIN, hidden_text, layers_text
from lancet_kernels.schedules.time.simulate import Event
from lancet_kernels.schedules.time.timeline import Filler, Hiding
from tests.grids import few_of

SETTINGS = {
    "two layers, slow link": (Setting("gpt2-tiny-moe", "p3dn", 16, layers=2), None),
    "two layers, fast link": (Setting("gpt2-tiny-moe", "dgx-h100", 8, layers=2), None),
    "four layers, little memory": (Setting("gpt2-tiny-moe", "p4de", 16, layers=4), 0.0001),
}
ROW = re.compile(r"([> ]) (\S+) +([\d.]+) +([\d.]+) +([\d.e-]+) +(-?[\d.]+)%")
ROUNDING = 0.0051


@pytest.fixture(scope="module", params=few_of(SETTINGS, 1))
def simulated(request: pytest.FixtureRequest) -> Simulated:
    """All strategies of a setting: with all settings, more than 20 plans."""
    setting, limit = SETTINGS[request.param]
    found = simulate_setting(setting, limit, PartitionOptions(most_parts=2))
    assert len(found.plans) >= 7
    return found


def test_rows_are_the_predictions(simulated: Simulated) -> None:
    for strategy, plan in simulated.plans.items():
        rows = [m.groups() for m in map(ROW.fullmatch, plan.explain().splitlines()) if m]
        own = plan.report.chosen or strategy
        assert [name for mark, name, *_ in rows if mark == ">"] == [own]
        # The plan of `auto` is that of another strategy, whose row it has.
        assert {name for _, name, *_ in rows} == {own, *plan.report.compared}
        blocking = simulated.plans["none"].report.predicted.iteration_ms
        for _, name, ms, exposed, peak, saved in rows:
            p = plan.report.predicted if name == own else plan.report.compared[name]
            assert float(ms) == pytest.approx(p.iteration_ms, abs=ROUNDING)
            assert float(exposed) == pytest.approx(p.exposed_ms, abs=ROUNDING)
            assert float(peak) == pytest.approx(p.peak_memory_gb, rel=5e-3)
            assert float(saved) == pytest.approx(100 * (1 - p.iteration_ms / blocking), abs=0.051)


def test_a_step_without_messages_has_no_table(simulated: Simulated) -> None:
    plan = simulated.plans["auto"]
    alone = {name: replace(p, exposed_ms=0.0) for name, p in plan.report.compared.items()}
    alone_ms = plan.report.predicted.iteration_ms
    predicted = replace(plan.report.predicted, exposed_ms=0.0)
    text = replace(plan, plain=True).reported(hidings=(), predicted=predicted, compared=alone).explain()
    assert f"Nothing travels in this step of {alone_ms:.2f} ms, so there is nothing to hide: the mod" in text
    assert "predicted ms" not in text


ACCOUNT = re.compile(r"Of ([\d.]+) ms: computation ([\d.]+)(?:, cutting (-?[\d.]+))?(.*)\.")


def test_the_account_adds_up(simulated: Simulated) -> None:
    for plan in simulated.plans.values():
        (account,) = [m.groups() for m in map(ACCOUNT.fullmatch, plan.explain().splitlines()) if m]
        iteration, computation, cutting, exposed = account
        parts = [float(ms) for ms in re.findall(r"exposed [a-z-]+ ([\d.]+)", exposed)]
        predicted = plan.report.predicted
        assert float(iteration) == pytest.approx(predicted.iteration_ms, abs=ROUNDING)
        assert sum(parts) == pytest.approx(predicted.exposed_ms, abs=ROUNDING * len(parts))
        assert float(computation) + float(cutting or 0) + sum(parts) == pytest.approx(
            predicted.iteration_ms, abs=ROUNDING * (len(parts) + 3)
        )


def test_reason_of_the_choice_is_so(simulated: Simulated) -> None:
    plan = simulated.plans["auto"]
    text, limit = plan.report.choice(plan.plain), plan.report.memory_limit_gb
    fit = {name: p for name, p in plan.report.compared.items() if p.peak_memory_gb <= limit}
    if not fit:
        assert "needs least memory; every strategy exceeds the memory limit" in text
        assert plan.report.predicted.peak_memory_gb == min(
            p.peak_memory_gb for p in plan.report.compared.values()
        )
        return
    assert text.startswith(f"Chosen: {plan.report.chosen}, predicted fastest within the memory limit.")
    assert plan.report.predicted.iteration_ms == min(p.iteration_ms for p in fit.values())
    faster = {
        n for n, p in plan.report.compared.items() if p.iteration_ms < plan.report.predicted.iteration_ms
    }
    said = set(re.findall(r"(\S+) \([\d.]+ ms\) exceeds the memory limit", text))
    assert said == faster, "each faster one, and it does exceed the limit"
    assert not said & set(fit)


def test_what_fills_a_message_computes_meanwhile(simulated: Simulated) -> None:
    """Times and layers of what `explain` puts into words, against the simulated iteration."""
    program = simulated.program
    layers = layers_of(simulated.setting.priced.module.graph)
    gradients = {program.instructions[i].name for i in weight_gradients(program)}

    def layer(event: Event) -> str:
        name = whole_name(event.name)
        return layers.get(original_name(name) or name, "")

    for strategy, plan in simulated.plans.items():
        events = simulated.timelines[strategy].events
        computed = [e for e in events if e.kind is Kind.COMPUTE]
        messages = [e for e in events if e.kind is not Kind.COMPUTE]
        assert sum(hiding.count for hiding in plan.report.hidings) == len(messages)
        for hiding in plan.report.hidings:
            here = [m for m in messages if (m.kind.value, m.phase.value) == (hiding.kind, hiding.phase)]
            here = [m for m in here if m.kind is Kind.ALL_REDUCE or layer(m) == hiding.layer]
            assert sum(m.end_ms - m.start_ms for m in here) == pytest.approx(hiding.ms)
            assert hiding.exposed_ms + sum(f.ms for f in hiding.fillers) == pytest.approx(hiding.ms)
            for filler in hiding.fillers:
                meanwhile = [
                    (c, min(c.end_ms, m.end_ms) - max(c.start_ms, m.start_ms))
                    for m in here
                    for c in computed
                    if c.start_ms < m.end_ms and m.start_ms < c.end_ms
                    if _work(c, gradients) == filler.work
                ]
                assert sum(both for _, both in meanwhile) == pytest.approx(filler.ms)
                assert {layer(c) for c, _ in meanwhile} == set(filler.layers)


def _work(event: Event, gradients: set[str]) -> str:
    name = whole_name(event.name)
    if original_name(name) is not None:
        return "recomputation"
    return "weight gradients" if name in gradients else event.phase.value


def test_a_line_says_what_fills_a_message() -> None:
    fillers = (Filler("weight gradients", ("m.blocks.3.a", "m.blocks.5.b"), 1.2),)
    hiding = Hiding("all_to_all", "backward", "m.blocks.5.moe", 2, 1.3, 0.1, fillers)
    line = "weight gradients of blocks 3, 5 (1.20 ms) fill the backward all-to-alls of block 5"
    assert hidden_text([hiding], False)[-1] == f"  {line} (1.30 ms, 0.10 ms exposed)"


def test_blocking_plan_says_that_nothing_fills_its_all_to_alls(simulated: Simulated) -> None:
    lines = simulated.plans["none"].explain(details=True).splitlines()
    blocked = [line for line in lines if "all-to-all" in line and "fill" in line]
    assert all(line.startswith("  nothing fills the ") for line in blocked)
    assert [re.search("(forward|backward) all-to-alls", line)[1] for line in blocked] == [
        "forward",
        "backward",
    ]


def test_what_was_measured_is_beside_what_was_predicted(simulated: Simulated) -> None:
    plan = simulated.plans["auto"]
    measured = plan.reported(measured={plan.report.chosen: 4.0, "none": 6.25, PLAIN: 5.0})
    lines = measured.explain().splitlines()
    (own,) = [line for line in lines if line.startswith("> ")]
    assert own.split()[3] == "4.00"
    assert f"  {PLAIN}" in [line[:7] for line in lines]
    assert f"Chosen: {plan.report.chosen}, measured fastest: 4.00 ms a step (none 6.25, plain 5.00)." in lines
    plain = replace(measured.reported(measured={plan.report.chosen: 4.95, PLAIN: 5.0}), plain=True)
    assert "saves 1.0%, less than 2%: 4.95 ms a step, the module as it is 5.00" in plain.explain()


def test_layers_are_named_as_a_user_names_them() -> None:
    paths = ["model.blocks.3.norm", "model.blocks.5.a.0", "model.blocks.4", "", "model.head", "inner.1"]
    assert layers_text(paths) == "blocks 3 to 5, inner 1, head"
    assert layers_text(["layers.7.mlp"]) == "layer 7"
    assert layers_text([""]) == ""
