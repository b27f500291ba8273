"""`optimize`: whatever the plan, the mathematics of the module; and what happens where none fits."""

import contextlib
import io
import json
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lancet_kernels.optimization as library
from lancet_kernels import MoELayer, UserError, expert_parameters
from lancet_kernels.cli import main
from lancet_kernels.graph.capture import CaptureError, capture
from lancet_kernels.graph.program import Phase
from lancet_kernels.graph.program_json import fingerprint
from lancet_kernels.ops.gates import GATES, parse_gate
from lancet_kernels.ops.groups import group_name
from lancet_kernels.ops.link import link
from lancet_kernels.optimization import OptimizedModule, optimize
from lancet_kernels.ranks import Rank
from lancet_kernels.schedules.apply import instruction_order
from lancet_kernels.schedules.buckets import insert_all_reduces
from lancet_kernels.schedules.partition_range import PartitionOptions
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.realize import node_name
from lancet_kernels.schedules.strategies import STRATEGIES, Planner, PlanningOptions
from lancet_kernels.train import TrainOptions, train
from tests.planned_steps import (
    Outcome,
    SmallStep,
    StepCase,
    build_step,
    dear_communication,
    gradients,
    in_halves,
    parts_of_gates,
    sum_over_ranks,
)

BOUND = 1e-10
"""Largest difference in float64, as the issue asks; seen: 1e-15."""
GATE_CASES = {
    "switch": StepCase(),
    "topk": StepCase("topk", 2),
    "topk-renormalized": StepCase("topk(softmax='after',renormalize=True)", 3),
    "gshard": StepCase("gshard", 2),
    "batch-prioritized": StepCase("batch-prioritized", 2),
    "expert-choice": StepCase("expert-choice"),
    "hash": StepCase("hash", 2),
    "random": StepCase("random", 2),
    "sigmoid": StepCase("sigmoid(groups=2,top_groups=1)", 2, activation="swiglu"),
}
DROPLESS = {
    f"{name}-dropless": replace(case, capacity_factor=None)
    for name, case in GATE_CASES.items()
    if name != "expert-choice"
}
UNEVEN = {
    "switch-uneven": StepCase(batch=7, layers=2),
    "topk-uneven": StepCase("topk", 2, batch=5, layers=2, activation="swiglu"),
    "gshard-uneven": StepCase("gshard", 2, batch=7, layers=2),
}


@pytest.fixture(scope="module")
def small_step() -> SmallStep:
    """A captured step of this one process."""
    return SmallStep(StepCase(layers=2))


# ---- Mathematics unchanged


@dataclass(frozen=True)
class Tried:
    """One plan on one rank: how far from the module it came, and what it cut."""

    plan: str
    distance: float
    parts: tuple[int, ...]
    gate_is_cut: bool
    bytes_sent: int


def try_plans(case: StepCase, parts: tuple[int, ...], orders: int) -> tuple[list[Tried], list[float], str]:
    """Every strategy with at most so many parts, and each candidate range in exactly so many.

    orders: random orders to try of each plan by hand. -> what came out, dropped share and assignments of the
    module itself.
    """
    step = SmallStep(case)
    plain = step.plain()
    tried: list[Tried] = []

    def attempt(name: str, plan: Plan) -> None:
        forward, backward = step.halves(plan)
        link.read()
        distance = step.run(forward, backward).distance(plain)
        sent = link.read().bytes_sent
        cut = parts_of_gates(forward) > len(step.named("lancet.gate"))
        tried.append(Tried(name, distance, tuple(r.parts for r in plan.ranges), cut, sent))

    for most in parts:
        planner = step.planner(most)
        for strategy in STRATEGIES:
            if most == parts[0] or strategy in ("lancet-partition", "lancet"):
                attempt(f"{strategy} with {most}", planner.plan(strategy))
        # What Tutel does, in any number of parts.
        pairs = planner._cut(planner.expert_ranges, most)
        attempt(f"experts in {most}", step.by_hand(list(pairs)))
        for name, (first, last) in step.candidates().items():
            found = step.cut(first, last, most)
            if most == 1 or found is None or most > case.batch:
                continue
            attempt(f"{name} in {most}", step.by_hand([found]))
            for seed in range(orders):
                attempt(f"{name} in {most}, order {seed}", step.by_hand([found], seed))
    outputs = [float(plain.outputs[1]), *plain.outputs[2].flatten().tolist()]
    return tried, outputs, fingerprint(step.program)


def check_case(pool, case: StepCase, parts: tuple[int, ...], orders: int = 0) -> list[Tried]:
    """All plans of a case on two ranks; fails also where nothing was cut."""
    by_rank = pool.run(try_plans, case, parts, orders, ranks=2, timeout_s=600)
    assert by_rank[0][2] == by_rank[1][2], "ranks have different programs"
    for tried, (dropped, *assigned), _ in by_rank:
        for one in tried:
            assert one.distance < BOUND, (case, one)
            assert one.bytes_sent == tried[0].bytes_sent > 0, f"{one}: other rows travel than without a plan"
        assert (dropped > 0) == (case.capacity_factor is not None and "expert-choice" not in case.gate)
        if (
            parse_gate(case.gate).uses_logits
            and "expert-choice" not in case.gate
            and "sigmoid" not in case.gate
        ):
            assert 0 in assigned, "the case was meant to leave experts empty"
    tried = by_rank[0][0]
    assert [one.plan for one in tried] == [one.plan for one in by_rank[1][0]]
    cut = {k for one in tried for k in one.parts}
    assert not tried[0].parts, "the first one is the strategy `none`"
    assert cut >= {k for k in parts if 1 < k <= case.batch}, "some number of parts was never tried"
    partitionable = parse_gate(case.gate).partitionable
    assert any(one.gate_is_cut for one in tried) == partitionable, "gates are cut exactly if they may be"
    for strategy in ("lancet-partition", "lancet"):
        assert any(one.parts for one in tried if one.plan.startswith(f"{strategy} ")), (
            f"{strategy} cut nothing"
        )
    return tried


@pytest.mark.parametrize(
    "gate", ["switch", "batch-prioritized", "topk-dropless", pytest.param("random", marks=pytest.mark.long)]
)
def test_plans_keep_the_mathematics(pool, gate):
    case = replace({**GATE_CASES, **DROPLESS}[gate], layers=2)
    parts = {"switch": 2, "batch-prioritized": 3, "topk-dropless": 4, "random": 2}[gate]
    check_case(pool, case, (parts,), orders=int(gate == "switch"))


def test_uneven_parts_keep_the_mathematics(pool):
    check_case(pool, UNEVEN["switch-uneven"], (3,))


@pytest.mark.long
@pytest.mark.parametrize("gate", [*GATE_CASES, *DROPLESS, *UNEVEN])
def test_all_plans_keep_the_mathematics(pool, gate):
    case = {**GATE_CASES, **DROPLESS, **UNEVEN}[gate]
    if gate not in ("switch", "topk", "gshard"):
        case = replace(case, layers=2)
    check_case(pool, case, (1, 2, 3, 4, 5, 6, 7, 8), orders=1)


def test_grid_has_every_gate():
    assert {parse_gate(case.gate).name for case in GATE_CASES.values()} == set(GATES)


# ---- The module that `optimize` returns


def plan_dearly(program, _cost, options):
    """A planner as if communication were dear: tiny models would not be cut otherwise."""
    return Planner(program, dear_communication, options)


def optimized(module: nn.Module, inputs: tuple, strategy: str = "lancet", **options) -> OptimizedModule:
    """`optimize` without measuring, with plans that cut."""
    library.Planner = plan_dearly
    try:
        return optimize(module, inputs, strategy=strategy, cluster="p3dn", **options)
    finally:
        library.Planner = Planner


def outcome_of(module: nn.Module, inputs: tuple, reduced: bool) -> Outcome:
    """One step; gradients summed over the ranks unless the module has done that."""
    module.zero_grad(set_to_none=True)
    outputs = module(*inputs)
    outputs[0].backward()
    original = module.module if isinstance(module, OptimizedModule) else module
    found = gradients(original)
    if not reduced:
        found = sum_over_ranks(original, found)
    return Outcome([o.detach().clone() for o in outputs], found)


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
    short = tuple(value[:3] for value in inputs)
    with torch.no_grad():
        found["no_grad"] = all(map(torch.equal, ready(*inputs), module(*inputs)))
    wanted = outcome_of(module, short, reduced=False)
    found["other shape"] = outcome_of(ready, short, reduced=True).distance(wanted)
    ready.eval()
    wanted = outcome_of(module, inputs, reduced=False)
    with ready.recorded() as events:
        found["eval"] = outcome_of(ready, inputs, reduced=True).distance(wanted)
    found["eval runs the module"] = not module.training and not any(e.resource == "compute" for e in events)
    # The order that came out, as this rank ran it.
    ready.train()
    with ready.recorded() as events:
        ready(*inputs)[0].backward()
    ran = [e.name.removesuffix("_start") for e in events if e.kind.value == "compute"]
    issued = [e.name for e in events if e.name.endswith("_start")]
    wanted = [node_name(name) for name in ready.plan.order]
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
        assert found["no_grad"]
        assert found["other shape"] < BOUND
        assert found["eval"] < BOUND
        assert found["eval runs the module"]
        assert found["order"]
        assert found["covered"] > 0.5
    assert first["issued"] == second["issued"]
    assert sum("all_to_all" in name for name in first["issued"]) > 4, "a layer has four; parts have more"


def orders_on_rank(case: StepCase) -> dict[str, object]:
    """Plans that cannot run, and the order of those that can."""
    step = SmallStep(case)
    good = step.planner(2).plan("lancet")
    forward, backward = step.halves(good)
    names = [*instruction_order(forward.graph), *instruction_order(backward.graph)]
    names = list(dict.fromkeys(name.removesuffix("_start") for name in names))
    planned = list(map(node_name, good.order))
    names = [name for name in names if name in set(planned)]
    wanted = in_halves(names, planned, {n.removesuffix("_start") for n in instruction_order(forward.graph)})
    errors = {}
    order = list(good.order)
    sends = [i for i, name in enumerate(order) if name.startswith("all_to_all")]
    swapped = list(order)
    swapped[sends[0]], swapped[sends[-1]] = swapped[sends[-1]], swapped[sends[0]]
    for what, plan in (
        ("backwards", replace(good, order=tuple(reversed(order)))),
        ("swapped", replace(good, order=tuple(swapped))),
        ("foreign", replace(good, program_fingerprint="0" * 64)),
    ):
        try:
            step.halves(plan)
            errors[what] = "no error"
        except UserError as error:
            errors[what] = str(error)
    return {
        "kept": [n for n in names if n in set(wanted)] == wanted,
        "share": len(wanted) / len(order),
        **errors,
    }


def test_order_that_came_out_is_the_order_asked_for(pool):
    for found in pool.run(orders_on_rank, StepCase(layers=2), ranks=2, timeout_s=180):
        assert found["kept"]
        assert found["share"] > 0.5
        for what in ("backwards", "swapped"):
            assert found[what].startswith("order of a plan: got "), found[what]
            assert "\n" not in found[what]
        assert found["foreign"].startswith("plan for graph: got program graph"), found["foreign"]


# ---- fp32 training


def curves_on_rank(optimizer: str, steps: int) -> tuple[list[float], list[float], int]:
    """Losses of the module itself and of its plan, each from the same start on the same batches."""
    case = StepCase(layers=2, dtype=torch.float32, capacity_factor=1.25)
    losses = []
    ranges = 0
    for planned in (False, True):
        module, inputs = build_step(case)
        running = optimized(module, inputs) if planned else module
        if planned:
            ranges = len(running.plan.ranges)
        if optimizer == "sgd":
            rule = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        else:
            rule = torch.optim.AdamW(module.parameters(), lr=3e-3)
        curve = []
        for step in range(steps):
            generator = torch.Generator().manual_seed(100 + 2 * step + dist.get_rank())
            batch = tuple(torch.randint(0, 13, t.shape, generator=generator) for t in inputs)
            rule.zero_grad(set_to_none=True)
            loss = running(*batch)[0]
            loss.backward()
            if not planned:
                for name, total in sum_over_ranks(module, gradients(module)).items():
                    module.get_parameter(name).grad.copy_(total)
            rule.step()
            curve.append(float(loss))
        losses.append(curve)
    return (*losses, ranges)


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.long)])
def test_loss_curves_coincide_to_rounding(pool, optimizer):
    """A sum in another order differs by a few eps = 1.2e-7; 50 steps amplify that, by 10 to 100 here. A plan
    that were wrong in any gradient would be off by whole percents."""
    for plain, planned, ranges in pool.run(curves_on_rank, optimizer, 50, ranks=2, timeout_s=180):
        assert ranges > 0
        assert len(plain) == 50
        assert min(plain[-5:]) < plain[0], "nothing was learned, so nothing was compared"
        difference = max(abs(a - b) / abs(a) for a, b in zip(plain, planned, strict=True))
        print(optimizer, difference)
        assert difference < 1e-4


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
    ready_to_ask = optimized(model, (asking, 2.0))
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


def test_one_process_needs_no_group():
    module, inputs = build_step(StepCase(layers=2))
    ready = optimized(module, inputs)
    assert outcome_of(ready, inputs, True).distance(outcome_of(module, inputs, True)) < BOUND


def test_the_same_tensors_can_be_captured_again():
    """A run must not mark its inputs as of changing size: B = S, so that torch takes both for one symbol."""
    module, inputs = build_step(StepCase(layers=2, batch=6, sequence=6))
    plain = outcome_of(module, inputs, reduced=True)
    for _ in range(2):
        ready = optimized(module, inputs)
        assert outcome_of(ready, inputs, reduced=True).distance(plain) < BOUND
    with capture(module, inputs) as captured:
        names = [node.name for node in captured.joint.graph.nodes]
        shapes = [n.meta["val"].shape for n in captured.joint.graph.nodes if n.op == "placeholder"]
    assert not [name for name in names if "sym" in name]
    assert {type(size) for shape in shapes for size in shape} == {int}


def test_module_that_cannot_be_captured():
    with pytest.raises(CaptureError, match=r"capture of Branching: got .*, expected a module that") as caught:
        optimize(Branching(), (torch.ones(4, 8),))
    assert "\n" not in str(caught.value)
    assert "branch" in str(caught.value).lower()


def test_unknown_strategy():
    with pytest.raises(UserError, match="strategy: got 'best', expected one of none, tutel, lancet-dw"):
        optimize(nn.Linear(2, 2), (torch.ones(1, 2),), strategy="best")


# ---- Ranks that disagree


def disagree_on_rank(what: str, times: str) -> tuple[str, float]:
    odd = dist.get_rank() == 1
    module, inputs = build_step(StepCase(layers=4 if what == "layers" and odd else 2))
    if what == "batch" and odd:
        inputs = tuple(value[:4] for value in inputs)
    if what == "capture" and odd:
        module, inputs = Branching(), (torch.ones(4, 8),)
    begin = time.monotonic()
    try:
        optimize(module, inputs, times=times)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "no error", time.monotonic() - begin


@pytest.mark.parametrize("what", ["layers", "batch", "capture"])
def test_ranks_that_disagree_refuse_to_start(pool, tmp_path, what):
    by_rank = pool.run(disagree_on_rank, what, str(tmp_path / "times.json"), ranks=2)
    for error, seconds in by_rank:
        assert "\n" not in error
        assert seconds < 15
    wanted = "no graph on rank(s) 1" if what == "capture" else "another one on rank(s) 1"
    refused = by_rank if what != "capture" else by_rank[:1]
    for error, _ in refused:
        assert error.startswith(f"UserError: training step across ranks: got {wanted}"), error
    if what == "capture":
        assert by_rank[1][0].startswith("CaptureError: capture of Branching"), by_rank[1]


def failing_plan_on_rank(folder: str) -> str:
    module, inputs = build_step(StepCase(layers=2))
    try:
        optimize(module, inputs, cluster="p3dn", cache=f"{folder}/missing/plan.json")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_rank_0_without_a_plan_keeps_nobody_waiting(pool, tmp_path):
    first, second = pool.run(failing_plan_on_rank, str(tmp_path), ranks=2, collective_timeout_s=20)
    assert "missing" in first
    assert second.startswith("UserError: plan of rank 0: got ")
    assert "missing" in second


# ---- Files


def plans_on_rank(cache: str, kinds: list[str]) -> list[tuple[bool, str, float]]:
    """For each kind of plan file: whether anything was planned, what was said, how far from the module."""
    module, inputs = build_step(StepCase(layers=2))
    plain = outcome_of(module, inputs, reduced=False)
    found = []
    for kind in kinds:
        if dist.get_rank() == 0:
            write_plan_file(Path(cache), kind)
        with counted_plans() as planned, contextlib.redirect_stderr(io.StringIO()) as said:
            ready = optimize(module, inputs, cluster="p3dn", cache=cache)
        assert Plan.load(cache).fingerprint == ready.plan.fingerprint, "the file has another plan"
        found.append((bool(planned), said.getvalue(), outcome_of(ready, inputs, True).distance(plain)))
    with counted_plans() as planned:
        given = optimize(module, inputs, cluster="p3dn", plan=cache)
    assert not planned
    assert given.plan.fingerprint == ready.plan.fingerprint
    return found


@contextlib.contextmanager
def counted_plans():
    """Strategies that are planned inside the block."""
    planned: list[str] = []

    class Counting(Planner):
        def candidates(self, strategy):
            planned.append(strategy)
            return super().candidates(strategy)

    library.Planner = lambda program, _cost, options: Counting(program, dear_communication, options)
    try:
        yield planned
    finally:
        library.Planner = Planner


def write_plan_file(path: Path, kind: str) -> None:
    """Spoil a fitting plan file."""
    if kind == "damaged":
        path.write_text(path.read_text()[:100])
    elif kind == "binary":
        path.write_bytes(b"\xff\x00\x81")
    elif kind == "list":
        path.write_text("[1, 2]")
    elif kind in ("foreign", "reordered", "strange parts", "other strategy"):
        data = json.loads(path.read_text())
        if kind == "foreign":
            data["program_fingerprint"] = "0" * 64
        elif kind == "reordered":
            data["order"].reverse()
        elif kind == "strange parts":
            data["ranges"][0]["parts"] = "two"
        else:
            data["strategy"] = "tutel"
        path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "kind",
    ["fitting", "damaged", "binary", "list", "foreign", "reordered", "strange parts", "other strategy"],
)
def test_plan_files(small_step, tmp_path, capsys, kind):
    path = tmp_path / "plan.json"
    arguments = small_step.program, dear_communication, "lancet", None, path
    with counted_plans() as planned:
        first = library._plans(*arguments)[0]
        first.save(path)
        write_plan_file(path, kind)
        second = library._plans(*arguments)[0]
        second.save(path)
    assert first.ranges, "nothing was cut, so no part can be strange"
    assert second.fingerprint == first.fingerprint == Plan.load(path, small_step.program).fingerprint
    assert len(planned) == (1 if kind == "fitting" else 2)
    said = capsys.readouterr().err
    ignored = kind not in ("fitting", "other strategy")
    assert said.count("\n") == said.count("lancet: planning anew: ") == ignored, said


def test_plan_of_other_options_is_made_anew(small_step, tmp_path, monkeypatch):
    for name in ("LANCET_RHO", "LANCET_GAMMA", "LANCET_IOTA"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "plan.json"

    def plan(options: PlanningOptions | None) -> bool:
        """-> whether it was planned anew."""
        with counted_plans() as planned:
            library._plans(small_step.program, dear_communication, "lancet", options, path)[0].save(path)
        return bool(planned)

    two = PlanningOptions(PartitionOptions(most_parts=2))
    assert [plan(None), plan(None), plan(two), plan(two)] == [True, False, True, False]
    monkeypatch.setenv("LANCET_RHO", "2")
    assert not plan(None), "the environment says the same"
    assert all(r.parts == 2 for r in Plan.load(path).ranges)
    assert plan(replace(two, memory_limit_gb=1e3))


def test_plan_is_saved_whole_or_not_at_all(small_step, tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    plan = library._plans(small_step.program, dear_communication, "lancet", None, None)[0]
    plan.save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        replace(plan, strategy="tutel").save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("kind", ["fitting", "damaged", "foreign", "reordered", "other strategy"])
def test_given_plan_is_used_or_refused(small_step, tmp_path, kind):
    path = tmp_path / "plan.json"
    made = library._plans(small_step.program, dear_communication, "lancet", None, None)[0]
    made.save(path)
    write_plan_file(path, kind)
    with contextlib.nullcontext() if kind == "fitting" else pytest.raises(UserError):
        assert library._given_plan(path, small_step.program, "lancet").fingerprint == made.fingerprint


def test_plan_files_of_two_ranks(pool, tmp_path):
    kinds = ["missing", "fitting", "damaged"]
    by_rank = pool.run(plans_on_rank, str(tmp_path / "plan.json"), kinds, ranks=2, timeout_s=120)
    for rank, found in enumerate(by_rank):
        assert [planned for planned, _, _ in found] == [rank == 0, False, rank == 0], "rank 0 alone plans"
        assert [said.count("\n") for _, said, _ in found] == [0, 0, rank == 0]
        assert max(distance for _, _, distance in found) < BOUND


def times_on_rank(times: str) -> tuple[list[str], list[str], float]:
    """Warnings of two calls that measure, the first one with a damaged file; distance from the module."""
    module, inputs = build_step(StepCase(layers=2))
    plain = outcome_of(module, inputs, reduced=False)
    said = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ready = optimize(module, inputs, times=times)
        said.append([str(w.message) for w in caught if "measured times" in str(w.message)])
    return (*said, outcome_of(ready, inputs, True).distance(plain))


def test_damaged_times_are_measured_again(pool, tmp_path):
    path = tmp_path / "times.json"
    path.write_text('{"format": "lancet-meas')
    first, second = pool.run(times_on_rank, str(path), ranks=2, timeout_s=180)
    for damaged, _, distance in (first, second):
        assert len(damaged) <= 1
        assert distance < BOUND
    assert len(first[0]) == 1
    assert "ignored and will be measured again" in first[0][0]
    assert not first[1]
    assert not second[1]
    kept = json.loads(path.read_text())
    assert kept["format"] == "lancet-measured-times"
    assert len(kept["milliseconds"]) > 20


# ---- lancet train


def train_on_rank(folder: str, data: str, strategy: str, most_parts: int | None = None) -> list[float]:
    """Losses of a few steps of `lancet train`."""
    options = TrainOptions(
        steps=4, batch=2, sequence=16, validation_batches=1, strategy=strategy, runs=folder, name=strategy
    )
    options = replace(options, data=data, device="cpu", most_parts=most_parts)
    rank = Rank(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
    train(options, rank)
    dist.barrier()
    with open(f"{folder}/{strategy}/metrics.jsonl") as file:
        return [json.loads(line)["loss"] for line in file]


def test_training_with_a_plan(pool, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} plus {i} is {2 * i}\n" for i in range(1000)))
    losses = {
        strategy: pool.run(train_on_rank, str(tmp_path), str(text), strategy, 3, ranks=2, timeout_s=180)[0]
        for strategy in ("none", "lancet")
    }
    assert len(losses["none"]) == 4
    assert losses["lancet"] == pytest.approx(losses["none"], rel=1e-5)
    assert not (tmp_path / "none" / "plan.json").exists()
    plan = Plan.load(tmp_path / "lancet" / "plan.json")
    assert plan.strategy == "lancet"
    assert plan.options["partition"]["most_parts"] == 3
    assert plan.explain().startswith("Plan `lancet` for graph")


def test_unknown_strategy_on_the_command_line(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "--strategy", "best"])
    assert caught.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert "argument --strategy: invalid choice: 'best'" in said[-1]


# ---- Gradient all-reduces


def reduce_on_rank(bucket_bytes: int) -> dict[str, object]:
    """Gradients of the graph with buckets, bit by bit against all-reduces one by one."""
    case = StepCase(layers=2, dtype=torch.float32)
    module, inputs = build_step(case)
    experts = {
        name
        for name, p in module.named_parameters()
        if any(p is expert for expert in expert_parameters(module))
    }
    found: dict[str, list] = {}
    buckets: list[str] = []
    for reduced in (False, True):
        with capture(module, inputs) as captured:
            joint, names = captured.joint, captured.parameter_of_gradient()
            if reduced:
                group = group_name(dist.new_group())
                buckets = insert_all_reduces(joint, names, experts, group, bucket_bytes)
        values = library._Step(module, inputs, False, None).graph_inputs(captured)
        with torch.no_grad():
            results = torch.fx.Interpreter(joint).run(*values, enable_io_processing=False)
        for position, name in names.items():
            found.setdefault(name, []).append(results[position])
    worst = []
    for name, (own, total) in found.items():
        wanted = own.clone()
        if name not in experts:
            dist.all_reduce(wanted)
            assert not torch.equal(wanted, own), f"{name}: ranks have the same gradient, nothing was tested"
        if not torch.equal(wanted, total):
            worst.append(name)
    return {"wrong": worst, "buckets": len(buckets), "experts": len(experts), "all": len(found)}


@pytest.mark.parametrize("bucket_bytes", [1, 2000, 1 << 20])
def test_buckets_give_the_bits_of_plain_all_reduces(pool, bucket_bytes):
    for found in pool.run(reduce_on_rank, bucket_bytes, ranks=2):
        assert found["wrong"] == []
        assert found["experts"] == 2
        replicated = found["all"] - found["experts"]
        wanted = {1: replicated, 1 << 20: 1}.get(bucket_bytes)
        assert found["buckets"] == wanted or (wanted is None and 1 < found["buckets"] < replicated)
