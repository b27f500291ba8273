"""`optimize`: the module that it returns, and what happens where none fits."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels import MoELayer, UserError, expert_parameters
from lancet_kernels.graph.capture.capture import CaptureError, capture
from lancet_kernels.graph.program import Phase
from lancet_kernels.optimization.optimize import optimize
from tests.optimized import BOUND, optimized, outcome_of
from tests.planned_steps import Outcome, SmallStep, StepCase, build_step, gradients
from tests.refusals import refusal

# ---- The module that `optimize` returns


def use_on_rank(case: StepCase) -> list[str]:
    """The optimized module as a user would use it. -> collectives in the order in which they were issued."""
    module, inputs = build_step(case)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    ready = optimized(module, inputs)
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters()), "measuring changed it"
    assert ready.plan.ranges
    assert [*map(id, ready.parameters())] == [*map(id, module.parameters())]
    planned = outcome_of(ready, inputs, reduced=True)
    plain = outcome_of(module, inputs, reduced=False)
    assert planned.distance(plain) < BOUND
    again = outcome_of(ready, inputs, reduced=True)
    assert again.distance(planned) == 0
    # Gradients of two backwards add up, as they always do.
    ready.zero_grad(set_to_none=True)
    for _ in range(2):
        ready(*inputs)[0].backward()
    twice = Outcome(again.outputs, {name: grad / 2 for name, grad in gradients(module).items()})
    assert twice.distance(plain) < BOUND
    # Other shapes, no gradients: test_setups.py.
    ready.eval()
    with ready.recorded() as events:
        ready(*inputs)
    assert not module.training
    assert not any(e.resource == "compute" for e in events), "it runs the module"
    # The order that came out, as this rank ran it.
    ready.train()
    with ready.recorded() as events:
        ready(*inputs)[0].backward()
    ran = [e.name.removesuffix("_start") for e in events if e.kind.value == "compute"]
    wanted = list(ready.plan.order)
    # A collective that is waited for shows up twice: when it starts, and as its own result.
    first = [name for name in dict.fromkeys(ran) if name in set(wanted)]
    forward = {e.name.removesuffix("_start") for e in events if e.phase is Phase.FORWARD}
    planned_order = [name for name in wanted if name in set(first)]
    assert first == sorted(planned_order, key=lambda name: name not in forward), "the forward first"
    assert len(first) > 0.5 * len(wanted)
    return [e.name for e in events if e.name.endswith("_start")]


def test_optimized_module(pool):
    first, second = pool.run(use_on_rank, StepCase(layers=2), ranks=2, timeout_s=180)
    assert first == second
    assert sum("all_to_all" in name for name in first) > 4, "a layer has four; parts have more"


@pytest.mark.long
def test_a_plan_that_mixes_the_halves_or_is_for_another_graph_is_refused():
    """What else may be wrong with an order: tests/schedules/rewrite/test_apply.py."""
    step = SmallStep(StepCase(layers=2))
    good = step.planner(2).plan("lancet")
    phases = {i.name: i.phase for i in step.cutter(good.ranges).instructions}
    order = list(good.order)
    border = sum(phases[name] is Phase.FORWARD for name in order)
    late, early = order[border - 1 : border + 1]
    order[border - 1 : border + 1] = early, late
    with pytest.raises(UserError, match=f"order of a plan: got .*{early}.*{late}"):
        step.halves(replace(good, order=tuple(order)))
    with pytest.raises(UserError, match="plan for graph: got program graph"):
        step.halves(replace(good, program_fingerprint="0" * 64))


# ---- Modules that are captured, or not


class Branching(nn.Module):
    """Cannot be one graph: it branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MoELayer(8, 8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() if x.sum() > 0 else x.sum()


@pytest.mark.long
def test_the_same_tensors_can_be_captured_again():
    """A run must not mark its inputs as of changing size: B = S, so that torch takes both for one symbol."""
    module, inputs = build_step(StepCase(layers=2, batch=6, sequence=6))
    plain = outcome_of(module, inputs, reduced=True)
    for _ in range(2):
        ready = optimized(module, inputs, "none")
        assert outcome_of(ready, inputs, reduced=True).distance(plain) < BOUND
    captured = capture(module, inputs)
    names = [node.name for node in captured.joint.graph.nodes]
    shapes = [n.meta["val"].shape for n in captured.joint.graph.nodes if n.op == "placeholder"]
    assert not [name for name in names if "sym" in name]
    assert {type(size) for shape in shapes for size in shape} == {int}


def test_module_that_cannot_be_captured():
    with pytest.raises(CaptureError, match=r"capture of Branching: got .*, expected a module that") as caught:
        optimize(Branching(), (torch.ones(4, 8),))
    assert "\n" not in str(caught.value)
    assert "branch" in str(caught.value).lower()
    line = "return self.layer(x).sum() if x.sum() > 0 else x.sum()"
    assert re.search(rf'got {Path(__file__).name}, line \d+, "{re.escape(line)}": ', str(caught.value))


def test_a_compiled_model_is_refused():
    with pytest.raises(UserError, match="around it, expected the model that it wraps"):
        optimize(torch.compile(nn.Linear(2, 2)), (torch.ones(1, 2),))


def test_a_tensor_in_place_of_inputs_is_refused():
    """Its rows would be the inputs, and a batch of one sequence would train as tokens of no batch."""
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    with pytest.raises(UserError, match="got a tensor, expected a tuple"):
        optimize(module, x)
    step = optimized(module, (x,), accumulate=2)
    with pytest.raises(UserError, match="got a tensor, expected a tuple"):
        step.microbatches([x, x])


@pytest.mark.parametrize(
    ("model", "inputs", "by_name", "says"),
    [
        (torch.sin, (), {}, "model: got builtin_function_or_method, expected a torch.nn.Module"),
        (nn.Linear, (), {}, "model: got type, expected a torch.nn.Module"),
        (nn.Linear(2, 2), None, {}, "inputs of a step: got NoneType, expected a tuple"),
        (nn.Linear(2, 2), (), {"options": {}}, "options: got dict, expected PlanningOptions"),
        (nn.Linear(2, 2), (), {"plan": 3}, "plan: got int, expected the path of a file"),
    ],
)
def test_an_argument_of_another_type_is_refused(model, inputs, by_name, says):
    with pytest.raises(UserError, match=re.escape(says)):
        optimize(model, inputs, **by_name)


def test_unknown_strategy():
    with pytest.raises(UserError, match="strategy: got 'best', expected one of none, tutel, lancet-dw"):
        optimize(nn.Linear(2, 2), (torch.ones(1, 2),), strategy="best")


# ---- Ranks that disagree


def disagree_on_rank(what: str, times: str) -> str:
    odd = dist.get_rank() == 1
    module, inputs = build_step(StepCase(layers=4 if what == "layers" and odd else 2))
    if what == "batch" and odd:
        inputs = tuple(value[:4] for value in inputs)
    return refusal(lambda: optimize(module, inputs, times=times))


@pytest.mark.long
@pytest.mark.parametrize("what", ["batch", "layers"])
def test_ranks_that_disagree_refuse_to_start(pool, tmp_path, what):
    for error in pool.run(disagree_on_rank, what, str(tmp_path / "times.json"), ranks=2):
        assert error.startswith("training step across ranks: got another one on rank(s) 1"), error


def other_weights_on_rank(reduce_gradients: str | bool) -> tuple[list[Tensor], bool]:
    """Replicated parameters after `optimize`, where ranks had seeds of their own; are experts as before?"""
    torch.manual_seed(7 + dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 8), MoELayer(8, 12, 4))
    experts = [p.detach().clone() for p in expert_parameters(model)]
    optimized(model, (torch.randn(4, 8),), "none", reduce_gradients=reduce_gradients)
    kept = all(map(torch.equal, experts, expert_parameters(model)))
    own = {id(p) for p in expert_parameters(model)}
    return [p.detach() for p in model.parameters() if id(p) not in own], kept


@pytest.mark.long
def test_replicated_parameters_become_those_of_rank_0(pool):
    (first, kept), (second, also) = pool.run(other_weights_on_rank, "mean", ranks=2)
    assert kept
    assert also
    assert all(map(torch.equal, first, second))
    first, second = (found for found, _ in pool.run(other_weights_on_rank, False, ranks=2))
    assert not all(map(torch.equal, first, second)), "who reduces gradients himself keeps what he has"


def failing_plan_on_rank(folder: str) -> str:
    module, inputs = build_step(StepCase(layers=2))
    return refusal(lambda: optimize(module, inputs, cluster="p3dn", cache=f"{folder}/missing/plan.json"))


@pytest.mark.long
def test_rank_0_without_a_plan_keeps_nobody_waiting(pool, tmp_path):
    first, second = pool.run(failing_plan_on_rank, str(tmp_path), ranks=2, collective_timeout_s=20)
    assert first.startswith("plan file: got ")
    assert "in a folder that is missing" in first
    assert second == first
