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
        ({"largest_difference": math.inf, "difference_allowed": 0.1}, "difference inf, allowed 0.1"),
        ({"largest_difference": math.nan, "difference_allowed": 0.1}, "difference nan, allowed 0.1"),
    ],
)
def test_what_is_wrong(found: dict, why: str) -> None:
    assert gpu_table.wrong(found) == why


def test_table_in_few_lines_says_what_is_wrong() -> None:
    bad = figure("fine", largest_difference=1.0, difference_allowed=0.02)
    bad["ratios"] = [ratio(0.5, 0.85)]
    lines = gpu_table.table(report(figure("wide"), bad)).splitlines()
    assert lines[1:] == [
        "grouped GEMM dX, rate over dense: wide 0.900 (0.800 1.000) goal 0.85 reached; "
        "fine 0.500 (0.400 0.600) goal 0.85 below WRONG"
    ]


PASSED = """\
tests/a.py::test_a[some GEMM] PASSED                          [ 50%]
tests/a.py::test_b SKIPPED (no NVLink)                        [100%]
SKIPPED [1] tests/a.py:3: no NVLink
=== 1 passed, 1 skipped in 3.1s ===

exit code 0
"""
FAILED = """\
tests/b.py::test_c FAILED                                     [ 10%]
tests/b.py::test_d PASSED                                     [ 20%]
tests/b.py::test_d ERROR                                      [ 20%]
tests/b.py:12: AssertionError
FAILED tests/b.py::test_c - assert 1 == 2
ERROR tests/b.py::test_d - RuntimeError
ERROR tests/c.py - ImportError: no such thing
=== 1 failed, 1 passed, 2 errors in 3.1s ===

exit code 1
"""
STOPPED = "tests/v.py::test_e PASSED   [ 50%]\ntests/v.py::test_f[W2] \n\nexit code 124\n"


def test_summary(tmp_path: Path) -> None:
    logs, figures = tmp_path / "logs", tmp_path / "x.json"
    logs.mkdir()
    (logs / "1-kernels-1.log").write_text(PASSED)
    good, well = gpu_table.summary(report(figure("wide")), figures, logs)
    assert well
    assert good.splitlines()[1:4] == [
        "1-kernels: 1 passed, 0 failed, 1 skipped",
        "  skipped: no NVLink",
        "measure: 1 figures",
    ]
    (logs / "1-kernels-2.log").write_text(FAILED)
    (logs / "2-alone.log").write_text(STOPPED)
    (logs / "measure.log").write_text("what went wrong\n")
    bad = figure("fine", largest_difference=0.5, difference_allowed=0.1)
    found = report(bad, complete=False, not_measured=("put, wide",))
    text, well = gpu_table.summary(found, figures, logs)
    assert not well
    assert text.splitlines()[1:-1] == [
        "1-kernels: 1 passed, 3 failed, 1 skipped in 2 processes",
        "  FAILED tests/b.py::test_c: assert 1 == 2", "  FAILED tests/b.py::test_d: RuntimeError",
        "  FAILED tests/c.py",
        "  skipped: no NVLink",
        "2-alone: 1 passed, 0 failed, 0 skipped",
        "  stopped, for its time was up", "  was running: tests/v.py::test_f[W2]",
        "measure: 1 figures, cut short",
        "  WRONG: fine: difference 0.5, allowed 0.1", "  not measured: put, wide: not reached",
        f"figures: {figures}", f"logs: {logs}",
    ]  # fmt: skip


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
