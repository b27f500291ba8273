"""`lancet runs`: what is listed of runs that finished, stopped, run, or are damaged."""

import json
import os
from pathlib import Path

import pytest

from lancet_kernels.cli import main
from lancet_kernels.training.runs import append_metrics, new_run, writing


def make_run(root: Path, name: str, steps: int, done: int, started: float) -> Path:
    run = new_run(root, name)
    config = {"model": "gpt2-tiny-moe", "ranks": 2, "strategy": "lancet", "steps": steps}
    (run / "config.json").write_text(json.dumps(config))
    os.utime(run / "config.json", (started, started))
    for step in range(1, done + 1):
        append_metrics(run, {"step": step, "loss": 5.0 / step, "tokens_per_s": 100.0})
    return run


def listed(capsys: pytest.CaptureFixture, root: Path) -> list[dict]:
    assert main(["runs", "--runs", str(root), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["runs"]


def test_states_steps_and_order(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (make_run(tmp_path, "z-first", 2, 2, 1e9) / "summary.json").write_text("{}")
    with (make_run(tmp_path, "b-stopped", 4, 3, 2e9) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    with writing(make_run(tmp_path, "a-running", 4, 1, 3e9)):
        rows = listed(capsys, tmp_path)
        assert main(["runs", "--runs", str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
    assert [(row["run"], row["state"], row["step"]) for row in rows] == [
        ("z-first", "finished", 2),
        ("b-stopped", "stopped", 3),
        ("a-running", "running", 1),
    ]
    assert rows[0]["loss"] == 2.5
    assert lines[0].split() == ["run", "state", "model", "ranks", "strategy", "steps", "loss", "tokens/s"]
    assert lines[2].split() == ["b-stopped", "stopped", "gpt2-tiny-moe", "2", "lancet", "3/4", "1.667", "100"]


def test_a_damaged_run_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_run(tmp_path, "sound", 2, 2, 1e9)
    make_run(tmp_path, "broken", 2, 0, 2e9)
    (tmp_path / "broken" / "config.json").write_text("{")
    os.utime(tmp_path / "broken" / "config.json", (2e9, 2e9))
    assert [(row["run"], row["model"]) for row in listed(capsys, tmp_path)] == [
        ("sound", "gpt2-tiny-moe"),
        ("broken", None),
    ]


def test_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert listed(capsys, tmp_path / "missing") == []
    assert main(["runs", "--runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"
