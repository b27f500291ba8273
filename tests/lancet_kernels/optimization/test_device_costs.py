"""What a plan adds to a step is priced as the device that runs it has it: measured once, kept, and named."""

import json
import math
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from torch import Tensor

from lancet_kernels.graph.costs import measure_device
from lancet_kernels.graph.costs.clusters import CommunicationModel, load_cluster
from lancet_kernels.graph.costs.costs import CostModel, MeasuredCosts, source_of
from lancet_kernels.graph.costs.part_instruction import (
    DeviceCosts,
    DeviceCostsFile,
    cut_key,
    part_instruction,
)
from lancet_kernels.graph.costs.profiler import DEVICE_COSTS, Profiler
from lancet_kernels.graph.ops import facts, rule_for
from lancet_kernels.graph.program import Instruction, Phase, TensorSpec
from lancet_kernels.graph.rules.rules import WHOLE, cut_along
from lancet_kernels.optimization import step as library
from lancet_kernels.optimization.planning import plans_for
from lancet_kernels.schedules.cut.partition_range import PartitionOptions
from lancet_kernels.schedules.cut.ranges import reassembly_instruction
from lancet_kernels.schedules.rewrite.cut import GraphCutter
from lancet_kernels.schedules.strategies import Planner, PlanningOptions
from lancet_kernels.schedules.time.simulate import simulate
from tests.planned_steps import SmallStep, StepCase

PER_EXPERT = ("lancet.grouped_gemm_dw", "lancet.grouped_gemm_dbias")
"""Their results have no rows."""
GIGABYTES_PER_S = 2800.0
LAUNCH_MS = 0.003
CASE = StepCase(layers=2)


def result_bytes(result: object) -> int:
    return result.nbytes if isinstance(result, Tensor) else sum(map(result_bytes, result or ()))


@pytest.fixture(scope="module")
def step() -> SmallStep:
    """A captured step of this one process."""
    return SmallStep(CASE)


@pytest.fixture
def fake_gpu(monkeypatch):
    """A device whose calls take 3 us, and their result's bytes, read and written, at 2,800 GB/s.

    -> results of the calls, in order. Reading a cluster file fails.
    """
    calls: list[object] = []

    def milliseconds_of(call, device):
        calls.append(call())
        # A launch is measured as several, which return nothing.
        launches = measure_device._LAUNCHES if calls[-1] is None else 1
        return launches * LAUNCH_MS + 2 * result_bytes(calls[-1]) / GIGABYTES_PER_S / 1e6

    def no_cluster(name):
        raise AssertionError(f"priced by cluster file {name}")

    monkeypatch.setattr(measure_device, "milliseconds_of", milliseconds_of)
    monkeypatch.setattr(library, "slowdown", lambda *_: 1.0)
    monkeypatch.setattr(library, "differ", lambda *_: False)  # a busy machine takes another time for the step
    monkeypatch.setattr(library, "load_cluster", no_cluster)
    return calls


def costs_of(step: SmallStep, folder, model: str = "cuda Fake GPU, 1 threads") -> MeasuredCosts:
    profiler = Profiler(step.step.groups, torch.device("cpu"), folder / "times.json")
    profiler.device_model = model
    costed = replace(step.step, profiler=profiler).costed(None)
    step.program = costed.program
    return costed.cost


@pytest.mark.long
def test_a_plan_is_priced_from_what_the_device_measured(fake_gpu, tmp_path, step) -> None:
    cost = costs_of(step, tmp_path)
    assert source_of(cost).endswith(
        f"parts and joining them measured on cuda Fake GPU, 1 threads, torch {torch.__version__}"
    )
    assert cost.device.launch_ms == pytest.approx(LAUNCH_MS)

    # A range in two parts: what matters by its measured share, the rest by launch and half, joining by bytes.
    first, last = step.candidates()["layer"]
    cut = step.cut(first, last, 2)
    priced = {"measured": 0, "estimated": 0}
    for i in step.program.instructions[step.program.index[first] : step.program.index[last] + 1]:
        if not any(t in cut.forms for t in (*i.inputs, *i.outputs)) or i.kind.is_communication:
            continue
        part, specs = part_instruction(i, step.program.tensors, cut.forms, 0, 2)
        share = cost.device.part_ms(part, specs, 1.0)
        assert (share is not None) == facts(i.op).parts_are_measured, i.name
        whole = i.milliseconds
        fixed = min(LAUNCH_MS, whole)
        expected = share * whole if share else fixed + (whole - fixed) / 2
        assert cost(part, specs) == pytest.approx(expected)
        priced["measured" if share else "estimated"] += 1
    assert min(priced.values()) >= 2
    joined = reassembly_instruction(step.program, step.named("lancet.combine")[0], 0, 2)
    wanted = LAUNCH_MS + joined.bytes / GIGABYTES_PER_S / 1e6
    assert cost(joined, step.program.tensors) == pytest.approx(wanted)

    # What that comes to in a plan, and where it says it is from.
    options = PlanningOptions(partition=PartitionOptions(most_parts=2))
    cutter = GraphCutter(step.joint, step.program, cost)
    plan = Planner(step.program, cost, options, cutter).plan("lancet-partition")
    assert f"Costs: {source_of(cost)}" in plan.explain(details=True).splitlines()
    program = cutter([cut])
    total = sum(cost(i, program.tensors) for i in program.instructions)
    assert simulate(program, cost).iteration_ms <= total
    parts = [i for i in program.instructions if i.attributes.get("parts") == 2]
    assert all(i.milliseconds is not None for i in parts)
    assert len(parts) > 2 * priced["measured"]


@pytest.mark.long
def test_measured_once_per_device_model(fake_gpu, tmp_path, step) -> None:
    first = costs_of(step, tmp_path)
    measured = len(fake_gpu)
    assert measured > 10
    assert costs_of(step, tmp_path) == first
    assert len(fake_gpu) == measured, "measured again"
    entry = json.loads((tmp_path / DEVICE_COSTS).read_text())["devices"][0]
    assert (entry["device"], entry["torch"]) == ("cuda Fake GPU, 1 threads", torch.__version__)
    assert entry["source"] == "measured"
    # A new shape of a known device: its parts only; another device: everything.
    before = {key for key in first.device.shares if "aten.addmm" in key}
    wider = costs_of(SmallStep(replace(CASE, width=12)), tmp_path)
    assert not any(result is None for result in fake_gpu[measured:])
    assert before < {key for key in wider.device.shares if "aten.addmm" in key}
    measured = len(fake_gpu)
    costs_of(step, tmp_path, "cuda Other GPU, 1 threads")
    assert sum(result is None for result in fake_gpu[measured:]) == 1
    assert len(json.loads((tmp_path / DEVICE_COSTS).read_text())["devices"]) == 2


@pytest.mark.long
def test_parts_are_run_with_the_operands_of_a_part(fake_gpu, step) -> None:
    """A part's result has the shape that its rule says; the counts of experts are those of a part."""
    wanted = measure_device.cuts_to_measure(step.program)
    assert {k for cut in wanted for k in cut.parts} == {2, 4, 8}
    fake_gpu.clear()
    measure_device.measure_parts(step.joint, step.values, wanted, torch.device("cpu"))
    results = iter(fake_gpu)
    for node, cuts in groupby(sorted(wanted, key=lambda p: step.program.index[p.node]), lambda p: p.node):
        instruction = step.program.instructions[step.program.index[node]]
        whole = next(results)
        for way, parts in [(c, k) for c in cuts for k in c.parts]:
            result = next(results)
            made, specs = part_instruction(instruction, step.program.tensors, way.forms, 0, parts)
            parted = result[0] if isinstance(result, tuple) else result
            if rule_for(instruction).in_experts:
                # A window of the slots of every (rank, expert): 1/k of its rows, rounded up.
                counts = next(t for t in instruction.inputs if "int" in step.program.tensors[t].dtype)
                groups = math.prod(step.program.tensors[counts].shape)
                if parted.is_floating_point() and instruction.op not in PER_EXPERT:
                    assert parted.shape[1:] == whole.shape[1:]
                    assert 0 < parted.shape[0] <= whole.shape[0] // parts + groups
            elif way.forms.get(instruction.outputs[0], WHOLE).is_cut:
                assert tuple(parted.shape) == specs[made.outputs[0]].shape
    assert not list(results)
    assert all(
        step.program.instructions[step.program.index[cut.node]].phase is Phase.FORWARD
        or rule_for(step.program.instructions[step.program.index[cut.node]]).in_experts
        for cut in wanted
    )


@pytest.mark.long
def test_measuring_on_this_machine(step, tmp_path) -> None:
    """The very functions, on the CPU."""
    cost = costs_of(step, tmp_path, "cpu of this machine")
    assert "parts and joining them measured on cpu of this machine" in source_of(cost)
    assert cost.device.shares.keys() >= {p.key for p in measure_device.cuts_to_measure(step.program)}
    device = torch.device("cpu")
    assert measure_device.measure_launch(device) > 0
    points = measure_device.measure_copies(device)
    assert [size for size, _ in points] == [4.0**n * 1024 for n in range(1, 9)]
    assert points[-1][1] > points[0][1] > 0
    assert cost.device.counting.keys() >= {"lancet.part_rows", "lancet.merge_rows"}
    for op, of_op in cost.device.counting.items():
        assert list(of_op) == sorted(of_op)
        assert cost.device.added_ms(op, of_op[0][0]) == of_op[0][1] > 0
    assert all(share > 0 for points in cost.device.shares.values() for _, share in points)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": "lancet-device-costs", "version": 1, "devices": [{"device": 3}]}']
)
def test_a_file_that_is_not_readable_is_measured_again(tmp_path, text: str) -> None:
    (tmp_path / DEVICE_COSTS).write_text(text)
    file = DeviceCostsFile(tmp_path / DEVICE_COSTS)
    with pytest.warns(UserWarning, match="measured again"):
        assert file.get("GPU", "2.13") is None
    costs = DeviceCosts("GPU", "2.13", 0.1, ((1.0, 0.1), (2.0, 0.3)), shares={"a": ((2.0, 0.5),)})
    file.put(costs)
    counting = {"lancet.part_rows": ((8.0, 0.2),)}
    file.put(replace(costs, counting=counting, shares={"b": ((4.0, 0.25),)}))
    assert file.get("GPU", "2.13").shares == {"a": ((2.0, 0.5),), "b": ((4.0, 0.25),)}
    assert file.get("GPU", "2.13").counting == counting
    assert file.get("GPU", "2.12") is None


def test_between_measured_numbers_of_parts_the_time_of_all_grows_evenly() -> None:
    x, w, y = (TensorSpec(name, shape) for name, shape in (("x", (24, 4)), ("w", (4, 6)), ("y", (24, 6))))
    tensors = {spec.name: spec for spec in (x, w, y)}
    mm = Instruction("mm", "aten.mm", ("x", "w"), ("y",), milliseconds=10.0)
    forms = {"x": cut_along(0), "y": cut_along(0)}
    key = cut_key(*part_instruction(mm, tensors, forms, 0, 2))
    assert key == "aten.mm (24x4:float32 cut 0, 4x6:float32 whole, 24x6:float32 cut 0) []"
    # All parts together: 1.2, 1.6 and 2.0 times the whole.
    shares = ((2.0, 0.6), (4.0, 0.4), (8.0, 0.25))
    device = DeviceCosts("GPU", "2.13", 0.1, ((1.0, 0.1),), shares={key: shares})
    cost = MeasuredCosts(device, CommunicationModel({}), "here")
    found = [cost(*part_instruction(mm, tensors, forms, 1, k)) * k for k in (2, 3, 4, 6, 8, 12)]
    assert found == pytest.approx([12.0, 14.0, 16.0, 18.0, 20.0, 24.0])
    # Cut otherwise it was not measured: a launch, and 1/k of the rest.
    forms = {"w": cut_along(1), "y": cut_along(1)}
    assert cost(*part_instruction(mm, tensors, forms, 0, 2)) == pytest.approx(0.1 + 9.9 / 2)


# ---- The plan cache


def test_a_plan_for_one_cluster_is_not_taken_for_another(tmp_path, caplog, step) -> None:
    cache = tmp_path / "plan.json"
    clusters = {name: load_cluster(name) for name in ("p3dn", "p4de")}
    # The same name with another number in the file is another cluster.
    for cluster in (*clusters.values(), clusters["p4de"], replace(clusters["p4de"], memory_gb_per_s=1.0)):
        cost = CostModel.for_cluster(cluster, 8)
        (plan,) = plans_for(step.costed(cost), "lancet-dw", PlanningOptions(), cache, 1)
        assert plan.report.costs == source_of(cost)
        plan.save(cache)
    p3dn, slower = caplog.messages
    caplog.clear()
    assert "planning anew: plan file: got costs calculated for cluster p3dn" in p3dn
    assert "expected calculated for cluster p4de" in p3dn
    assert "got costs calculated for cluster p4de" in slower
    # As many ranks as before, or it is another plan, too.
    plans_for(step.costed(CostModel.for_cluster(cluster, 4)), "lancet-dw", PlanningOptions(), cache, 1)
    assert "planning anew" in caplog.text


@pytest.mark.long
def test_a_measured_plan_is_taken_again_whatever_was_measured_since(tmp_path, caplog, step) -> None:
    cache = tmp_path / "plan.json"
    programs = []
    for folder in ("now", "later"):
        cost = costs_of(step, tmp_path / folder)
        programs.append(step.program)
        (plan,) = plans_for(step.costed(cost), "lancet-dw", PlanningOptions(), cache, 1)
        plan.save(cache)
    assert [i.milliseconds for i in programs[0].instructions] != [
        i.milliseconds for i in programs[1].instructions
    ]
    assert "planning anew" not in caplog.text
