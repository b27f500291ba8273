"""Computation is priced as the step runs, which takes longer than its ops one by one."""

import json
import logging
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from lancet_kernels import optimize
from lancet_kernels.graph.costs.clusters import CommunicationModel
from lancet_kernels.graph.costs.costs import MeasuredCosts
from lancet_kernels.graph.costs.part_instruction import DeviceCosts
from lancet_kernels.graph.costs.profiler import differ
from lancet_kernels.graph.program import Kind
from lancet_kernels.optimization.step import capture_step, slowdown
from lancet_kernels.predict.own_step import fake_ranks
from lancet_kernels.schedules.rewrite.walk import UNPLANNED
from lancet_kernels.schedules.time.simulate import simulate
from tests.schedules.small_programs import program

COSTS = MeasuredCosts(DeviceCosts("CPU", "2.13", 0.1, ((1.0, 0.1),)), CommunicationModel({}), "here")


@pytest.mark.parametrize("run_ms", [1500.0, 1700.0, 1400.0])
def test_the_blocking_step_is_then_predicted_as_it_runs(run_ms: float) -> None:
    # B would hide a third of X if communication did not block.
    step = program("A c f 600", "X a f 600 A", "B c f 200", "C c f 100 X")
    factor = slowdown(step, COSTS, run_ms)
    assert factor == pytest.approx(1 + (run_ms - 1500) / 900)
    costs = MeasuredCosts(COSTS.device, COSTS.communication, "here", factor)
    blocking = simulate(costs.as_it_runs(step), costs, blocking=["X"])
    assert blocking.iteration_ms == pytest.approx(run_ms)
    assert simulate(costs.as_it_runs(step), costs).iteration_ms < run_ms


def test_a_step_without_computation_says_nothing() -> None:
    assert slowdown(program("X a f 5"), COSTS, 100.0) == 1.0


def test_threads_that_move_bytes_cost_computation_only_beside_it() -> None:
    # 50 of the 900 ms are theirs: the blocking step runs them while it waits for X.
    step = program("A c f 600", "X a f 600 A", "B c f 200", "C c f 100 X")
    assert slowdown(step, COSTS, 1450.0, other_threads_ms=50.0) == pytest.approx(1.0)


def test_what_sums_take_from_computation_is_shared_by_the_microbatches() -> None:
    with fake_ranks(2):
        step = capture_step(nn.Linear(2, 2), ((torch.ones(1, 2),), {}), "sum", accumulate=4)
    (summed,) = [i.name for i in step.program.instructions if i.kind is Kind.ALL_REDUCE]
    measured = program("A c b 8", f"{summed} r b 20 A", "B c b 8")
    profiler = mock.Mock()
    profiler.program.return_value = measured
    timed = replace(step, profiler=profiler, cost=COSTS).measured(UNPLANNED)
    *_, shares = profiler.program.call_args.args
    assert shares == {summed: 0.25}
    assert [(i.milliseconds, i.microbatches) for i in timed.instructions] == [(8, 1), (5, 4), (8, 1)]


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_times_of_a_busy_machine_are_not_kept(tmp_path, caplog) -> None:
    """Files in which one op, the step when it was timed, and a launch took 1000 times as long: the op is
    named, and all have their times now."""
    file, inputs = tmp_path / "times.json", (torch.randn(512, 256),)
    optimize(Step(), inputs, strategy="none", times=file)
    content = json.loads(file.read_text())
    times = content["milliseconds"]
    quiet = dict(times)
    (slow,) = [key for key in times if key.startswith("aten.mm (512x256:float32, 256x512:float32)")]
    (step,) = [key for key in times if key.startswith("step ")]
    times |= {slow: 1000 * times[slow], step: 1000 * times[step]}
    file.write_text(json.dumps(content))
    device_costs = tmp_path / "device_costs.json"
    costs = json.loads(device_costs.read_text())
    costs["devices"][0]["launch_ms"] += 1000.0
    device_costs.write_text(json.dumps(costs))
    with caplog.at_level(logging.WARNING):
        planned = optimize(Step(), inputs, strategy="none", times=file)
    assert f"of {slow}" in caplog.text
    mended = json.loads(file.read_text())["milliseconds"]
    assert mended[slow] < 100 * quiet[slow]
    assert json.loads(device_costs.read_text())["devices"][0]["launch_ms"] < 1000.0
    assert planned.plan.report.predicted.iteration_ms < 100 * quiet[step]


def test_a_step_that_takes_half_as_long_again_has_other_times() -> None:
    assert not differ(10.0, 14.9)
    assert differ(10.0, 15.1)
    assert differ(15.1, 10.0)
