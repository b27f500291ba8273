import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lancet_kernels.atomic import file_errors, json_text, locked, write_json_atomically, write_text_atomically
from lancet_kernels.errors import UserError
from lancet_kernels.training.runs import RunFolder, resolve_run


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


def test_json_text_is_one_strict_line():
    assert json_text({"a": (1, float("-inf"))}) == '{"a": [1, null]}'


def test_config_metrics_and_summary_come_back(tmp_path):
    with RunFolder.create(tmp_path / "runs", "first") as run:
        run.write_config({"model": "gpt2-tiny-moe", "lr": 0.1})
        run.append_metrics({"step": 1, "loss": 5.5})
        assert (run.path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 5.5}\n'
        run.append_metrics({"step": 2, "loss": float("nan")})
        assert (run.path / "metrics.jsonl").read_text().splitlines()[1] == '{"step": 2, "loss": null}'
        run.write_summary({"steps": 2})
        assert run.name == "first"
    with RunFolder.open(tmp_path / "runs" / "first") as run:
        assert run.read_config() == {"model": "gpt2-tiny-moe", "lr": 0.1}
        assert json.loads((run.path / "summary.json").read_text()) == {"steps": 2}


def test_truncate_drops_later_steps_and_a_torn_line(tmp_path):
    with RunFolder.create(tmp_path, "run") as run:
        for step in range(1, 6):
            run.append_metrics({"step": step})
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 6, "lo')
        run.truncate_metrics(after_step=3)
        assert (run.path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
        run.append_metrics({"step": 4})
        assert (run.path / "metrics.jsonl").read_text().endswith('{"step": 3}\n{"step": 4}\n')


def test_truncate_keeps_a_torn_file_of_whole_steps(tmp_path):
    with RunFolder.create(tmp_path, "run") as run:
        run.truncate_metrics(after_step=0)  # nothing logged yet
        (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2')
        run.truncate_metrics(after_step=9)
        assert (run.path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_truncate_refuses_a_file_damaged_in_the_middle(tmp_path):
    with RunFolder.create(tmp_path, "run") as run:
        (run.path / "metrics.jsonl").write_text('{"step": 1}\nrubbish\n{"step": 3}\n')
        with pytest.raises(UserError, match=r"line 2 of .* damaged"):
            run.truncate_metrics(after_step=3)


def test_default_names_do_not_collide(tmp_path, monkeypatch):
    import lancet_kernels.training.runs as runs

    class Clock:
        @staticmethod
        def now():
            return runs.real_datetime(2030, 1, 2, 3, 4, 5)

    monkeypatch.setattr(runs, "real_datetime", runs.datetime, raising=False)
    monkeypatch.setattr(runs, "datetime", Clock)
    names = []
    for _ in range(3):
        with RunFolder.create(tmp_path) as run:
            names.append(run.name)
    assert names == ["20300102-030405", "20300102-030405-2", "20300102-030405-3"]


@pytest.mark.parametrize("name", ["", ".", "..", "latest", "a/b", ".hidden"])
def test_names_that_are_no_plain_folder_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="run name"):
        RunFolder.create(tmp_path, name)
    assert os.listdir(tmp_path) == []


def test_a_taken_name_is_refused(tmp_path):
    with RunFolder.create(tmp_path, "run") as run:
        run.write_config({})
    with pytest.raises(UserError, match="run, which exists"):
        RunFolder.create(tmp_path, "run")


@pytest.mark.parametrize("left", [[], ["plan.json"]])
def test_the_name_of_a_run_that_never_began_is_free(tmp_path, left):
    with RunFolder.create(tmp_path, "run") as run:
        for name in left:
            (run.path / name).write_text("{}")
        with pytest.raises(UserError, match="in use by process"):
            RunFolder.create(tmp_path, "run")
    RunFolder.create(tmp_path, "run").close()


def test_a_folder_of_something_else_is_no_free_name(tmp_path):
    (tmp_path / "run").mkdir()
    for name in (None, "plan.json", "lock", "notes.txt"):
        if name is not None:
            (tmp_path / "run" / name).write_text("")
        if name != "lock":
            with pytest.raises(UserError, match="run, which exists"):
                RunFolder.create(tmp_path, "run")


def test_a_discarded_run_leaves_nothing_but_what_it_wrote(tmp_path):
    RunFolder.create(tmp_path, "run").discard()
    assert os.listdir(tmp_path) == []
    with RunFolder.create(tmp_path, "run") as run:
        run.write_config({})
        run.discard()
    assert sorted(os.listdir(tmp_path / "run")) == ["config.json", "lock"]


def test_the_lock_of_a_discarded_run_is_no_lock(tmp_path, monkeypatch):
    run, real, opened = RunFolder.create(tmp_path, "run"), Path.open, []

    def discarded_behind_the_back(path, *args, **kwargs):
        file = real(path, *args, **kwargs)
        if not opened:
            opened.append(file)
            run.discard()
        return file

    monkeypatch.setattr(Path, "open", discarded_behind_the_back)
    with pytest.raises(UserError, match="No such file"):
        RunFolder.open(tmp_path / "run")


def test_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match="runs, a file"):
        RunFolder.create(tmp_path / "runs", "run")


def test_open_of_nothing_and_config_of_nothing(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        RunFolder.open(tmp_path / "none")
    with RunFolder.create(tmp_path, "run") as run, pytest.raises(UserError, match="No such file"):
        run.read_config()


HOLDER = """
import sys
from lancet_kernels.training.runs import RunFolder
run = RunFolder.open(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_lock_names_its_holder_and_ends_with_it(tmp_path):
    RunFolder.create(tmp_path, "run").close()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid},") as caught:
            RunFolder.open(tmp_path / "run")
        assert "\n" not in str(caught.value)
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    RunFolder.open(tmp_path / "run", wait_s=2).close()


def test_latest_is_a_relative_link_to_the_newest(tmp_path):
    for name in ("one", "two"):
        with RunFolder.create(tmp_path / "runs", name) as run:
            run.write_config({})
            run.point_latest()
        assert os.readlink(tmp_path / "runs" / "latest") == name
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert resolve_run(tmp_path / "moved", "latest") == tmp_path / "moved" / "two"
    assert sorted(os.listdir(tmp_path / "moved")) == ["latest", "one", "two"]


def test_latest_does_not_replace_a_folder(tmp_path):
    (tmp_path / "latest").mkdir()
    with RunFolder.create(tmp_path, "run") as run, pytest.raises(UserError, match="not a link"):
        run.point_latest()


def test_resolve_run_by_name_path_and_what_it_says_otherwise(tmp_path, monkeypatch):
    root = tmp_path / "runs"
    with pytest.raises(UserError, match=r"got latest, .*which has none.*train one first"):
        resolve_run(root, "latest")
    for name in ("b", "a"):
        with RunFolder.create(root, name) as run:
            run.write_config({})
            run.point_latest()
    (root / "not-a-run").mkdir()
    assert resolve_run(root, "a") == root / "a"
    assert resolve_run(root, str(root / "b")) == root / "b"
    monkeypatch.chdir(root)
    assert resolve_run("elsewhere", "./b") == root / "b"
    for name in ("c", "not-a-run", "."):
        with pytest.raises(UserError, match=r"\(a, b\)"):
            resolve_run(root, name)
