"""Axes, pipelines, ranges and the dynamic program."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.clusters import load_cluster
from lancet_kernels.graph.costs.costs import CostModel, durations
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program, TensorSpec
from lancet_kernels.graph.rules.rules import CARRIED, IRREGULAR, PARTIAL, WINDOW, cut_along
from lancet_kernels.schedules.cut.partition_range import (
    IMPOSSIBLE,
    PartitionOptions,
    PipelineCosts,
    choose_ranges,
    forward_length,
    group_instructions,
)
from lancet_kernels.schedules.cut.ranges import (
    PREFER_CUT,
    AxisInference,
    PartitionRange,
    _cost,
    positions,
    stages,
)
from lancet_kernels.schedules.order.ordering import issue_early
from lancet_kernels.schedules.time.simulate import simulate
from tests.examples import examples
from tests.grids import few_of
from tests.schedules.expanded import expand
from tests.schedules.optimum import most_cut
from tests.schedules.small_programs import GivenCosts, nth, program, tiny_step


def moe_chain(*milliseconds: float, size: int = 8, saved: bool = False) -> Program:
    """Elementwise computation and all-to-alls in a row: c x c x c ..., all cut along the capacity or batch.

    The all-to-alls are elementwise here, so that any cut of the batch is valid.
    """
    tensors = {"t0": TensorSpec("t0", (size, 4), "int8")}
    instructions = []
    for n, ms in enumerate(milliseconds, 1):
        tensors[f"t{n}"] = TensorSpec(f"t{n}", (size, 4), "int8")
        kind = Kind.COMPUTE if n % 2 else Kind.ALL_TO_ALL
        instructions.append(
            Instruction(f"i{n}", "aten.add", (f"t{n - 1}",), (f"t{n}",), kind, milliseconds=ms, flops=1)
        )
    last = f"t{len(milliseconds)}"
    outputs = tuple(tensors)[1:] if saved else (last,)
    return Program("chain", tuple(instructions), tensors, ("t0",), outputs)


def test_stages():
    p = program("A c f 1", "B c f 1 A", "X a f 1 B", "Y a f 1 X", "C c f 1 Y")
    forms = {t: cut_along(0) for t in p.producer}
    assert [stage.in_parts for stage in stages(p, 0, 4, forms)] == [[0, 1], [2, 3], [4]]


NORM, ADD, GATE, COMBINE = "aten.native_layer_norm", "aten.add", "lancet.gate", "lancet.combine"


def moe_block(p, name):
    """First and last instruction of block 1 of a tiny step: `norm1`, `norm2` or an op, to what follows it."""
    first = {"norm1": nth(p, NORM, 2), "norm2": nth(p, NORM, 3)}.get(name) or nth(p, name)
    # Positions and tokens, then two residuals in each block.
    return p.index[first], p.index[nth(p, ADD, 4)]


def test_axes_of_a_training_step():
    p = tiny_step()
    inference = AxisInference(p)
    whole = inference.forms(*moe_block(p, "norm1"))
    assert whole[f"{nth(p, NORM, 2)}.0"] == cut_along(0)
    assert whole[nth(p, "aten.transpose", 4)] == cut_along(0)  # queries with the heads in front
    assert whole[p.instructions[p.index["gate"]].inputs[0]] == cut_along(0)
    assert whole["gate.3"] == CARRIED
    assert whole["dispatch"] == whole["grouped_gemm"] == IRREGULAR
    assert whole["combine"] == whole[nth(p, ADD, 4)] == cut_along(0)
    assert not any(t in whole for t in p.parameters)
    first, last = p.positions(Kind.ALL_TO_ALL)[:2]
    experts = inference.forms(first, last)
    assert set(experts.values()) == {WINDOW}
    first, last = p.positions(Kind.ALL_TO_ALL)[2:]
    backward = inference.forms(first, last)
    assert backward["grouped_gemm_dw"] == PARTIAL


def test_no_axes_without_an_all_to_all_or_around_a_gate_of_the_whole_batch():
    p = tiny_step(gate="batch-prioritized")
    inference = AxisInference(p)
    at = p.index
    assert inference.forms(at[nth(p, NORM, 0)], at[nth(p, ADD, 2)]) is None
    assert inference.forms(*moe_block(p, GATE)) is None
    behind = inference.forms(*moe_block(p, "lancet.kept_counts"))
    assert behind["gate.0"] == cut_along(0)
    assert behind["dispatch"] == IRREGULAR
    # An irregular tensor cannot come from outside: the experts alone can only be cut into windows of slots.
    assert inference.forms(*moe_block(p, "lancet.all_to_all")) is None
    assert inference.forms(at[nth(p, NORM, 4)], at[nth(p, "aten.nll_loss_forward")]) is None


def test_no_solver_cuts_more():
    """Compared are ranges of all lengths around all-to-alls, forward and backward."""
    p = tiny_step()
    inference = AxisInference(p)
    compared = 0
    for middle in [i for i, x in enumerate(p.instructions) if x.kind is Kind.ALL_TO_ALL]:
        for before, behind in itertools.product(range(0, 12, 3), range(1, 12, 3)):
            first, last = max(0, middle - before), min(len(p.instructions) - 1, middle + behind)
            tables, best = inference._tables(first, last), most_cut(inference, first, last)
            if tables is None:
                assert best is None
                continue
            tensors = {t for i in tables for t in inference._operands(i)}
            inside = {t for i in tables for t in p.instructions[i].outputs}
            forms = inference._best(tables, {t: inference._possible(t, t in inside) for t in tensors})
            if forms is None:
                assert best is None
                continue
            cut = sum(tuple(forms[t] for t in inference._operands(i)) in table for i, table in tables.items())
            assert PREFER_CUT * cut - sum(_cost(forms[t]) for t in tensors) == best
            compared += 1
    assert compared > 10


@pytest.mark.long
def test_alike_layers_are_solved_once():
    """Whatever each of them was measured to take; their pipelines have times of their own."""
    p = tiny_step(layers=8)
    measured = tuple(replace(x, milliseconds=1.0 + 0.01 * i) for i, x in enumerate(p.instructions))
    p = replace(p, instructions=measured)
    costs = PipelineCosts(p, CostModel.for_cluster(load_cluster("p3dn"), 16))
    inference = costs.inference
    times = set()
    for layer in (1, 3, 5, 7):
        norm1, norm2 = (p.index[nth(p, NORM, 2 * layer + n)] for n in (0, 1))
        residual1, residual2 = (p.index[nth(p, ADD, 2 * layer + n)] for n in (1, 2))
        assert inference.forms(norm1, residual1 + 1) is None
        assert inference.forms(norm2, residual2)[nth(p, COMBINE, layer // 2)] == cut_along(0)
        times.add(costs.milliseconds(norm2, residual2, 1))
    assert sum(solution is not None for solution in inference._solutions.values()) == 1
    assert len(times) == 4


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_expanded_programs_run_as_long_as_the_pipeline_said(parts):
    p = tiny_step(gpus=16, layers=2)
    cost = CostModel.for_cluster(load_cluster("p3dn"), 16)
    costs = PipelineCosts(p, cost)
    first, last = moe_block(p, "norm2")
    expanded = expand(p, [costs.cut(first, last, parts)])
    names = [i.name for i in expanded.instructions]
    assert f"gate_part{parts - 1}" in names
    assert "gate" not in names
    # The backward pass reads the same tensors as before.
    produced = {t for i in expanded.instructions for t in i.outputs} | set(expanded.inputs)
    assert all(t in produced for i in p.instructions if i.phase is not Phase.FORWARD for t in i.inputs)
    before = sum(durations(p, cost)[:first])
    expanded = expanded.reordered(issue_early(expanded, range(len(expanded))))
    times = simulate(expanded, cost).times
    behind = expanded.index[p.instructions[last + 1].name]
    end = max(times.end[i] for i in range(behind))
    assert end - before == pytest.approx(costs.milliseconds(first, last, parts))


def test_carried_state_goes_from_part_to_part():
    p = tiny_step()
    forms = AxisInference(p).forms(p.index["gate"], p.index["combine"])
    expanded = expand(p, [PartitionRange("gate", "combine", 4, forms)])
    gates = [i for i in expanded.instructions if i.op == GATE]
    used = p.instructions[p.index["gate"]].inputs[1]
    assert [g.inputs[1] for g in gates] == [used, *(g.outputs[3] for g in gates[:3])]
    assert len(gates) == 4


def test_a_range_of_another_program_is_refused():
    p = tiny_step()
    with pytest.raises(UserError, match="partition range"):
        positions(p, PartitionRange("nothing", "combine", 2, {}))
    with pytest.raises(UserError, match="partition range"):
        positions(p, PartitionRange("combine", "gate", 2, {}))


def test_parts_that_do_not_divide_are_impossible():
    p = tiny_step()
    costs = PipelineCosts(p, CostModel.for_cluster(load_cluster("p3dn"), 2))
    first, last = moe_block(p, GATE)
    assert costs.milliseconds(first, last, 4) < IMPOSSIBLE
    assert costs.milliseconds(first, last, 3) == IMPOSSIBLE


def brute_force(p, cost, groups, longest_ms, most_parts):
    """Every way to cut the groups into consecutive ranges, every number of parts for each."""
    costs = PipelineCosts(p, cost)
    ms = durations(p, cost)
    best = float("inf")
    for marks in itertools.product([False, True], repeat=len(groups) - 1):
        total, start = 0.0, 0
        for n in range(len(groups)):
            if n == len(groups) - 1 or marks[n]:
                first, last = groups[start][0], groups[n][1]
                if start < n and sum(ms[first : last + 1]) > longest_ms:
                    total = float("inf")
                total += min(costs.milliseconds(first, last, k) for k in range(1, most_parts + 1))
                start = n + 1
        best = min(best, total)
    return best


@examples(40)
@hypothesis_given(
    st.lists(st.integers(0, 8), min_size=2, max_size=8),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.sampled_from([6.0, 15.0, 1e9]),
)
def test_dynamic_program_equals_brute_force(milliseconds, overhead, longest):
    # The made-up all-to-alls have an elementwise rule, so that every range can be cut along the batch.
    p = moe_chain(*milliseconds)
    cost = GivenCosts(overhead)
    options = PartitionOptions(most_parts=4, group_ms=1e-9, longest_range_ms=longest)
    ranges, forward_ms = choose_ranges(PipelineCosts(p, cost), options)
    groups = group_instructions(p, durations(p, cost), 1e-9)
    assert forward_ms == pytest.approx(brute_force(p, cost, groups, longest, 4))
    expanded = expand(p, ranges)
    early = expanded.reordered(issue_early(expanded, range(len(expanded))))
    assert simulate(early, cost).iteration_ms <= forward_ms + 1e-9


@pytest.mark.parametrize("gate", ["switch", "batch-prioritized"])
@pytest.mark.parametrize("batch", few_of([8, 4, 6]))
def test_dynamic_program_equals_brute_force_on_a_tiny_model(gate, batch):
    p = tiny_step(gpus=16, batch=batch, gate=gate)
    cost = CostModel.for_cluster(load_cluster("p3dn"), 16)
    ms = durations(p, cost)[: forward_length(p)]
    group_ms = sum(ms) / 8
    options = PartitionOptions(most_parts=4, group_ms=group_ms, longest_range_ms=1e9)
    groups = group_instructions(p, ms, group_ms)
    assert len(groups) < 16
    ranges, forward_ms = choose_ranges(PipelineCosts(p, cost), options)
    assert forward_ms == pytest.approx(brute_force(p, cost, groups, 1e9, 4))
    for r in ranges:
        gates = [
            n for n in range(p.index[r.first], p.index[r.last] + 1) if p.instructions[n].op == "lancet.gate"
        ]
        assert gate == "switch" or not gates


def test_options_from_the_environment(monkeypatch):
    for name in ("LANCET_RHO", "LANCET_GAMMA", "LANCET_IOTA"):
        monkeypatch.delenv(name, raising=False)
    assert PartitionOptions.from_environment() == PartitionOptions(8, None, None)
    monkeypatch.setenv("LANCET_RHO", "4")
    monkeypatch.setenv("LANCET_GAMMA", "2.5")
    monkeypatch.setenv("LANCET_IOTA", "30")
    assert PartitionOptions.from_environment() == PartitionOptions(4, 2.5, 30.0)
    assert PartitionOptions.from_environment(2, longest_range_ms=7.0) == PartitionOptions(2, 2.5, 7.0)
    monkeypatch.setenv("LANCET_RHO", "many")
    with pytest.raises(UserError, match="LANCET_RHO: got many"):
        PartitionOptions.from_environment()
    assert PartitionOptions.from_environment(3).most_parts == 3, "what does not count may be wrong"
    monkeypatch.setenv("LANCET_RHO", "0")
    with pytest.raises(UserError, match="rho"):
        PartitionOptions.from_environment()
