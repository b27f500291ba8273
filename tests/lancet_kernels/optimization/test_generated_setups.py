"""Set-ups drawn at random train as the plain module does, or are refused in one line."""

from __future__ import annotations

from random import Random
from unittest import mock

import pytest
import torch

from lancet_kernels.errors import UserError
from tests.generated_setups.describe import Block, Setup, drawn
from tests.generated_setups.train import Outcome, Trained, run_setup
from tests.grids import few_of
from tests.ranks import RankError, RankPool

DRAWN = 400

CASES: dict[str, Setup] = {
    "a batch norm of a transposed tensor": Setup((Block("norm", "batch"),), strategy="none"),
    "the mean of an empty part": drawn(Random(414)),
    "a penalty beside trained plain tensors": drawn(Random(171)),
}
"""What failed once."""


def problem(pool: RankPool, setup: Setup) -> str:
    """What is wrong with a set-up; "" if it trains as the plain module on two ranks, or is refused."""
    try:
        # A rank that fails returns at once; its peer finds that out in the next collective.
        outcomes = pool.run(run_setup, setup, leave_together=False)
    except RankError as error:
        return f"hangs or dies: {str(error).splitlines()[-1]}"
    kinds = {outcome.kind for outcome in outcomes}
    if kinds in ({"right"}, {"refused"}):
        return ""
    # What a rank says whose peer has gone is not the cause.
    outcomes.sort(key=lambda one: (one.kind != "failed", "CommunicationError" in one.why, "gloo" in one.why))
    return "; ".join(f"a rank {one.kind}: {one.why} ({one.where})" for one in outcomes)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_what_failed_once(pool, name: str) -> None:
    assert problem(pool, CASES[name]) == ""


@pytest.mark.parametrize("number", few_of(range(DRAWN)))
def test_right_or_refused(pool, number: int) -> None:
    setup = drawn(Random(number))
    assert problem(pool, setup) == "", repr(setup)


def disturbed(setup: Setup, how: str) -> Outcome:
    """What becomes of a set-up whose planned training is not right."""
    right = Trained.step

    def step(trained: Trained, number: int) -> dict[str, torch.Tensor]:
        if trained.planned and how == "numbers":
            with torch.no_grad():
                trained.model.head.bias.add_(1e-7)
        if trained.planned and how == "error":
            raise RuntimeError("no")
        if trained.planned and how == "two lines":
            raise UserError("this\nthat", got=1, expected=2, do="3")
        return right(trained, number)

    with mock.patch.object(Trained, "step", step):
        return run_setup(setup)


@pytest.mark.parametrize("how", few_of(["numbers", "error", "two lines"]))
def test_what_is_wrong_fails(pool, how: str) -> None:
    expected = {"numbers": "off by 1.0e-07", "error": "RuntimeError: no", "two lines": "this\nthat"}
    for outcome in pool.run(disturbed, Setup((Block(),), strategy="none"), how, leave_together=False):
        assert outcome.kind == "failed"
        assert expected[how] in outcome.why
