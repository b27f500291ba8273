"""`optimize(strategy="auto")` runs real steps, keeps what is fastest, and leaves no trace of it."""

import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lancet_kernels.optimization.trial as library
from lancet_kernels import UserError
from lancet_kernels.optimization.optimize import optimize
from lancet_kernels.schedules.plan import IN_PAIRS, ONE_BY_ONE, PLAIN, Plan
from tests.planned_steps import gradients, sum_over_ranks
from tests.refusals import refusal
from tests.setups import B, Model, Plain, batch, compare_mean
from tests.trials import with_times


class Noisy(Model):
    """With all that a step may leave behind: buffers and another tensor, random numbers, an input that it
    changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()
        self.register_buffer("calls", torch.zeros(()))
        self.uncounted, self.expanded = torch.zeros(()), torch.ones(1).expand(3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        self.calls.add_(1)
        self.uncounted.add_(1)
        x = self.norm(x) * self.expanded[:, None]
        return super().forward(torch.nn.functional.dropout(x, 0.1), target)


def state_of(model: nn.Module, inputs: tuple) -> list[Tensor]:
    attributes = [value for value in vars(model).values() if isinstance(value, Tensor)]
    kept = [*model.state_dict().values(), *attributes, *inputs, torch.get_rng_state()]
    return [tensor.detach().clone() for tensor in kept]


def tried_on_a_rank(folder: str, plain_ms: float, model_type: type = Noisy) -> dict[str, object]:
    model, inputs = model_type(), batch()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    called = []
    model.input.weight.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    # optimize() makes parameters and buffers equal on all ranks; these are already.
    before = state_of(model, inputs)
    with with_times(plain=plain_ms):
        ready = optimize(model, inputs, times=f"{folder}/times.json", cache=f"{folder}/plan.json", trials=2)
    after = state_of(model, inputs)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "something was left changed"
    assert all((p.grad == 3.0).all() for p in model.parameters())
    assert called == []
    return {
        "plain": ready.plan.plain,
        "fingerprint": ready.plan.fingerprint,
        "measured": dict(ready.plan.report.measured),
        "text": ready.plan.report.choice(ready.plan.plain),
    }


@pytest.mark.parametrize(
    ("plain_ms", "text"),
    [
        pytest.param(
            100.0,
            "saves nothing: 100.00 ms a step, the module as it is 100.00 (measured on these ranks)",
            marks=pytest.mark.long,
        ),
        (101.0, "saves 1.0%, less than 2%: 100.00 ms a step, the module as it is 101.00"),
        pytest.param(103.0, "measured fastest: 100.00 ms a step (", marks=pytest.mark.long),
    ],
)
def test_real_steps_decide_and_leave_no_trace(pool, tmp_path, plain_ms: float, text: str) -> None:
    first, second = pool.run(tried_on_a_rank, str(tmp_path), plain_ms)
    assert first == second, "the ranks agree"
    assert first["plain"] == (plain_ms < 102)
    assert text in first["text"]
    assert first["text"].startswith("Not worth planning here: " if first["plain"] else "Chosen: ")
    assert {"none", PLAIN} <= set(first["measured"])
    assert Plan.load(tmp_path / "plan.json").fingerprint == first["fingerprint"]


class WithUnused(Model):
    """One parameter without a gradient on any rank, one without on the first."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.sometimes = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss = super().forward(x, target)
        # At the capture on all ranks.
        skips = dist.get_rank() == 0 and not torch.compiler.is_compiling() and self.skips
        return loss if skips else loss + self.sometimes.sum()

    skips = False


def plain_and_planned(folder: str, cache: str) -> dict[str, float]:
    """Gradients of the module that runs as it is, against those of its plan and of one process."""
    model, inputs = WithUnused(), batch()
    with with_times(plain=1.0):
        ready = optimize(model, inputs, times=f"{folder}/times.json", cache=cache, trials=1)
    assert ready.plan.plain
    with mock.patch.object(library, "milliseconds_of", None):
        again = optimize(model, inputs, times=f"{folder}/times.json", cache=cache)
    assert again.plan.plain, "what was stored is not measured again"
    planned = optimize(model, inputs, strategy="none", times=f"{folder}/times.json")

    def after(module: nn.Module, calls: int = 1, backwards: int = 1, size: int = B) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        for number in range(calls):
            loss = module(*batch(number, size))
            for left in reversed(range(backwards)):
                loss.backward(retain_graph=left > 0)
        return gradients(model)

    def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        assert set(one) == set(other)
        return max(float((one[name] - other[name]).abs().max()) for name in one)

    def mean_over_ranks(found: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: g / dist.get_world_size() for n, g in sum_over_ranks(model, found).items()}

    expected = mean_over_ranks(after(model))
    off = {"once": distance(after(ready), expected), "planned": distance(after(planned), expected)}
    off["accumulated"] = distance(after(again, 2, 2), after(planned, 2, 2))
    off["another shape"] = distance(after(ready, size=7), mean_over_ranks(after(model, size=7)))
    WithUnused.skips = True
    try:
        got = after(ready)
    finally:
        WithUnused.skips = False
    assert "unused" not in got
    assert got["sometimes"].tolist() == [0.5, 0.5], "half the gradient of the other rank"
    assert not ready.fallbacks
    return off


@pytest.mark.long
def test_module_as_it_is_sums_gradients_like_a_plan(pool, tmp_path) -> None:
    for off in pool.run(plain_and_planned, str(tmp_path), str(tmp_path / "plan.json")):
        assert max(off.values()) < 1e-12, off


def pairs_on_a_rank(folder: str, ms: float) -> tuple[bool, str, str]:
    model, inputs = Model(), batch()
    planned = library.with_pair

    def promising(*args: object, **by_name: object) -> Plan:
        return planned(*args, **by_name).reported(pair_ms=0.0)

    pretend = mock.patch.object(library, "with_pair", promising)
    with pretend, with_times(plain=1000.0, **{IN_PAIRS: ms, ONE_BY_ONE: 300.0}):
        times = f"{folder}/times.json"
        ready = optimize(model, inputs, times=times, trials=1, accumulate=3)
    assert all(parameter.grad is None for parameter in model.parameters())
    batches = [batch(number) for number in range(3)]
    compare_mean(model, batches, lambda: ready.microbatches(batches))
    return bool(ready.plan.pair), ready.plan.fingerprint, ready.plan.explain()


@pytest.mark.long
@pytest.mark.parametrize("ms", [150.0, 299.0])
def test_real_microbatches_decide_whether_they_run_in_pairs(pool, tmp_path, ms: float) -> None:
    first, second = pool.run(pairs_on_a_rank, str(tmp_path), ms)
    assert first[:2] == second[:2], "the ranks agree"
    assert first[0] == (ms == 150.0)
    assert f"Measured: {ms / 3:.2f} ms each in pairs, 100.00 one by one." in first[2]


def changed_on_a_rank(folder: str) -> list[str]:
    """What a module that runs as it is refuses: what would make its sums wrong."""
    model, inputs = Plain(), batch()
    with with_times(plain=1.0):
        ready = optimize(model, inputs, times=f"{folder}/times.json", trials=1)
    loss = ready(*inputs)
    said = refusal(lambda: torch.autograd.grad(loss, list(model.parameters()), create_graph=True))
    model.output.weight = nn.Parameter(model.output.weight.detach().clone())
    return [said, refusal(lambda: ready(*inputs))]


def test_module_as_it_is_refuses_what_would_be_wrong(pool, tmp_path) -> None:
    for said in pool.run(changed_on_a_rank, str(tmp_path)):
        assert "create_graph=True" in said[0]
        assert "another tensor as output.weight" in said[1]


def test_number_of_trials_is_checked() -> None:
    with pytest.raises(UserError, match=r"trials: got -1, expected a number of steps, 0 or more"):
        optimize(nn.Linear(2, 2), (torch.ones(1, 2),), trials=-1)


def test_without_trials_nothing_is_run(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with mock.patch.object(library, "milliseconds_of", None):
        ready = optimize(model, (torch.ones(2, 4),), times=tmp_path / "times.json", trials=0)
    assert not ready.plan.plain
    assert json.loads(json.dumps(ready.plan.to_json()))["report"]["measured"] == {}


def test_the_module_as_it_is_runs_where_every_plan_refuses_the_step(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with mock.patch.object(library, "milliseconds_of", return_value={library.PLAIN: 5.0}):
        ready = optimize(model, (torch.ones(2, 4),), times=tmp_path / "times.json")
    assert ready.plan.plain


def refused_on_one_rank(folder: str) -> str:
    def refuse(_module: object) -> None:
        if dist.get_rank() == 1:
            raise UserError("a step", got="this one", expected="another", do="change it")

    with mock.patch.object(library, "_one_step", refuse):
        return refusal(lambda: optimize(Model(), batch(), times=f"{folder}/times.json", trials=1))


@pytest.mark.long
def test_a_step_that_one_rank_always_refuses_is_refused_on_all(pool, tmp_path) -> None:
    first, second = pool.run(refused_on_one_rank, str(tmp_path))
    assert "one that other ranks refuse" in first
    assert "a step: got this one" in second
