"""The step as two copies: the same numbers, the same routing, and each copy keeps to itself."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st
from torch import fx, nn

from lancet_kernels import MoELayer
from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.capture import capture
from lancet_kernels.graph.capture.captured_graph import copy_of
from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.from_fx import program_from_fx
from lancet_kernels.graph.program import Kind, Phase, Program
from lancet_kernels.graph.rules.rules import CARRIED, PARTIAL
from lancet_kernels.schedules.cut.duplex import duplex
from lancet_kernels.schedules.rewrite import walk
from lancet_kernels.schedules.rewrite.apply import instruction_order
from lancet_kernels.schedules.rewrite.cut import GraphCutter, cut_ranges
from lancet_kernels.schedules.strategies import AUTO, DUPLEX, STRATEGY_NAMES, Planner, PlanningOptions
from lancet_kernels.schedules.time.simulate import simulate
from tests.capturing import Step, read_only_step
from tests.examples import examples
from tests.grids import few_of
from tests.model_zoo import MODELS, Size
from tests.planned_steps import dear_communication
from tests.schedules.expanded import expand
from tests.schedules.rewrite.test_cut_torch import assert_same, outcome
from tests.schedules.small_programs import GivenCosts, program, random_programs

WHOLE_BATCH_GATES = ["gshard", "batch-prioritized", "expert-choice"]


def size(gate: str = "switch", batch: int = 4, layers: int = 4) -> Size:
    """Narrow experts: tokens are dropped."""
    top_k = 1 if gate == "switch" else 2
    return Size(batch=batch, width=8, heads=2, layers=layers, gate=gate, top_k=top_k, capacity_factor=0.75)


def copies_of(step: Step, copies: int = 2) -> fx.GraphModule:
    module = copy_of(step.joint)
    cut_ranges(module.graph, step.program, [duplex(step.program, copies)])
    module.graph.lint()
    module.recompile()
    return module


CASES = [("gpt2", "topk", 5, 4), ("bert", "random", 2, 2)]
CASES += [(name, "topk", 4 + number % 2, 4) for number, name in enumerate(MODELS)]


@pytest.mark.parametrize(("name", "gate", "batch", "layers"), few_of(CASES))
def test_copies_give_the_loss_the_gradients_and_the_very_routing_of_the_whole_batch(
    name, gate, batch, layers
):
    step = read_only_step(name, size(gate, batch, layers))
    plain = outcome(step.joint, step)
    capacity = [i.attributes["capacity"] for i in step.program.instructions if i.op == "lancet.gate"]
    assert any((slots >= capacity[0]).any() for _, slots in plain[1].values()), "nothing was dropped"
    assert_same(outcome(copies_of(step), step), plain)


@pytest.mark.long
@pytest.mark.parametrize("copies", [3, 5])
def test_more_than_two_copies(copies):
    step = read_only_step("gpt2", size("topk", batch=5))
    assert_same(outcome(copies_of(step, copies), step), outcome(step.joint, step))


@pytest.mark.parametrize("name", few_of(MODELS))
def test_each_copy_keeps_to_itself_until_sums(name):
    """Nothing but sums over the copies, and how many slots the last one used, is put together: the backward
    of a copy reads what the forward of that copy left."""
    step = read_only_step(name, size("topk", batch=5))
    planned = expand(step.program, [duplex(step.program)])
    forms = {i.attributes["form"] for i in planned.instructions if i.op == "lancet.reassemble"}
    assert forms == {str(PARTIAL), str(CARRIED)}
    graph = program_from_fx(copies_of(step))
    assert not {i.op for i in graph.instructions} & {
        "lancet.merge_parts",
        "lancet.merge_rows",
        "lancet.send_rows",
    }
    sends = [i for i in graph.instructions if i.kind is Kind.ALL_TO_ALL]
    assert len(sends) == 2 * len(step.program.positions(Kind.ALL_TO_ALL))


@pytest.mark.long
def test_the_graph_that_runs_takes_the_time_that_was_predicted():
    step = read_only_step("gpt2", size("topk", batch=5))
    for strategy in DUPLEX:
        planner = planner_of(step, _by_bytes, 1.0)
        plan = planner.plan(strategy)
        whole = walk.Step(step.joint, step.program, forward_outputs=step.forward_outputs)
        planned = walk.walk(whole, plan, walk.PLANNED)
        module = planned.module
        assert instruction_order(module.graph) == list(plan.order)
        ran = simulate(program_from_fx(module), _by_bytes)
        assert ran.iteration_ms == pytest.approx(plan.report.predicted.iteration_ms, rel=0.02)
        forward, backward = walk.walk(planned, plan, walk.RUNNING).halves
        assert len([n for n in backward.graph.nodes if n.name.startswith("all_to_all")]) >= 4
        assert len([n for n in forward.graph.nodes if n.name.startswith("all_to_all")]) >= 4


def _by_bytes(instruction, tensors) -> float:
    """By what an instruction reads and writes, so that it needs no word of how it was cut."""
    return (1e-3 if instruction.kind is Kind.ALL_TO_ALL else 1e-4) * instruction.bytes


def planner_of(step: Step, cost: Cost, limit_gb: float | None = None) -> Planner:
    cutter = GraphCutter(step.joint, step.program, cost)
    return Planner(step.program, cost, PlanningOptions(memory_limit_gb=limit_gb), cutter)


def elementwise(p: Program) -> Program:
    """The same instructions, each on all elements of its inputs alike: all of them can be cut."""
    tensors = {t: replace(spec, shape=(4,), bytes=100) for t, spec in p.tensors.items()}
    return replace(p, instructions=tuple(replace(i, op="aten.add") for i in p.instructions), tensors=tensors)


def test_copies_take_turns():
    """HiDup, section 4.1: while one copy communicates, the other one computes.

    A computes 2, X sends 2, B computes 2, Y sends 2, C computes 2; the copies half of each.
    """
    p = elementwise(program("A c f 2", "X a f 2 A", "B c f 2 X", "Y a f 2 B", "C c f 2 Y"))
    names = [i.name for i in expand(p, [duplex(p)]).instructions if "part" in i.name]
    assert names == [f"{name}_part{part}" for name in "AXBYC" for part in (0, 1)]
    planner = Planner(p, GivenCosts(), cut=lambda ranges: expand(p, ranges))
    timeline = planner.timeline(planner.plan("duplex"))
    start, end = timeline.times.start, timeline.times.end
    spans = {x.name: (start[i], end[i]) for i, x in enumerate(timeline.program.instructions)}
    assert spans["A_part1"] == spans["X_part0"] == (1, 2)
    assert spans["B_part0"] == spans["X_part1"] == (2, 3)
    assert spans["B_part1"] == spans["Y_part0"] == (3, 4)
    assert timeline.iteration_ms == 6


@pytest.mark.long
@pytest.mark.parametrize("gate", few_of(WHOLE_BATCH_GATES))
def test_a_gate_that_needs_the_whole_batch_is_refused_by_name(gate):
    step = read_only_step("gpt2", Size(layers=2, gate=gate, top_k=2))
    with pytest.raises(
        UserError, match=f"got gate, gate '{gate}', which needs the whole batch.*use strategy"
    ):
        duplex(step.program)
    planner = planner_of(step, dear_communication)
    assert set(planner.impossible) == set(DUPLEX)
    assert planner.plan(AUTO).report.chosen not in DUPLEX
    assert gate in planner.plan(AUTO).explain()


def test_an_input_that_is_as_long_as_the_batch_by_chance_stays_whole():
    """Learned positions are given from outside, as many as there are sequences."""
    model = WithPositions()
    x_BSD, position_S = torch.randn(4, 4, 8), torch.arange(4)
    for inputs in ((x_BSD, position_S), (position_S, x_BSD)):
        step = program_from_fx(capture(model, inputs).joint)
        forms = duplex(step).forms
        batched = [t for t in step.inputs if t in forms and not t.startswith("tangents")]
        assert [step.tensors[t].shape for t in batched] == [(4, 4, 8)]


def test_an_all_to_all_that_has_nothing_of_the_batch_is_refused():
    p = program("A c f 1", "X a f 1")
    with pytest.raises(UserError, match=r"X \(made.up\), which cannot be cut"):
        duplex(p)


@pytest.mark.parametrize("batch", [0, 1])
def test_one_sequence_or_none_is_refused(batch):
    layer = Size(width=8).moe()
    step = program_from_fx(capture(nn.Sequential(layer), (torch.randn(batch, 3, 8),)).joint)
    with pytest.raises(UserError, match=f"a batch of {batch}, expected at least 2"):
        duplex(step)


def test_a_step_without_all_to_alls_is_refused():
    with pytest.raises(UserError, match="without all-to-alls"):
        duplex(program("A c f 1", "B c b 1 A"))


@hypothesis_given(random_programs(), st.booleans())
@examples(40)
def test_auto_is_never_predicted_slower_than_any_strategy(p, with_rules):
    p = elementwise(p) if with_rules else p
    options = PlanningOptions(memory_limit_gb=1e9)
    planner = Planner(p, GivenCosts(0.1), options, lambda ranges: expand(p, ranges))
    plans = planner.plans()
    assert plans.keys() == set(STRATEGY_NAMES) - set(planner.impossible)
    # What only the optimizer reads is no batch.
    has_batch = any(p.instructions[i].phase is not Phase.OPTIMIZER for i in p.consumers["in"])
    can_be_cut = with_rules and has_batch and bool(p.positions(Kind.ALL_TO_ALL))
    assert bool(planner.impossible) != can_be_cut
    fastest = min(plan.report.predicted.iteration_ms for plan in plans.values())
    assert plans[AUTO].report.predicted.iteration_ms == fastest
    assert plans[plans[AUTO].report.chosen].report.predicted.iteration_ms == fastest


@pytest.mark.long
def test_auto_keeps_to_the_memory_limit():
    step = read_only_step("gpt2", size("topk", batch=5))
    free = planner_of(step, dear_communication, 1.0).plans()
    assert free[AUTO].report.chosen == "lancet+duplex"
    needs = sorted(plan.report.predicted.peak_memory_gb for plan in free.values())
    for limit in (needs[0], needs[-1]):
        bound = planner_of(step, dear_communication, limit).plans()
        fitting = [p for p in bound.values() if p.report.predicted.peak_memory_gb <= limit]
        fastest = min(p.report.predicted.iteration_ms for p in fitting)
        assert bound[AUTO].report.predicted.peak_memory_gb <= limit
        assert bound[AUTO].report.predicted.iteration_ms == fastest


class WithPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = MoELayer(8, 16, 4, gate="switch", capacity_factor=1.0)
        self.positions = nn.Embedding(5, 8)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        x_BSD, position_S = (one, other) if one.is_floating_point() else (other, one)
        return self.layer(x_BSD + self.positions(position_S)).sum()


class WithTorchDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = MoELayer(8, 16, 4, gate="switch", capacity_factor=1.0)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.dropout(x_BSD, 0.5)).sum()


def test_random_numbers_that_depend_on_the_cut_are_refused():
    model = WithTorchDropout()
    step = program_from_fx(capture(model, (torch.randn(4, 3, 8),)).joint)
    with pytest.raises(UserError, match=r"random numbers depend on the cut.*use lancet_kernels.Dropout"):
        duplex(step)
