"""Times that were measured at different moments compare: what a partitioned graph adds is scaled."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lancet_kernels.graph.costs import profiler
from lancet_kernels.graph.costs.measure import NodeTimes
from lancet_kernels.graph.costs.profiler import Profiler, speed_then
from lancet_kernels.graph.from_fx import is_instruction, op_name
from lancet_kernels.ops.comm.groups import Groups


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Milliseconds by op, or by name of a node, at which nodes are measured from now on."""
    ms: dict[str, float] = {}

    def measure_nodes(module, inputs, group):
        nodes = filter(is_instruction, module.graph.nodes)
        return {n.name: NodeTimes(ms[op_name(n) if op_name(n) in ms else n.name]) for n in nodes}

    monkeypatch.setattr(profiler, "measure_nodes", measure_nodes)
    return ms


@pytest.fixture
def measured(tmp_path) -> Profiler:
    return Profiler(Groups(), torch.device("cpu"), tmp_path / "times.json")


def test_new_times_are_those_of_a_machine_as_fast_as_before(machine, tmp_path) -> None:
    x = torch.randn(4, 4)
    whole = make_fx(lambda x: (x @ x).relu())(x)
    cut = make_fx(lambda x: (x @ x).sin())(x)

    def times(module) -> dict[str, float | None]:
        program = Profiler(Groups(), torch.device("cpu"), tmp_path / "times.json").program(module, [x])
        return {i.op: i.milliseconds for i in program.instructions}

    machine |= {"aten.mm": 10.0, "aten.relu": 2.0}
    assert times(whole) == {"aten.mm": 10.0, "aten.relu": 2.0}
    # Twice as slow by now.
    machine |= {"aten.mm": 20.0, "aten.sin": 8.0}
    assert times(cut) == pytest.approx({"aten.mm": 10.0, "aten.sin": 4.0})
    # Nothing is measured twice.
    machine.clear()
    assert times(whole) == {"aten.mm": 10.0, "aten.relu": 2.0}
    assert times(cut) == pytest.approx({"aten.mm": 10.0, "aten.sin": 4.0})


def test_a_graph_with_nothing_in_common_is_timed_beside_one_that_was(machine, measured) -> None:
    x = torch.randn(4, 4)
    whole, halves = make_fx(lambda x: (x @ x).relu())(x), make_fx(lambda x: (x[:2] @ x).sin())(x)
    machine |= {"aten.mm": 10.0, "aten.relu": 2.0}
    measured.program(whole, [x])
    # Half as slow again by now.
    machine |= {"aten.mm": 15.0, "aten.relu": 3.0, "aten.slice": 0.0, "aten.sin": 6.0}
    program = measured.program(halves, [x], beside=whole)
    times = {i.op: i.milliseconds for i in program.instructions if not i.is_free}
    assert times == pytest.approx({"aten.mm": 10.0, "aten.sin": 4.0})


def test_a_time_beyond_the_roofline_is_measured_again_before_it_is_kept(
    monkeypatch, measured, tmp_path
) -> None:
    x = torch.randn(64, 64)
    module = make_fx(lambda x: (x @ x, x.t() @ x, x @ x.t()))(x)
    calls = []

    def measure_nodes(module, inputs, group):
        calls.append({n.name: 1.0 for n in module.graph.nodes if is_instruction(n)} | {"mm": 1.2})
        if len(calls) == 1:
            calls[0] |= {"mm": 1288.9}
        return {name: NodeTimes(ms) for name, ms in calls[-1].items()}

    monkeypatch.setattr(profiler, "measure_nodes", measure_nodes)
    program = measured.program(module, [x])
    assert len(calls) == 2
    assert "1288" not in (tmp_path / "times.json").read_text()
    assert max(i.milliseconds for i in program.instructions) <= 1.2


def test_only_instructions_whose_rows_are_routed_have_times_of_their_own(machine, measured) -> None:
    # As many rows by shape; the first part has more of them.
    def step(x, counts, weight):
        parts = [torch.ops.lancet.grouped_gemm(x.relu(), counts, weight, None) for _ in range(2)]
        return torch.cat(parts)

    inputs = [torch.randn(4, 3), torch.tensor([[4]]), torch.randn(1, 3, 2)]
    module = make_fx(step)(*inputs)
    machine |= {"grouped_gemm": 9.0, "grouped_gemm_1": 2.0, "relu": 1.0, "relu_1": 3.0, "cat": 1.0}
    times = {i.name: i.milliseconds for i in measured.program(module, inputs).instructions}
    assert times == machine | {"relu": 2.0, "relu_1": 2.0}


def test_what_a_collective_takes_from_computation_counts_beside_it(monkeypatch, measured) -> None:
    def step(x, counts):
        return torch.ops.lancet.all_to_all(x.relu(), counts, counts, "", True).sin()

    inputs = [torch.randn(4, 3), torch.tensor([[4]])]
    module = make_fx(step)(*inputs)
    # The computing thread packs rows for 4 ms, other threads move them for 2.
    times = {"relu": NodeTimes(1.0), "all_to_all": NodeTimes(4.0, 2.0, 1e6), "sin": NodeTimes(1.0)}
    monkeypatch.setattr(profiler, "measure_nodes", lambda *_: times)

    def computation(**options) -> list[float | None]:
        return [i.milliseconds for i in measured.program(module, inputs, **options).instructions]

    assert computation() == [4.0, None, 4.0]
    assert measured.other_threads_ms(measured.program(module, inputs)) == 2.0
    # In one of four microbatches.
    assert computation(shares={"all_to_all": 0.25}) == [1.75, None, 1.75]


def test_too_little_in_common_scales_nothing() -> None:
    assert speed_then([(2.0, 1.0), (98.0, None)]) is None
    assert speed_then([(5.0, None)]) is speed_then([(0.0, 0.0)]) is speed_then([]) is None
    assert speed_then([(50.0, 25.0), (50.0, None)]) == 0.5


def test_an_outlier_is_named_in_few_words() -> None:
    bucket = "all_reduce_coalesced (" + "256x32:float32, " * 40 + ") on cpu"
    said = profiler._outlier({"mm (4x4) on cpu": (1.0, 1.2), bucket: (1.0, 2.5)})
    assert "1 ms, now 2.5, of all_reduce_coalesced (256x32:float32, " in said
    assert len(said) < 400
