"""What `make gpu` says of its figures and logs, from made-up ones."""

import json
import math
from pathlib import Path

import pytest

from bench.gpu import gpu_table


def ratio(median: float, goal: float | None) -> dict:
    spread = {"median": median, "p10": median - 0.1, "p90": median + 0.1, "rounds": 20}
    return {"what": "rate over dense", "value": spread, "goal": goal}


def figure(name: str, **others: object) -> dict:
    return {"figure": "grouped GEMM dX", "name": name, "ms": {}, "ratios": [ratio(0.9, 0.85)], **others}


def report(*figures: dict, complete: bool = True, not_measured: tuple[str, ...] = ()) -> dict:
    wrong = [{"what": f["name"], "why": gpu_table.wrong(f)} for f in figures if gpu_table.wrong(f)]
    return {
        "label": "measured", "device": "Made-up GPU", "complete": complete, "figures": list(figures),
        "wrong": wrong, "not_measured": [{"what": what, "why": "not reached"} for what in not_measured],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({}, ""),
        ({"largest_difference": 0.02, "difference_allowed": 0.02}, ""),
        ({"largest_difference": 0.03, "difference_allowed": 0.02}, "difference 0.03, allowed 0.02"),
        ({"largest_difference": math.nan, "difference_allowed": 0.1}, "difference nan, allowed 0.1"),
    ],
)
def test_what_is_wrong(found: dict, why: str) -> None:
    assert gpu_table.wrong(found) == why


PASSED = """\
tests/a.py::test_a[some GEMM] PASSED                          [ 50%]
tests/a.py::test_b SKIPPED (no NVLink)                        [100%]
SKIPPED [1] tests/a.py:3: no NVLink
=== 1 passed, 1 skipped in 3.1s ===

exit code 0
"""


@pytest.mark.parametrize("log", [PASSED, PASSED.replace("exit code 0", "exit code 3")])
def test_a_stage_without_an_exit_code_of_zero_is_not_well(tmp_path: Path, log: str) -> None:
    (tmp_path / "2-alone.log").write_text(log)
    (tmp_path / "ranks-said.txt").write_text("two ranks on one GPU: no way\n")
    text, well = gpu_table.summary(report(figure("wide")), tmp_path / "x.json", tmp_path)
    assert well == (log == PASSED)
    assert "\ntwo ranks on one GPU: no way\n" in text


def test_short_enough_for_the_last_12000_characters(tmp_path: Path, capsys) -> None:
    """Everything fails, everywhere, and says much."""
    failing = [f"tests/some/folder/test_file.py::test_{i}[{'x' * 60}]" for i in range(200)]
    text = "".join(f"{name} FAILED [ 1%]\n" for name in failing)
    text += "".join(f"FAILED {name} - {'assert ' * 99}\n" for name in failing) + "exit code 1\n"
    for stage in ("1-kernels-1", "2-alone", "3-sanitizer"):
        (tmp_path / f"{stage}.log").write_text(text)
    figures = [figure("wide", largest_difference=1.0, difference_allowed=0.1) for _ in range(80)]
    found = report(*figures, not_measured=("a part " * 100,) * 50)
    (tmp_path / "x.json").write_text(json.dumps(found))
    assert gpu_table.main(str(tmp_path / "x.json"), str(tmp_path)) == 1
    said = capsys.readouterr().out
    assert len(said.partition("== summary")[2]) < 12000
    assert said.rstrip().endswith("make gpu: not all passed, or not all was measured")
