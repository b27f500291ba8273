"""A plan in which everything happens (ranges cut, instructions moved, collectives early) trains as before."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.capture import capture
from lancet_kernels.graph.from_fx import program_from_fx
from lancet_kernels.graph.program import Kind, fingerprint
from lancet_kernels.schedules.cut.partition_range import PartitionOptions
from lancet_kernels.schedules.order.ordering import sink_statistics
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.rewrite.apply import instruction_order, reorder
from lancet_kernels.schedules.rewrite.walk import PLANNED, RUNNING, Step, check_halves, walk
from lancet_kernels.schedules.strategies import PlanningOptions
from tests.grids import few_of
from tests.model_zoo import MODELS, Size, make_model
from tests.planned_steps import ADDED_BY_CUTTING
from tests.schedules.small_programs import make_plan


def slow_link(instruction, tensors) -> float:
    """All-to-alls take long; a part of k takes 1/k of the time and a little more."""
    is_free = not instruction.bytes or instruction.op in ADDED_BY_CUTTING
    whole = {Kind.ALL_TO_ALL: 40.0, Kind.COMPUTE: 0.0 if is_free else 1.0}[instruction.kind]
    return whole / instruction.attributes.get("parts", 1) + (0.01 if whole else 0.0)


STRATEGIES = ("lancet", "lancet-partition", "tutel")
CASES = [(name, STRATEGIES[number % 3]) for number, name in enumerate(MODELS)]


@pytest.mark.parametrize(("name", "strategy"), few_of(CASES))
def test_a_plan_trains_as_the_module_does(name, strategy):
    size = Size(8, sequence=4, width=8, heads=2, layers=2, top_k=2, gate="topk", capacity_factor=1.0)
    model, inputs = make_model(name, size)
    loss = model(*inputs)
    loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    captured = capture(model, inputs)
    reorder(captured.joint.graph, sink_statistics(program_from_fx(captured.joint)))
    program = program_from_fx(captured.joint)
    plan = make_plan(
        program, slow_link, strategy, PlanningOptions(PartitionOptions(most_parts=3), 1.0), captured.joint
    )
    assert plan.ranges
    step = Step(captured.joint, program, forward_outputs=captured.forward_outputs)
    planned = walk(step, plan, PLANNED)
    came = instruction_order(planned.module.graph)
    whole = captured.with_graph(planned.module)
    run = whole.compile(lambda joint, _outputs: walk(replace(planned, module=joint), plan, RUNNING).halves)

    assert came == list(plan.order)
    assert any(name.startswith("all_to_all") and name.endswith("_part1") for name in came)

    found = run(*inputs)
    found.backward()
    torch.testing.assert_close(found, loss, rtol=1e-10, atol=1e-10)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[n], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("halves", "said"),
    [
        ([["a", "c"], ["b", "d"]], "changed the order: c before b"),
        ([["a", "b"], ["d", "c"]], "changed the order: d before c"),
        ([["a", "b", "x"], ["c"]], "x is in no plan"),
        ([["a", "b"], ["b", "c"]], "b runs 2 times"),
    ],
)
def test_a_half_that_runs_in_another_order_is_an_error(halves, said):
    with pytest.raises(AssertionError, match=said):
        check_halves("abcd", halves)
    check_halves("abcd", [["a"], ["c", "d"]])  # nobody reads b


LOGGER = "lancet_kernels.schedules.rewrite.walk"


def a_step() -> tuple[Step, Plan]:
    """A linear map, and a plan with the gradient of its bias, `sum_1`, before that of its weight."""
    captured = capture(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), (torch.ones(2, 4),))
    step = Step(captured.joint, forward_outputs=captured.forward_outputs)
    order = "t addmm tanh detach detach_1 tanh_backward sum_1 view t_1 mm t_2 t_3".split()
    return step, Plan("step", fingerprint(step.program), "by hand", tuple(order))


def test_each_pass_logs_what_it_changes(caplog):
    step, plan = a_step()
    with caplog.at_level(logging.DEBUG, LOGGER):
        walked = walk(step, plan, (*PLANNED, *RUNNING))
    texts = [message for name, _, message in caplog.record_tuples if name == LOGGER]
    logged = {text.partition(":")[0]: text for text in texts}
    assert list(logged) == ["cut", "order", "split", "start_early_wait_late", "write_in_place", "check"]
    moved = [line for line in logged["order"].splitlines() if line[:1] in "+-" and "%sum_1 :" in line]
    assert sorted(line[0] for line in moved) == ["+", "-"], logged["order"]
    assert logged["check"].endswith("no change")
    assert instruction_order(walked.module.graph) == list(plan.order)


def test_a_pass_can_be_left_out_by_name(monkeypatch):
    step, plan = a_step()
    original = instruction_order(step.module.graph)
    monkeypatch.setenv("LANCET_WITHOUT_PASSES", "order,write_in_place")
    assert instruction_order(walk(step, plan, PLANNED).module.graph) == original != list(plan.order)
    monkeypatch.setenv("LANCET_WITHOUT_PASSES", "reorder")
    with pytest.raises(
        UserError, match="pass in LANCET_WITHOUT_PASSES: got 'reorder', expected one of shard_p"
    ):
        walk(step, plan, PLANNED)
