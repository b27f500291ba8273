"""Set-ups drawn at random train as the plain module does, or are refused in one line.

`python -m tests.generated_setups` runs more of them, and makes those that fail smaller: these become CASES.
"""

from __future__ import annotations

from collections.abc import Mapping
from unittest import mock

import pytest
import torch

from lancet_kernels.errors import UserError
from tests.generated_setups import run
from tests.generated_setups.describe import Block, Loop, Setup, drawn
from tests.generated_setups.run import outcome_on_ranks, smallest
from tests.generated_setups.train import Outcome, Trained, run_setup
from tests.grids import few_of

AT_A_TIME, DRAWN = 2, 400

CASES: dict[str, Setup] = {
    "a batch norm of a transposed tensor": Setup((Block("norm", "batch"),), strategy="none"),
    "the mean of an empty part": drawn(414),
    "a penalty beside trained plain tensors": drawn(171),
}
"""What failed once."""


def problems(pool, setups: Mapping[object, Setup]) -> list[str]:
    """What is wrong with each set-up that fails, with its description."""
    outcomes = {name: outcome_on_ranks(pool, setup) for name, setup in setups.items()}
    return [
        f"{name}: {setups[name]!r}: {outcome.why} ({outcome.where})"
        for name, outcome in outcomes.items()
        if outcome.kind == "failed"
    ]


@pytest.mark.parametrize("name", few_of(CASES))
def test_what_failed_once(pool, name: str) -> None:
    assert problems(pool, {name: CASES[name]}) == []


@pytest.mark.parametrize("first", few_of(range(0, DRAWN, AT_A_TIME)))
def test_right_or_refused(pool, first: int) -> None:
    numbers = range(first, first + AT_A_TIME)
    assert problems(pool, {number: drawn(number) for number in numbers}) == []


def test_a_description_gives_the_set_up_again() -> None:
    setups = [drawn(number) for number in range(200)]
    assert setups == [drawn(number) for number in range(200)]
    assert len(set(setups)) == len(setups)
    for setup in setups:
        assert Setup.from_json(setup.to_json()) == setup
        assert eval(repr(setup)) == setup


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


@pytest.mark.parametrize("how", ["numbers", "error", "two lines"])
def test_what_is_wrong_fails(pool, how: str) -> None:
    expected = {"numbers": "off by 1.0e-07", "error": "RuntimeError: no", "two lines": "this\nthat"}
    for outcome in pool.run(disturbed, Setup((Block(),), strategy="none"), how, leave_together=False):
        assert outcome.kind == "failed"
        assert expected[how] in outcome.why


def test_what_fails_is_made_smaller() -> None:
    """As if every batch norm that is clipped failed."""
    blocks = (Block(), Block("moe", gate="topk", bias=True), Block("norm", "batch"), Block(same_as=0))
    setup = Setup(blocks, tokens=True, tied=True, loop=Loop(clip=0.5, change="eval", schedule=True))

    def outcome(_pool: object, setup: Setup) -> Outcome:
        fails = any(b.variant == "batch" for b in setup.blocks) and setup.loop.clip
        return (
            Outcome("failed", f"step 1: gradient of blocks.{len(setup.blocks)}")
            if fails
            else Outcome("right")
        )

    with mock.patch.object(run, "outcome_on_ranks", outcome):
        found, why = smallest(None, setup, outcome(None, setup))
    assert found == Setup((Block("norm", "batch"),), strategy="none", loop=Loop(clip=0.5))
    assert why.kind == "failed"
