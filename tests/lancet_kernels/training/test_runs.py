import json
import os
import subprocess
import sys
from datetime import datetime

import pytest

from lancet_kernels.atomic import file_errors, locked, write_json_atomically, write_text_atomically
from lancet_kernels.errors import UserError
from lancet_kernels.training.runs import (
    append_metrics,
    is_in_use,
    new_run,
    read_config,
    read_metrics,
    resolve_run,
    truncate_metrics,
    writing,
)
from tests.processes import started


def test_atomic_write_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("old")
    write_json_atomically(path, {"loss": 1.5, "bad": float("nan"), "list": [float("inf"), 2]})
    assert json.loads(path.read_text()) == {"loss": 1.5, "bad": None, "list": [None, 2]}
    assert os.listdir(tmp_path) == ["summary.json"]


def test_atomic_write_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    path.write_text("old")

    def full(_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


@pytest.mark.parametrize("name", ["", "file/times.json", "file/deeper/times.json"])
def test_a_file_that_cannot_be_written_is_one_line(tmp_path, name):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"file to write: got .*, expected a file that .*; name") as caught,
        locked(tmp_path / name),
    ):
        pass
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"got here \(no space left\),"), file_errors("here"):
        raise OSError(28, "no space left")


def start(root, name: str):
    """A run that has begun."""
    run = new_run(root, name)
    write_json_atomically(run / "config.json", {"model": "gpt2-tiny-moe"})
    return run


def test_metrics_come_back_and_are_forgotten_after_a_step(tmp_path):
    run = new_run(tmp_path / "runs", "first")
    truncate_metrics(run, after_step=0)  # nothing logged yet
    assert read_metrics(run) == []
    for step, loss in enumerate((5.5, float("nan"), 4.5, 4.0), start=1):
        append_metrics(run, {"step": step, "loss": loss})
    text = (run / "metrics.jsonl").read_text()
    assert text.startswith('{"step": 1, "loss": 5.5}\n{"step": 2, "loss": null}\n')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert [metrics["step"] for metrics in read_metrics(run)] == [1, 2, 3, 4]
    truncate_metrics(run, after_step=3)
    append_metrics(run, {"step": 4, "loss": 4.0})
    assert (run / "metrics.jsonl").read_text() == text


def test_default_names_do_not_collide(tmp_path, monkeypatch):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2030, 1, 2, 3, 4, 5)

    monkeypatch.setattr("lancet_kernels.training.runs.datetime", Clock)
    names = [new_run(tmp_path).name for _ in range(3)]
    assert names == ["20300102-030405", "20300102-030405-2", "20300102-030405-3"]


@pytest.mark.parametrize("name", ["", ".", "..", "latest", "a/b", ".hidden"])
def test_names_that_are_no_plain_folder_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="run name"):
        new_run(tmp_path, name)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("left", ["config.json", "notes.txt"])
def test_a_taken_name_is_refused(tmp_path, left):
    (new_run(tmp_path, "run") / left).write_text("{}")
    with pytest.raises(UserError, match="run, which exists"):
        new_run(tmp_path, "run")


def test_the_name_of_a_run_that_never_began_is_free(tmp_path):
    run = new_run(tmp_path, "run")
    (run / "plan.json").write_text("{}")
    with writing(run):
        pass
    assert new_run(tmp_path, "run") == run


def test_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match=r"runs/run .*, expected a file that can be written"):
        new_run(tmp_path / "runs", "run")


def test_config_of_nothing(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_config(new_run(tmp_path, "run"))


HOLDER = """
import sys
from pathlib import Path
from lancet_kernels.training.runs import writing
with writing(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.long
def test_a_run_has_one_writer_and_is_free_when_it_is_killed(tmp_path):
    run = new_run(tmp_path, "run")
    with started(sys.executable, "-c", HOLDER, run, stdin=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == "held\n"
        assert is_in_use(run)
        with pytest.raises(UserError, match="in use by another process") as caught, writing(run, wait_s=0):
            pass
        assert "\n" not in str(caught.value)
    with writing(run, wait_s=2):
        assert is_in_use(run)
    assert not is_in_use(run)


def test_resolve_run_by_name_path_and_what_it_says_otherwise(tmp_path, monkeypatch):
    root = tmp_path / "runs"
    with pytest.raises(UserError, match=r"got latest, .*which has none.*train one first"):
        resolve_run(root, "latest")
    for name, begun in (("b", 2e9), ("a", 1e9)):
        run = start(root, name)
        os.utime(run / "config.json", (begun, begun))
    (root / "not-a-run").mkdir()
    assert resolve_run(root, "latest") == root / "b"
    assert resolve_run(root, "a") == root / "a"
    assert resolve_run(root, str(root / "b")) == root / "b"
    monkeypatch.chdir(root)
    assert resolve_run("elsewhere", "./b").resolve() == root / "b"
    for name in ("c", "not-a-run", "."):
        with pytest.raises(UserError, match=r"\(a, b\)"):
            resolve_run(root, name)
