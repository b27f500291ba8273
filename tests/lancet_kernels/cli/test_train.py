"""`lancet train` as a user calls it: real ranks, signals, and what is left on disk and on screen."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from unittest import mock

import pytest

from lancet_kernels.__main__ import main
from lancet_kernels.cli import train
from lancet_kernels.errors import UserError
from lancet_kernels.schedules.plan import Plan
from tests.processes import running, started, wait_for

TINY = ["--sequence", "32", "--batch", "2", "--validation-batches", "1", "--strategy", "none"]
SUMMARY = (
    "run model gate experts ranks device data steps loss_first loss_last validation_loss balance_loss "
    "dropped tokens_per_s step_ms all_to_all_ms exposed_ms link"
).split()


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A small text to train on: faster to read than a standard library."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{i} times {i + 1} is {i * (i + 1)}\n" for i in range(2000)))
    return path


@pytest.fixture
def lancet(tmp_path, text):
    """Start `lancet train` in an empty folder; whatever still runs when the test ends is ended."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with contextlib.ExitStack() as stack:

        def start(*arguments: object, fresh: bool = True) -> subprocess.Popen:
            common = [*TINY, "--data", text] if fresh else []
            command = [sys.executable, "-m", "lancet_kernels", "train", *common, *arguments]
            options = {"cwd": tmp_path, "env": environment, "stderr": subprocess.PIPE}
            process = stack.enter_context(started(*command, **options))
            stack.callback(kill_job, process.pid)
            return process

        yield start


def job_ranks(launcher: int) -> dict[int, int]:
    """Rank -> pid of the living ranks that the process `launcher` has started."""
    ranks = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and running(int(entry.name)):
                variables = (entry / "environ").read_bytes().split(b"\0")
                if f"LANCET_LAUNCHER_PID={launcher}".encode() in variables:
                    ranks |= {int(v[5:]): int(entry.name) for v in variables if v.startswith(b"RANK=")}
        except OSError:
            continue  # it has just ended
    return ranks


def kill_job(launcher: int) -> None:
    """Kill a started command and its ranks."""
    for pid in [launcher] * running(launcher) + list(job_ranks(launcher).values()):
        os.kill(pid, signal.SIGKILL)


def finish(process: subprocess.Popen, timeout_s: float = 300) -> tuple[str, str]:
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, err
    return out, err


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def wait_for_step(folder: Path, step: int, timeout_s: float = 180) -> None:
    """Until the run in `folder` has logged `step`."""
    file = folder / "metrics.jsonl"
    wait_for(lambda: file.exists() and len(file.read_text().splitlines()) >= step, timeout_s)


def wait_for_end(launcher: int) -> None:
    """Until none of its ranks lives."""
    wait_for(lambda: not job_ranks(launcher), 30)


# ---- results


@pytest.mark.long
def test_losses_do_not_depend_on_the_number_of_ranks(lancet, tmp_path):
    """Dropless, the same global batch: equal up to fp32 rounding, which training makes grow."""
    same = ["--steps", 10, "--capacity-factor", "none", "--experts", 4, "--gate", "topk", "--top-k", 2]
    same += ["--balance-weight", "0.1", "--z-weight", "0.01", "--optimizer", "sgd"]
    jobs = [lancet(*same, "--ranks", w, "--batch", 4 // w, "--output", f"runs/w{w}") for w in (1, 2)]
    for job in jobs:
        finish(job)
    metrics = {w: metrics_of(tmp_path / "runs" / f"w{w}") for w in (1, 2)}
    assert metrics[1][-1]["loss"] < metrics[1][0]["loss"] - 0.5, "it does not learn"
    for one, two in zip(metrics[1], metrics[2], strict=True):
        for key in ("loss", "balance_loss", "gradient_norm"):
            # Rounding of 1e-7 in the first step, at most some hundred times that in the last.
            allowed = 1e-6 * one["step"] * (10 if key == "gradient_norm" else 1)
            assert abs(one[key] / two[key] - 1) < allowed, f"{key} of step {one['step']}"
        assert one["dropped"] == two["dropped"] == 0
    validation = [json.loads((tmp_path / f"runs/w{w}/summary.json").read_text()) for w in (1, 2)]
    assert abs(validation[0]["validation_loss"] / validation[1]["validation_loss"] - 1) < 2e-5


def test_diverged_training_still_reports(text, tmp_path, monkeypatch, capfd):
    """NaN is no JSON."""
    monkeypatch.chdir(tmp_path)
    job = [*TINY, "--data", str(text), "--ranks", "1", "--steps", "4", "--gate", "hash", "--lr", "1e30"]

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    assert main(["train", *job]) == 0
    assert "-> nan" in capfd.readouterr().out
    (summary,) = Path("runs").glob("*/summary.json")
    assert json.loads(summary.read_text(), parse_constant=refuse)["loss_last"] is None


# ---- kill and resume


def exact(metrics: list[dict]) -> list[tuple]:
    """What must be the very same in a resumed run."""
    keys = ("step", "loss", "balance_loss", "dropped", "gradient_norm", "learning_rate")
    return [tuple(m[key] for key in keys) for m in metrics]


@pytest.mark.long
def test_killed_job_with_a_plan_resumes_with_the_very_losses(lancet, tmp_path):
    """Killed behind its second checkpoint, against a run that was left alone. The plan is kept with the run,
    so parts are added up in the same order."""
    arguments = ["--ranks", 2, "--strategy", "lancet", "--dropout", 0.1]
    arguments += ["--steps", 24, "--checkpoint-every", 3, "--warmup", 12]
    finish(lancet(*arguments, "--output", "runs/whole"))
    whole, run = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed"
    # Two runs measure two times, and might plan two orders to add up in.
    process = lancet(*arguments, "--plan", whole / "plan.json", "--output", "runs/killed")
    wait_for_step(run, 7)
    kill_job(process.pid)
    assert 7 <= len(metrics_of(run)) < 24, "killed too late"
    # At once, and with nothing but the name: the options are those of the run.
    finish(lancet("--resume", "runs/killed", fresh=False))
    assert exact(metrics_of(run)) == exact(metrics_of(whole))
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (whole, run)]
    assert summaries[0]["validation_loss"] == summaries[1]["validation_loss"]
    plans = [Plan.load(folder / "plan.json") for folder in (whole, run)]
    assert plans[0].fingerprint == plans[1].fingerprint
    assert json.loads((run / "config.json").read_text())["plan"] is None
    wait_for_end(process.pid)


@pytest.mark.long
def test_killed_rank_ends_the_job_which_resumes_with_the_very_losses(lancet, tmp_path, monkeypatch, capfd):
    """Steps behind the last checkpoint are taken a second time: the same. The others are kept."""
    options = ["--steps", 16, "--checkpoint-every", 3, "--gate", "sigmoid", "--top-k", 2, "--bias-rate", 0.1]
    process = lancet(*options, "--output", "runs/killed")
    run = tmp_path / "runs" / "killed"
    wait_for_step(run, 4)
    os.kill(job_ranks(process.pid)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert without_steps(err) == ["lancet: rank 1 was killed by SIGKILL (out of memory, or killed by hand)"]
    wait_for_end(process.pid)
    before = metrics_of(run)
    assert 4 <= len(before) < 16, "killed too late"
    # With nothing but the name: the options are those of the run.
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", "runs/killed", "--json"]) == 0
    (line,), after = capfd.readouterr().out.splitlines(), metrics_of(run)
    assert [m["step"] for m in after] == list(range(1, 17))
    assert exact(after[: len(before)]) == exact(before)
    summary = json.loads(line)
    assert sorted(summary) == sorted(SUMMARY)
    assert summary["run"] == "runs/killed"
    assert json.loads((run / "summary.json").read_text()) == summary
    assert (summary["loss_first"], summary["loss_last"]) == (after[0]["loss"], after[-1]["loss"])


def test_a_line_of_metrics_that_is_none_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": null}\n\xff}\n3}\n[]\n{}\n{"step": 2}\n{"ste'
    )
    assert [step["step"] for step in train._read_metrics(tmp_path)] == [1, 2]


LOGGED = r"step \d+/\d+, loss \d+\.\d{3}, \d+ tokens/s, \d+\.\d ms"


@pytest.mark.long
def test_run_that_is_told_to_stop_saves_and_resumes_with_the_very_losses(lancet, tmp_path):
    """A run without checkpoints, against one that was left alone. And from the same step at another number of
    ranks: the global batch stays the same, and so do the losses, up to rounding."""
    arguments = ["--ranks", 2, "--capacity-factor", "none", "--experts", 4, "--checkpoint-every", 0]
    arguments += ["--warmup", 12, "--steps", 30]
    run = tmp_path / "runs" / "stopped"
    process = lancet(*arguments, "--output", "runs/stopped")
    wait_for_step(run, 4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + signal.SIGINT, "")
    taken = len(metrics_of(run))
    assert 4 <= taken < 26, "stopped too late"
    *logged, last = err.splitlines()
    assert last == (
        f"stopped by SIGINT after step {taken}, which is saved; go on with: "
        "lancet train --resume runs/stopped"
    )
    assert all(re.fullmatch(LOGGED, line) for line in logged), logged
    wait_for_end(process.pid)
    finish(lancet("--resume", "runs/stopped", fresh=False))
    finish(lancet(*arguments, "--output", "runs/whole"))
    whole = metrics_of(tmp_path / "runs" / "whole")
    assert exact(metrics_of(run)) == exact(whole)
    steps = taken + 5
    finish(lancet("--resume", "runs/stopped", "--ranks", 4, "--batch", 1, "--steps", steps, fresh=False))
    for one, two in zip(whole[taken:steps], metrics_of(run)[taken:], strict=True):
        assert one["learning_rate"] == two["learning_rate"]
        assert abs(one["loss"] / two["loss"] - 1) < 2e-5


@pytest.mark.long
def test_one_rank_that_is_told_to_stop_stops_all(lancet, tmp_path):
    """As a scheduler may do that knows the processes and not what started them."""
    process = lancet("--ranks", 2, "--steps", 100000, "--output", "runs/run")
    wait_for_step(tmp_path / "runs" / "run", 3)
    os.kill(job_ranks(process.pid)[1], signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.splitlines()[-1].startswith("stopped by SIGTERM after step ")


def test_steps_are_logged_where_there_is_no_terminal(text, tmp_path, monkeypatch, capfd):
    """The first one, every third, and the last; the last one is saved."""
    monkeypatch.chdir(tmp_path)
    job = ["--data", text, "--ranks", 1, "--steps", 7, "--log-every", 3, "--output", "runs/one"]
    assert main(["train", *TINY, *map(str, job)]) == 0
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"step {n}/7" for n in (1, 3, 6, 7)]
    assert all(re.fullmatch(LOGGED, line) for line in lines)
    assert [path.name for path in Path("runs/one/checkpoints").iterdir()] == ["step-00000007"]


# ---- failures


def without_steps(err: str) -> list[str]:
    """The lines of standard error that are not about steps."""
    return [line for line in err.splitlines() if not re.fullmatch(LOGGED, line)]


OPS_OF_A_STEP = (
    r"((exchange_counts|all_to_all) of model\.blocks\.[13]\.feed_forward|all_reduce|sum_over_ranks|"
    r"norm of the gradients|mean of the step's figures over the ranks)"
)
WAITED = re.compile(
    r"lancet: rank 1 did not answer: rank 0 waited (?P<seconds>\d+\.\d) s in (?P<where>.*) for rank\(s\) 1; "
    r"rank 1 last entered .* \d+\.\d s ago and has shown no sign of life for \d+\.\d s.*"
)


@pytest.mark.long
def test_a_rank_that_stops_answering_is_named(lancet, tmp_path):
    """`test_fused_layer.py` has fused launches, tests/bench/test_faults.py steps with a plan."""
    process = lancet("--steps", 100000, "--output", "runs/run", "--timeout", 4)
    wait_for_step(tmp_path / "runs" / "run", 2)
    os.kill(job_ranks(process.pid)[1], signal.SIGSTOP)
    out, err = process.communicate(timeout=64)
    assert (process.returncode, out) == (1, "")
    # On a loaded machine torch's store adds warnings of its own.
    (waited,) = [match for line in without_steps(err) if (match := WAITED.fullmatch(line))] or [None]
    assert waited, err
    assert float(waited["seconds"]) > 2
    assert re.fullmatch(OPS_OF_A_STEP, waited["where"]), err
    assert job_ranks(process.pid) == {}


WRONG = {
    "model": (["--model", "gpt3"], "model: got 'gpt3', expected one of gpt2-tiny-moe"),
    "experts": (["--experts", 3], "experts: got 3, expected a multiple of the 2 ranks"),
    "top-k": (["--gate", "topk", "--top-k", 9], "top_k: got 9, expected 1 to num_experts (4)"),
    "gate": (["--gate", "best"], "gate: got 'best', expected one of switch"),
    "data": (["--data", "nowhere.txt"], "data: got nowhere.txt, expected an existing path"),
    "plan": (["--strategy", "lancet", "--plan", "none.json"], "plan: got none.json with strategy lancet"),
    "plan of none": (["--strategy", "none", "--plan", "short.txt"], "plan: got short.txt with strategy none"),
    "sequence": (["--sequence", 1000], "sequence: got 1000, expected at most 128"),
    "steps": (["--steps", 0], "--steps: got 0, expected a whole number of at least 1"),
    "ranks": (["--ranks", "two"], "--ranks: got 'two', expected a whole number of at least 1"),
    "capacity of text": (
        ["--capacity-factor", "x"],
        "--capacity-factor: got 'x', expected a number above 0, or none",
    ),
    "lr": (["--lr", "nan"], "--lr: got nan, expected a number above 0"),
    "option": (["--stepz", 3], "lancet train: unrecognized arguments: --stepz 3; see lancet train --help"),
    "resume": (
        ["--resume", "runs/never"],
        "run: got runs/never/config.json (No such file or directory), expected the JSON file of a run",
    ),
    "output": (
        [*TINY, "--ranks", 1, "--data", "enough.txt", "--output", "short.txt"],
        "file to write: got short.txt (File exists), expected a file that can be written",
    ),
    "short data": (
        ["--ranks", 1, "--data", "short.txt", "--sequence", 38],
        "training data: got 38 tokens, expected at least 39",
    ),
    "short validation": (
        ["--ranks", 1, "--data", "short.txt", "--sequence", 37],
        "validation data: got 2 tokens, expected at least 38",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_value_is_one_line(tmp_path, monkeypatch, refused, name):
    arguments, message = WRONG[name]
    (tmp_path / "short.txt").write_text("a" * 40)
    (tmp_path / "enough.txt").write_text("a" * 4000)
    monkeypatch.chdir(tmp_path)
    assert message in refused("train", *arguments)
    runs = tmp_path / "runs"
    assert not runs.exists() or list(runs.iterdir()) == [], "a run that never was left a folder"


def test_two_runs_of_one_second_do_not_share_a_folder(tmp_path, monkeypatch):
    """The first one has not written its config yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "datetime", mock.Mock(now=lambda: datetime(2026, 1, 2, 3, 4, 5)))
    assert train._new_folder(None) == Path("runs/20260102-030405")
    with pytest.raises(UserError, match=r"got runs/20260102-030405 \(File exists\)"):
        train._new_folder(None)
    assert train._new_folder("runs/20260102-030405").is_dir(), "a folder that is named may be there"


@pytest.mark.long
def test_wrong_resume_is_one_line(text, tmp_path, monkeypatch, capfd, refused):
    monkeypatch.chdir(tmp_path)
    job = ["--data", text, "--steps", 4, "--checkpoint-every", 2, "--output", "runs/run", "--ranks", 1]
    assert main(["train", *TINY, *map(str, job)]) == 0
    capfd.readouterr()
    run = tmp_path / "runs" / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for arguments, message in [
        (["--output", "runs/run"], "output: got runs/run, which has a run, expected a new folder"),
        (["--resume", "runs/run", "--gate", "topk"], "resume: gate: got switch in runs/run, expected"),
        (["--resume", "runs/run", "--experts", 8], "resume: num_experts: got 2 in runs/run, expected"),
        (["--resume", "runs/run", "--model", "gpt2-s-moe"], "resume: layers: got 4 in runs/run, expected"),
        (
            ["--resume", "runs/run", "--optimizer", "sgd"],
            "resume: optimizer: got adamw in runs/run, expected",
        ),
        (["--resume", "runs/run"], "steps: got 4, with 4 already taken, expected more than 4"),
    ]:
        assert message in refused("train", *arguments, "--ranks", 1)
    after = {path: path.read_bytes() for path in before}
    assert after == before, "a resume that was refused changed the run"
    for text, message in [
        ('{"model": "gpt2', "run: got runs/run/config.json ("),
        ("5", "run: got runs/run/config.json (not what a run writes)"),
        ('{"trains": []}', "run: got runs/run/config.json (not what a run writes)"),
        ('{"ranks": 0}', "argument --ranks: got 0, expected a whole number of at least 1"),
        ('{"gate": null}', "gate: got 'none', expected one of switch"),
    ]:
        (run / "config.json").write_text(text)
        assert message in refused("train", "--resume", "runs/run")
