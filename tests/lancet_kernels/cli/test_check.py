"""`lancet check` as a command: what it prints, and its exit code."""

import json
import subprocess
import sys

import pytest

from lancet_kernels.cli import check as command
from tests.processes import ROOT, run

STEP = f"{ROOT}/tests/own_steps/readme_step.py:make_step"


def check(*options: object) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "lancet_kernels", "check", STEP, *options)


@pytest.mark.long
@pytest.mark.alone
def test_a_step_that_nobody_sums() -> None:
    done = check("--json")
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    first = result["difference"]
    assert (first["phase"], first["kind"]) == ("gradient", "missing sum")
    assert first["place"] in ("inner.2.bias", "inner.2.weight"), "the last layer, whose gradient comes first"
    assert "without the part of rank(s) 1" in first["ranks"]["0"]
    assert result["loss"] == pytest.approx(result["loss_of_slices"])


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("sums", ["ddp", "fsdp", "optimize"])
def test_a_step_that_is_right(sums: str) -> None:
    done = check("--sums", sums)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The same: the loss, and every gradient on every rank." in done.stdout


def test_one_rank_is_refused(refused) -> None:
    assert "--ranks: got 1, expected at least 2" in refused("check", STEP, "--ranks", 1)


RESULT = {
    "ranks": 2, "steps": 2, "parameters": 9, "loss": [2.5, 2.25], "loss_on_one_rank": [2.5, 2.25],
    "loss_of_slices": [2.5, 2.25], "of_slices": [], "difference": None, "others": [],
}  # fmt: skip
FIRST = {
    "step": 1, "order": 3, "phase": "forward", "place": "layers.1", "kind": "routed otherwise",
    "ranks": {"1": "3 of 24 choices", "3": "3 of 24 choices"},
}  # fmt: skip


def test_what_is_said() -> None:
    same = command._text("step.py:make", RESULT)
    assert "loss: 2.5, then 2.25; on one rank 2.5, then 2.25" in same
    assert same.endswith("The same: the loss, and every gradient on every rank.")
    not_finite = command._text("step.py:make", RESULT | {"loss": [None, None]})
    assert "loss: not finite, then not finite; on one rank 2.5" in not_finite
    of_slices = command._text("step.py:make", RESULT | {"of_slices": ["w"]})
    assert "1 gradients are those of slice by slice" in of_slices
    other = command._text("step.py:make", RESULT | {"difference": FIRST, "others": ["a", "b", "c", "d"]})
    assert "First difference: forward of layers.1 in step 1: routed otherwise\n" in other
    assert "  rank 1, 3: 3 of 24 choices\n" in other
    assert other.endswith("4 more differ, maybe as a consequence: a, b, c, ...")
