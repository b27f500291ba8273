"""A plan that is for something else says what differs, on every rank, and hashes come last."""

import re
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from lancet_kernels import MoELayer, UserError, optimize
from lancet_kernels.ops.comm.groups import group_name
from lancet_kernels.optimization.rank_agreement import results_of_ranks
from lancet_kernels.predict.own_step import fake_ranks
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.rewrite import walk
from lancet_kernels.schedules.strategies import AUTO, Planner
from tests.refusals import refusal


class Step(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), MoELayer(width, hidden, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


class Other(Step):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def planned(file: str, step: nn.Module, width: int = 8, tokens: int = 4, save: bool = False) -> str:
    """Saves a plan for a step, or says why the saved one is not for it."""
    inputs = (torch.ones(tokens, width),)
    if save:
        optimize(step, inputs, strategy="none", cluster="local", cache=file)
        return ""
    return refusal(lambda: optimize(step, inputs, strategy="none", cluster="local", plan=file))


HASHES = r"plan again \(program [0-9a-f]{12}, here [0-9a-f]{12}\)"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("plans") / "plan.json")
    planned(path, Step(), save=True)
    return path


@pytest.mark.parametrize(
    ("step", "given", "made", "here"),
    [
        (Step(16), {"width": 16}, "inner.0.weight [8, 8] float32", "[16, 16] float32"),
        (Step(8, 32), {}, "inner.1.w1 [4, 8, 16] float32", "[4, 8, 32] float32"),
        (Other(), {}, "Step", "Other"),
        (Step(), {"tokens": 6}, "inputs [4, 8] float32", "[6, 8] float32"),
    ],
    ids=["width", "hidden", "model", "inputs"],
)
def test_plan_for_another_model_says_what_differs(file: str, step, given: dict, made: str, here: str) -> None:
    text = planned(file, step, **given)
    assert re.fullmatch(
        re.escape(
            f"plan file {file}: got a plan made for {made}, expected one for this job, which has {here}; "
        )
        + HASHES,
        text,
    ), text


def on_a_rank(file: str) -> str:
    return planned(file, Step())


def test_plan_for_another_number_of_ranks_says_so_on_all_of_them(pool, file: str) -> None:
    first, second = pool.run(on_a_rank, file)
    assert first == second, "no error inside of another"
    assert "got a plan made for 1 rank, expected one for this job, which has 2 ranks; plan again (" in first


def fails(kind: type[Exception], which: int) -> str:
    """What this rank says if one of three results cannot be made."""

    def broken() -> str:
        if kind is UserError:
            raise UserError("plan", got=1, expected=2, do="plan again")
        raise kind("no bread")

    makes = [lambda: "made"] * 3
    makes[which] = broken
    with pytest.raises((KeyError, UserError)) as failed:
        results_of_ranks(group_name(None), makes)
    return f"{type(failed.value).__name__}: {failed.value}"


def test_error_of_one_rank_is_that_of_all(pool) -> None:
    assert pool.run(fails, UserError, 0) == ["UserError: plan: got 1, expected 2; plan again"] * 2
    own = "KeyError: 'no bread'"
    others = f"UserError: plan of rank {{}}: got {own}, expected a plan; report it"
    assert pool.run(fails, KeyError, 0) == [own, others.format(0)]
    assert pool.run(fails, KeyError, 1) == [others.format(1), own]


def shared_work() -> tuple[list[str], list[str]]:
    """Three results of two ranks, and what this rank made of them."""
    own: list[str] = []

    def make(name: str) -> str:
        own.append(name)
        return name.upper()

    return results_of_ranks(group_name(None), [partial(make, name) for name in "abc"]), own


def test_ranks_take_turns_and_all_get_every_result(pool) -> None:
    assert pool.run(shared_work) == [(["A", "B", "C"], ["a", "c"]), (["A", "B", "C"], ["b"])]


def test_ranks_that_are_not_there_make_nothing() -> None:
    with fake_ranks(4):
        assert shared_work() == (["A", "B", "C"], ["a", "b", "c"])


def strategies_planned() -> tuple[list[str], str]:
    """Which strategies this rank plans for `auto`, and what it runs."""
    planned: list[str] = []

    class Watched(Planner):
        def _plan_or_reason(self, strategy: str) -> Plan | UserError:
            if strategy not in self._plans:
                planned.append(strategy)
            return super()._plan_or_reason(strategy)

    with mock.patch.object(walk, "Planner", Watched):
        step = optimize(Step(), (torch.ones(4, 8),), cluster="p3dn")
    return planned, step.plan.fingerprint


def test_each_strategy_is_planned_by_one_rank(pool) -> None:
    (first, plan), (second, other) = pool.run(strategies_planned)
    assert first == ["none", "tutel", "lancet-dw", "lancet-partition", "lancet", AUTO], "rank 0 chooses"
    assert second == ["duplex", "lancet+duplex"]
    assert plan == other


def test_candidates_that_are_ordered_again_are_not_searched() -> None:
    searches: list[bool] = []

    class Watched(Planner):
        def __init__(self, *arguments: object, search: bool, **others: object) -> None:
            searches.append(search)
            super().__init__(*arguments, search=search, **others)

    with mock.patch.object(walk, "Planner", Watched):
        optimize(Step(), (torch.ones(4, 8),), trials=0)  # orders plans with measured parts
        optimize(Step(), (torch.ones(4, 8),), cluster="p3dn")
    assert searches == [False, True]
