"""Set-ups drawn at random train as the plain module does, or are refused in one line."""

from __future__ import annotations

from random import Random
from unittest import mock

import pytest
import torch

from lancet_kernels.errors import UserError
from tests.generated_setups.describe import Block, Loop, Setup, drawn
from tests.generated_setups.outcomes import end_of
from tests.generated_setups.train import Outcome, Trained, run_setup
from tests.grids import few_of

DRAWN = {
    2: (
        *(43, 0, 3, 4, 5, 6, 7, 8, 9, 11, 15, 17, 18, 19, 22, 23, 24, 26, 27, 30, 31, 33, 35, 37, 38, 41),
        *(44, 45, 47, 48, 50, 51, 53),
    ),
    4: (0, 3, 4, 5, 8, 9, 11, 13),
}
"""Numbers of set-ups by ranks. On two ranks they have every value that is in one of the first 60, and
most pairs; on four, the ways to share experts beside those to shard and to accumulate that the first 15 have.
`python -m tests.generated_setups` draws as many as it is asked for."""

CASES: dict[str, Setup] = {
    "a batch norm of a transposed tensor": Setup((Block("norm", "batch"),), strategy="none"),
    "the mean of an empty part": Setup(
        (
            Block("buffer", "averaged"),
            Block(checkpoint="not reentrant"),
            Block("moe", gate="topk(renormalize=True)", capacity=1.0, balance=True),
            Block(same_as=1, shared="module"),
        ),
        strategy="auto",
        loop=Loop(schedule=True, sizes=(4, 1, 3), outer=True),
    ),
    "a penalty beside trained plain tensors": Setup(
        (
            Block("plain", "global", requires_grad=True),
            Block("plain", "dict"),
            Block("norm", "layer"),
            Block("norm", "batch"),
        ),
        tokens=True,
        tied=True,
        strategy="none",
        loop=Loop(penalty=True),
    ),
    "tied blocks under FSDP": Setup((Block(), Block(same_as=0)), strategy="none", shard="kept"),
    "FSDP without the plan behind gradients that are not summed yet": Setup(
        (Block("attention", "fused"),),  # of no tokens it has another graph
        reduce="mean",
        strategy="none",
        loop=Loop(accumulate="no_sync", uneven="none"),
        shard="resharded",
    ),
    "HSDP of two ranks without the plan": Setup(
        (Block(),), reduce="mean", strategy="none", loop=Loop(number="other"), shard="replicated"
    ),
}
"""What failed once."""


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_what_failed_once(pool, name: str) -> None:
    end = end_of(pool, CASES[name])
    assert end.kind != "failed", end.why


@pytest.mark.parametrize(
    ("ranks", "number"), few_of((ranks, number) for ranks, numbers in DRAWN.items() for number in numbers)
)
def test_right_or_refused(pool, ranks: int, number: int) -> None:
    setup = drawn(Random(number), ranks)
    end = end_of(pool, setup)
    assert end.kind != "failed", f"{end.why}: {setup!r}"


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
