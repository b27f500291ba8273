"""Ranks are real processes here, and so are the signals."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing import ProcessFailure

from lancet_kernels.errors import RankFailed, UserError
from lancet_kernels.measure.launch import (
    LANCET,
    Rank,
    _one_line,
    launch,
    report_errors,
    root_cause,
    start_ranks,
    under_launcher,
)
from tests.grids import few_of
from tests.processes import TORCHRUN, run, running, wait_for

RANKS_TIMEOUT_S = 240
WORKER = """
import ctypes, os, signal, sys, time
from pathlib import Path
from lancet_kernels.errors import UserError
from lancet_kernels.errors import CommunicationError
from lancet_kernels.measure.launch import report_errors, start_ranks
from lancet_kernels.ops.comm.link_group import waiting

folder, mode, *rest = sys.argv[1:]
fails = os.environ.get("RANK") == "1"

def main():
    Path(folder, f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    if mode == "early" and fails:
        raise ValueError("early")
    if mode == "late":
        if not fails:
            raise CommunicationError("rank 0 lost its connection")
        time.sleep(0.3)
        raise ValueError("late")
    import torch, torch.distributed as dist
    me = start_ranks("cpu", {"timeout": 8, "SIGSTOP": 8}.get(mode, TIMEOUT))
    number = torch.tensor([me.rank + 1.0])
    dist.all_reduce(number)
    Path(folder, f"seen-{me.rank}").write_text(repr([
        me.world, me.local_rank, number.item(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"],
        os.environ.get("EXTRA"), "torch._dynamo" in sys.modules, rest,
    ]))
    if mode == "work":
        return 0
    if fails:
        if mode == "raise":
            raise ValueError("boom\\nsecond line")
        if mode == "user":
            raise UserError("top_k", got=9, expected="at most 4", do="choose fewer")
        if mode == "code":
            return 7
        if mode == "segv":
            ctypes.string_at(0)
        if mode in ("SIGKILL", "SIGTERM", "SIGSTOP"):
            os.kill(os.getpid(), getattr(signal, mode))
        time.sleep(TIMEOUT)
    with waiting("sum of numbers"):
        dist.all_reduce(number)
    return 0

sys.exit(report_errors(main))
""".replace("TIMEOUT", str(RANKS_TIMEOUT_S))

# What the command line does with the launcher's exceptions.
LAUNCHER = """
import sys
from lancet_kernels.errors import RankFailed
from lancet_kernels.measure.launch import launch
try:
    launch(2, sys.argv[1:])
except RankFailed as error:
    sys.exit(str(error))
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A folder with the two programs; whatever still runs of them at the end is killed, and a failure."""
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path
    left = [pid for pid in pids(tmp_path) if running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in sorted(folder.glob("pid-*"))]


def worker(job: Path, mode: str, *rest: str) -> list[str]:
    return [str(job / "worker.py"), str(job), mode, *rest]


def failure_of(job: Path, mode: str, *rest: str, **options) -> str:
    """The one line that `launch` raises, with all ranks gone well before any of them would time out."""
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        launch(2, worker(job, mode, *rest), **options)
    assert time.monotonic() - start < RANKS_TIMEOUT_S / 2
    # On a busy machine the other rank may be ended before it could write its number.
    assert len(pids(job)) in (1, 2)
    assert not any(running(pid) for pid in pids(job))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def traceback_file(job: Path) -> Path:
    (file,) = job.glob("lancet-*-rank-1.traceback.txt")
    return file


REST = ("a b", "$$x ${local_rank} $", "")


@pytest.mark.long  # by default: a killed rank, below
@pytest.mark.parametrize(("mode", "text"), [("raise", "boom second line"), ("early", "early")])
def test_a_rank_that_raises_is_named_and_its_traceback_is_in_a_file(job, capfd, mode, text):
    handler, before = signal.getsignal(signal.SIGINT), dict(os.environ)
    line = failure_of(job, mode, *REST, environment={"EXTRA": "1"})
    file = traceback_file(job)
    assert line == f"rank 1 failed: ValueError: {text} (traceback in {file})"
    assert "worker.py" in file.read_text()
    assert "ValueError: " in file.read_text()
    assert capfd.readouterr().err == ""
    assert signal.getsignal(signal.SIGINT) is handler
    assert dict(os.environ) == before
    if mode == "raise":
        # Arguments and environment as given, and torch's compiler, which takes long to import, not imported.
        assert (job / "seen-1").read_text() == repr([2, 1, 3.0, 1, "1", "1", False, list(REST)])


@pytest.mark.parametrize(
    ("mode", "line"),
    few_of(
        [
            ("SIGKILL", "rank 1 was killed by SIGKILL (out of memory, or killed by hand)"),
            ("SIGTERM", "rank 1 was killed by SIGTERM"),
            ("segv", "rank 1 was killed by SIGSEGV"),
            ("code", "rank 1 ended with exit code 7"),
            ("user", "rank 1 failed: UserError: top_k: got 9, expected at most 4; choose fewer"),
        ]
    ),
)
def test_a_rank_that_ends_while_its_peer_waits_is_named(job, capfd, mode, line):
    assert failure_of(job, mode) == line
    assert capfd.readouterr().err == ""


@pytest.mark.long
@pytest.mark.parametrize("mode", ["timeout", "SIGSTOP"])
def test_a_rank_that_never_answers_is_named(job, mode):
    """Asleep, it runs and comes too late; stopped, it shows no sign of life and takes no SIGTERM."""
    line = failure_of(job, mode)
    assert re.match(
        r"rank 1 did not answer: rank 0 waited \d+\.\d s in sum of numbers for rank\(s\) 1; ", line
    )
    why = "has shown no sign of life for" if mode == "SIGSTOP" else "still runs"
    # Which has no name of ours; LANCET_CHECK notes it.
    assert "rank 1 last entered all_reduce" in line
    assert why in line


@pytest.mark.long
@pytest.mark.parametrize(
    ("send", "number", "code"),
    [(os.kill, signal.SIGTERM, 143), (os.kill, signal.SIGINT, 130), (os.killpg, signal.SIGINT, 130)],
)
def test_a_signal_to_the_launcher_ends_all_quietly(job, send, number, code):
    """Also Ctrl-C, which goes to the whole process group."""
    launcher = start_hanging_job(job)
    send(launcher.pid, number)
    _, errors = launcher.communicate(timeout=60)
    assert (launcher.returncode, errors) == (code, "")
    assert not any(running(pid) for pid in pids(job))


@pytest.mark.long
def test_impatient_ctrl_c_leaves_nobody_behind(job):
    launcher = start_hanging_job(job)
    while launcher.poll() is None:
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.01)
    # The last of the signals may hit the interpreter when it is as good as gone.
    assert launcher.returncode in (130, -signal.SIGINT)
    assert launcher.communicate()[1] == ""
    assert not any(running(pid) for pid in pids(job))


@pytest.mark.long
def test_ranks_end_when_the_launcher_is_killed(job):
    launcher = start_hanging_job(job)
    launcher.kill()
    wait_for(lambda: not any(running(pid) for pid in pids(job)), 60)
    assert launcher.communicate(timeout=60) == ("", "")


def start_hanging_job(job: Path) -> subprocess.Popen:
    """A launcher whose rank 1 sleeps and whose rank 0 waits for it in a collective."""
    launcher = subprocess.Popen(
        [sys.executable, str(job / "launcher.py"), *worker(job, "hang")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: (job / "seen-0").exists() and (job / "seen-1").exists(), 90)
    time.sleep(0.2)
    assert len(pids(job)) == 2
    assert all(running(pid) for pid in pids(job))
    return launcher


@pytest.mark.long
def test_under_torchrun_a_failed_rank_says_one_line(job):
    result = run(sys.executable, *TORCHRUN, 2, *worker(job, "raise"), timeout_s=60)
    assert result.returncode != 0
    file = traceback_file(job)
    line = f"rank 1 failed: ValueError: boom second line (traceback in {file})"
    assert result.stderr.count(line) == 1
    # The other one may have been ended before it could say so, but it never claims a failure of its own.
    assert "rank 0 failed" not in result.stderr
    assert not any(running(pid) for pid in pids(job))


def test_alone_there_is_no_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    try:
        assert not under_launcher()
        assert start_ranks("cpu", 1) == Rank(0, 1, 0, torch.device("cpu"))
        assert torch.get_num_threads() == 1
        assert not torch.distributed.is_initialized()
    finally:
        torch.set_num_threads(threads)


def test_an_incomplete_environment(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(UserError, match=r"got KeyError.'LOCAL_RANK'., expected numbers RANK"):
        start_ranks("cpu", 1)


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in (("RANK", "6"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="CUDA devices: got 2, expected at least 3"):
        start_ranks("cuda", 1)


def test_alone_errors_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def main(error):
        raise error

    assert report_errors(lambda: 0) == 0
    assert report_errors(lambda: 3) == 3
    assert report_errors(lambda: sys.exit(5)) == 5
    assert report_errors(lambda: main(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""
    assert report_errors(lambda: main(UserError("K", got=3, expected=2, do="less"))) == 1
    assert capsys.readouterr().err == "K: got 3, expected 2; less\n"
    assert report_errors(lambda: main(ValueError("no\nway"))) == 1
    (file,) = tmp_path.iterdir()
    assert capsys.readouterr().err == f"ValueError: no way (traceback in {file})\n"


def raised(blames: str, time_ns: int, missing: tuple[int, ...] = ()) -> dict:
    extra = {"blames": blames, "time_ns": time_ns, "missing": missing, "traceback_file": None}
    return {"message": {"message": blames, "extraInfo": extra | {"timestamp": "0"}}}


@pytest.mark.parametrize(
    ("failures", "line"),
    [
        ({0: raised("peer", 20), 1: 0}, "rank 1 ended with exit code 0 before the others: peer"),
        ({0: raised("timeout", 20, (1,)), 1: 0}, "rank 1 ended with exit code 0 before the others: timeout"),
        ({0: raised("self", 20), 1: 0}, "rank 0 failed"),
        ({0: raised("peer", 20), 1: raised("self", 30)}, "rank 1 failed"),
        ({0: raised("self", 20), 1: raised("self", 10), 2: raised("self", 30)}, "rank 1 failed"),
        ({0: raised("peer", 20), 1: raised("peer", 10)}, "rank 1 lost a peer"),
        ({0: raised("timeout", 20), 1: raised("peer", 10)}, "rank 0 failed"),
        ({0: raised("timeout", 20, (2,)), 1: raised("timeout", 30, (0,))}, "rank 2 did not answer"),
        ({0: raised("peer", 1), 2: -9}, "rank 2 was killed by SIGKILL"),
        ({0: raised("timeout", 1), 2: 3}, "rank 2 ended with exit code 3"),
        ({0: raised("peer", 1), 1: -15}, "rank 1 was killed by SIGTERM"),
        ({0: -6}, "rank 0 was killed by SIGABRT (LANCET_CHECK=1 names collectives that differ"),
        ({0: -9, 1: raised("self", 1)}, "rank 1 failed"),
    ],
)
def test_root_cause(tmp_path, failures, line):
    """Failures: what a rank wrote, or the exit code of one that wrote nothing."""
    recorded, left = {}, [rank for rank, failure in failures.items() if failure == 0]
    for rank, failure in failures.items():
        if rank in left:
            continue
        file = tmp_path / f"{rank}.json"
        if isinstance(failure, dict):
            file.write_text(json.dumps(failure))
        exitcode = 1 if isinstance(failure, dict) else failure
        recorded[rank] = ProcessFailure(rank, 0, exitcode, str(file))
    assert str(root_cause(recorded, left)).startswith(line)


@pytest.mark.long
def test_a_rank_that_says_late_why_it_failed_is_named_before_one_that_lost_it(job):
    """Which of the two is seen dead first would be luck."""
    assert failure_of(job, "late").startswith("rank 1 failed: ValueError: late (traceback in ")


def test_one_line_leaves_out_native_frames_and_is_bounded():
    assert _one_line(RuntimeError("lost\n peer\nException raised from f at x.cpp:1\nframe #0: g")) == (
        "RuntimeError: lost peer"
    )
    assert _one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(_one_line(ValueError("x" * 9999))) < 450


@pytest.mark.long
def test_ranks_import_what_is_installed_and_not_what_lies_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "lancet_kernels").mkdir()
    (tmp_path / "lancet_kernels" / "__init__.py").write_text("raise ImportError('of the current folder')")
    monkeypatch.chdir(tmp_path)
    launch(1, [*LANCET, "--version"])
    with pytest.raises(RankFailed):
        launch(1, [*LANCET, "--no-such-option"])


def test_ctrl_c_ends_a_rank_that_imports(tmp_path, monkeypatch):
    """An import may swallow KeyboardInterrupt."""
    (tmp_path / "lancet_kernels").mkdir()
    swallows = "import contextlib, signal\nwith contextlib.suppress(KeyboardInterrupt):\n    "
    (tmp_path / "lancet_kernels" / "__init__.py").write_text(f"{swallows}signal.raise_signal(signal.SIGINT)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = subprocess.run([sys.executable, *LANCET], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, b"")
