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
from lancet_kernels.graph.program.program import Phase
from lancet_kernels.optimization.optimize import optimize
from lancet_kernels.schedules.rewrite.apply import instruction_order
from tests.grids import few_of
from tests.optimized import BOUND, optimized, outcome_of
from tests.planned_steps import (
    Outcome,
    SmallStep,
    StepCase,
    build_step,
    gradients,
    in_halves,
    sum_over_ranks,
)

# ---- The module that `optimize` returns


def use_on_rank(case: StepCase) -> dict[str, object]:
    """The optimized module as a user would use it."""
    module, inputs = build_step(case)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    ready = optimized(module, inputs)
    unchanged = all(torch.equal(before[name], p) for name, p in module.named_parameters())
    planned = outcome_of(ready, inputs, reduced=True)
    plain = outcome_of(module, inputs, reduced=False)
    again = outcome_of(ready, inputs, reduced=True)
    # Gradients of two backwards add up, as they always do.
    ready.zero_grad(set_to_none=True)
    for _ in range(2):
        ready(*inputs)[0].backward()
    twice = Outcome(again.outputs, {name: grad / 2 for name, grad in gradients(module).items()})
    found = {
        "unchanged": unchanged,
        "ranges": len(ready.plan.ranges),
        "distance": planned.distance(plain),
        "repeated": again.distance(planned),
        "twice": twice.distance(plain),
        "same parameters": [id(p) for p in ready.parameters()] == [id(p) for p in module.parameters()],
    }
    # Other shapes, no gradients: test_setups.py.
    ready.eval()
    with ready.recorded() as events:
        ready(*inputs)
    found["eval runs the module"] = not module.training and not any(e.resource == "compute" for e in events)
    # The order that came out, as this rank ran it.
    ready.train()
    with ready.recorded() as events:
        ready(*inputs)[0].backward()
    ran = [e.name.removesuffix("_start") for e in events if e.kind.value == "compute"]
    issued = [e.name for e in events if e.name.endswith("_start")]
    wanted = list(ready.plan.order)
    # A collective that is waited for shows up twice: when it starts, and as its own result.
    first = [name for name in dict.fromkeys(ran) if name in set(wanted)]
    forward = {e.name.removesuffix("_start") for e in events if e.phase is Phase.FORWARD}
    found["order"] = first == in_halves(first, wanted, forward)
    found["covered"] = len(first) / len(wanted)
    found["issued"] = issued
    return found


def test_optimized_module(pool):
    first, second = pool.run(use_on_rank, StepCase(layers=2), ranks=2, timeout_s=180)
    for found in (first, second):
        assert found["unchanged"], "measuring or planning changed a parameter"
        assert found["ranges"] > 0
        assert found["distance"] < BOUND
        assert found["repeated"] == 0
        assert found["twice"] < BOUND
        assert found["same parameters"]
        assert found["eval runs the module"]
        assert found["order"]
        assert found["covered"] > 0.5
    assert first["issued"] == second["issued"]
    assert sum("all_to_all" in name for name in first["issued"]) > 4, "a layer has four; parts have more"


@pytest.mark.long
def test_order_that_came_out_is_the_order_asked_for():
    """The order of a plan that runs, and what is said of plans that were broken by hand."""
    step = SmallStep(StepCase(layers=2))
    good = step.planner(2).plan("lancet")
    order = list(good.order)
    halves = [instruction_order(half.graph) for half in step.halves(good)]
    halves = [list(dict.fromkeys(name.removesuffix("_start") for name in half)) for half in halves]
    ran = [name for half in halves for name in half]
    ran = [name for name in ran if name in set(order)]
    sends = [name for name in order if name.startswith("all_to_all")]
    first, last = order.index(sends[0]), order.index(sends[-1])
    swapped = list(order)
    swapped[first], swapped[last] = swapped[last], swapped[first]
    border = sum(name in set(halves[0]) for name in order)
    broken = {
        "swapped": swapped,
        "missing": [name for name in order if name != sends[0]],
        "across": [*order[: border - 1], order[border], order[border - 1], *order[border + 1 :]],
        "backwards": order[::-1],
    }
    plans = {what: replace(good, order=tuple(names)) for what, names in broken.items()}
    plans["foreign"] = replace(good, program_fingerprint="0" * 64)
    errors = {}
    for what, plan in plans.items():
        try:
            step.halves(plan)
            errors[what] = "no error"
        except UserError as error:
            errors[what] = str(error)
    # All but what nobody reads, which torch drops.
    assert ran == [name for name in order if name in set(ran)]
    assert len(ran) > 0.95 * len(order)
    for what in ("swapped", "missing", "across", "backwards"):
        assert errors[what].startswith("order of a plan: got "), errors[what]
        assert "\n" not in errors[what]
    assert sends[-1] in errors["swapped"]
    assert sends[0] in errors["missing"]
    assert all(name in errors["across"] for name in order[border - 1 : border + 1]), errors["across"]
    assert errors["foreign"].startswith("plan for graph: got program graph"), errors["foreign"]


# ---- Modules of one's own


class OwnModel(nn.Module):
    """Two inputs in a dict, two MoE layers on one gate each, a frozen and an unused parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(6, 8)
        self.first = MoELayer(8, 12, 4, top_k=2, gate="topk", shared_expert_d_ff=8, bias=True)
        self.second = MoELayer(8, 12, 2, activation="swiglu")
        self.output = nn.Linear(8, 3)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(8))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, batch: dict[str, Tensor], weight: float) -> tuple[Tensor, dict[str, Tensor]]:
        x = torch.tanh(self.input(batch["x"])) * self.frozen
        x = x + self.first(x)
        x = x + self.second(x) * self.scale
        y = self.output(x)
        return weight * ((y - batch["y"]) ** 2).mean(), {"y": y.detach()}


class Branching(nn.Module):
    """Cannot be one graph: it branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MoELayer(8, 8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() if x.sum() > 0 else x.sum()


def own_on_rank() -> dict[str, object]:
    torch.manual_seed(0)
    model = OwnModel().double()
    with torch.no_grad():
        for layer in (model.first, model.second):
            for parameter in layer.parameters():
                parameter.mul_(10)
    torch.manual_seed(1 + dist.get_rank())
    batch = {"x": torch.randn(4, 5, 6, dtype=torch.float64), "y": torch.randn(4, 5, 3, dtype=torch.float64)}
    loss, _ = model(batch, 2.0)
    loss.backward()
    plain = Outcome([loss.detach()], sum_over_ranks(model, gradients(model)))
    model.zero_grad(set_to_none=True)
    ready = optimized(model, (batch, 2.0))
    loss, more = ready(batch, 2.0)
    loss.backward()
    planned = Outcome([loss.detach()], gradients(model))
    # An argument that is no tensor is part of what was captured, and so is who wants a gradient.
    other, _ = ready(batch, 3.0)
    asking = batch | {"x": batch["x"].clone().requires_grad_()}
    ready(asking, 2.0)[0].backward()
    ready_to_ask = optimized(model, (asking, 2.0), "none")
    again = batch | {"x": batch["x"].clone().requires_grad_()}
    ready_to_ask(again, 2.0)[0].backward()
    return {
        "distance": planned.distance(plain),
        "names": sorted(plain.gradients),
        "keys": list(more),
        "ranges": len(ready.plan.ranges),
        "other": float(other / loss),
        "of the input": float((again["x"].grad - asking["x"].grad).abs().max() / again["x"].grad.abs().max()),
    }


@pytest.mark.long
def test_module_of_ones_own(pool):
    for found in pool.run(own_on_rank, ranks=2, timeout_s=180):
        assert found["distance"] < BOUND
        assert found["ranges"] > 0
        assert "unused" not in found["names"]
        assert "frozen" not in found["names"]
        assert "first.shared_up.bias" in found["names"]
        assert found["keys"] == ["y"]
        assert found["other"] == pytest.approx(1.5)
        assert found["of the input"] < BOUND


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


def test_unknown_strategy():
    with pytest.raises(UserError, match="strategy: got 'best', expected one of none, tutel, lancet-dw"):
        optimize(nn.Linear(2, 2), (torch.ones(1, 2),), strategy="best")


# ---- Ranks that disagree


def disagree_on_rank(what: str, times: str) -> str:
    odd = dist.get_rank() == 1
    module, inputs = build_step(StepCase(layers=4 if what == "layers" and odd else 2))
    if what == "batch" and odd:
        inputs = tuple(value[:4] for value in inputs)
    if what == "capture" and odd:
        module, inputs = Branching(), (torch.ones(4, 8),)
    try:
        optimize(module, inputs, times=times)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("what", few_of(["batch", "layers", "capture"]))
def test_ranks_that_disagree_refuse_to_start(pool, tmp_path, what):
    by_rank = pool.run(disagree_on_rank, what, str(tmp_path / "times.json"), ranks=2)
    for error in by_rank:
        assert "\n" not in error
    wanted = "no graph on rank(s) 1" if what == "capture" else "another one on rank(s) 1"
    refused = by_rank if what != "capture" else by_rank[:1]
    for error in refused:
        assert error.startswith(f"UserError: training step across ranks: got {wanted}"), error
    if what == "capture":
        assert by_rank[1].startswith("CaptureError: capture of Branching"), by_rank[1]


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
    try:
        optimize(module, inputs, cluster="p3dn", cache=f"{folder}/missing/plan.json")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.long
def test_rank_0_without_a_plan_keeps_nobody_waiting(pool, tmp_path):
    first, second = pool.run(failing_plan_on_rank, str(tmp_path), ranks=2, collective_timeout_s=20)
    assert first.startswith("UserError: plan file: got ")
    assert "in a folder that is missing" in first
    assert second == first


# ---- lancet train
