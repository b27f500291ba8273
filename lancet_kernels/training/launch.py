"""Ranks on one machine: start them, end them together, and name the one that failed first.

Launcher side: `launch`, and `run_ranks` for ranks whose environments differ more. Worker side, the same under
our launcher and under torchrun: `report_errors` around the whole program, `start_ranks` before the first
collective.

    launcher ──┬── rank 0 ── report_errors(main) ── start_ranks
               └── rank 1 ── ...

A rank that raises writes an error file; a rank that is killed writes none. Either way the launcher ends the
others: SIGTERM, which a rank does not handle, and SIGCONT for one that was stopped. If the launcher itself is
killed, each rank's watchdog sees that its parent is gone.

Not torch's elastic agent: it waits 30 s for a stopped process, counts its own SIGKILL as a failure, and tells
who failed first in whole seconds.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from lancet_kernels.errors import RankFailed, UserError
from lancet_kernels.ops.waiting import BOARD_FILE, Board
from lancet_kernels.training.ranks import LAUNCHER_PID, Rank, report_errors, start_ranks, under_launcher

__all__ = [
    "Rank",
    "launch",
    "report_errors",
    "root_cause",
    "run_ranks",
    "start_ranks",
    "stop_signals",
    "under_launcher",
]

MONITOR_INTERVAL_S = 0.1
# Between SIGTERM and SIGKILL. Ranks end on SIGTERM; this is for one that hangs inside the system.
SHUTDOWN_S = 3
# How long a rank that failed may take to say so, when another one has already lost it.
LAST_WORDS_S = 2.0
CPU_RANK = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Large tensors come from memory that the process keeps: else each one costs page faults, which for 32 MB
    # take several times as long as writing them.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
}
"""Environment of a rank that computes on the CPU."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(
    ranks: int,
    arguments: Sequence[str],
    *,
    device: str = "cpu",
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run `sys.executable *arguments` as `ranks` processes on this machine and wait until all have ended.

    arguments: what follows the interpreter, e.g. `["-m", "lancet_kernels.cli", "train"]`; the program must
        call `report_errors`.
    device: "cpu" gives each process one compute thread.
    environment: further variables for the processes.

    Raises RankFailed, whose one line names the rank that failed first, once all other ranks are ended; and
    SystemExit(128 + signal) if this process is told to stop (Ctrl-C: 130), when all ranks are ended.
    """
    if ranks < 1:
        raise UserError("ranks", got=ranks, expected="at least 1", do="choose a number of ranks")
    # Imported here, because the ranks also import this module, but do not need these.
    from torch.distributed import TCPStore

    # With the launcher and not with rank 0, which may be the one that fails.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        # How torch's ranks are told that rank 0 does not keep the store.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if device == "cpu":
        shared |= CPU_RANK
    environments = [
        shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | dict(environment or {})
        for rank in range(ranks)
    ]
    run_ranks([[sys.executable, *arguments]] * ranks, environments)


def run_ranks(commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> None:
    """Run a command for each rank, with these variables beside our own, and wait until all have ended.

    Raises RankFailed and SystemExit as `launch` does; all ranks are gone by then.
    """
    with stop_signals(), tempfile.TemporaryDirectory(prefix="lancet-ranks-") as folder:
        errors = [Path(folder, f"rank-{rank}.json") for rank in range(len(commands))]
        board = Path(folder, "board")
        Board.create(board, len(commands))
        ours = {
            LAUNCHER_PID: str(os.getpid()),
            BOARD_FILE: str(board),
            # Without it each rank whose launcher goes away warns in a page of native frames.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }
        ranks: list[subprocess.Popen] = []
        try:
            for command, environment, file in zip(commands, environments, errors, strict=True):
                variables = {**os.environ, **ours, **environment} | {"TORCHELASTIC_ERROR_FILE": str(file)}
                ranks.append(subprocess.Popen(command, env=variables))
            _wait(ranks, errors)
        finally:
            _end(ranks)


@dataclass(frozen=True)
class Failure:
    """A rank that ended with an error by itself. message: what it wrote about the error; None: nothing."""

    exitcode: int
    message: dict | None


def _wait(ranks: Sequence[subprocess.Popen], errors: Sequence[Path]) -> None:
    """Wait until all have ended. Raises RankFailed for the rank that failed first."""
    deadline = math.inf
    while True:
        codes = [rank.poll() for rank in ranks]
        failures = {r: Failure(code, _message(errors[r])) for r, code in enumerate(codes) if code}
        if failures:
            deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
            # Who lost a peer may be seen dead before that peer.
            know_why = any(_blame_order(failure) < _BLAME_ORDER["peer"] for failure in failures.values())
            if know_why or None not in codes or time.monotonic() >= deadline:
                raise root_cause(failures)
        elif None not in codes:
            return
        time.sleep(MONITOR_INTERVAL_S)


def _message(file: Path) -> dict | None:
    """What a rank wrote about its failure."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _end(ranks: Sequence[subprocess.Popen]) -> None:
    """End all ranks that still run, also stopped ones, and wait for them."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
            # A stopped process sees no signal until it goes on; then SIGTERM comes before all else.
            rank.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + SHUTDOWN_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            # One that hangs in the kernel may outlive even that: the job still ends.
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(SHUTDOWN_S)


# Whose failure the others follow from comes first: a rank that raised an error of its own; that was killed or
# left without a word; that waited in vain for a peer; that saw a connection close.
_BLAME_ORDER = {"self": 0, "silent": 1, "timeout": 2, "peer": 3}


def root_cause(failures: Mapping[int, Failure]) -> RankFailed:
    """The failure that caused the others, among the ranks that ended by themselves.

    A rank whose wait timed out names the rank that it waited for, if it knows it: then that one failed.
    """

    def order(rank: int) -> tuple[int, int, int]:
        record = _record(failures[rank])
        return _blame_order(failures[rank]), record["time_ns"] if record else 0, rank

    rank = min(failures, key=order)
    failure = failures[rank]
    record = _record(failure)
    if record and isinstance(failure.message, dict):
        missing = record.get("missing")
        if record["blames"] == "timeout" and missing:
            rank, what = missing[0], "did not answer"
        else:
            what = "lost a peer" if record["blames"] == "peer" else "failed"
        return RankFailed(
            rank, f"{what}: {failure.message['message']}", traceback_file=record["traceback_file"]
        )
    if failure.exitcode < 0:
        hint = " (out of memory, or killed by hand)" if failure.exitcode == -signal.SIGKILL else ""
        return RankFailed(rank, f"was killed by {signal.Signals(-failure.exitcode).name}{hint}")
    return RankFailed(rank, f"ended with exit code {failure.exitcode}")


def _blame_order(failure: Failure) -> int:
    record = _record(failure)
    return _BLAME_ORDER[record["blames"] if record else "silent"]


def _record(failure: Failure) -> dict | None:
    """What `report_errors` wrote about a failure; None if the rank had no time to write."""
    extra = failure.message["extraInfo"] if isinstance(failure.message, dict) else {}
    return extra if "blames" in extra else None


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Turn a signal that asks us to stop into SystemExit, at which the ranks are ended with SIGTERM.

    A second Ctrl-C does not interrupt the clean-up. Outside the main thread there are no signals to handle.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    last_stop = -math.inf

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal last_stop
        # While the ranks are being ended, an impatient second Ctrl-C must not leave some of them behind.
        if time.monotonic() - last_stop > 2 * SHUTDOWN_S:
            last_stop = time.monotonic()
            raise SystemExit(128 + number)

    before = {name: signal.getsignal(name) for name in STOP_SIGNALS}
    for name in STOP_SIGNALS:
        # A signal that was ignored from the start (nohup) stays ignored.
        if before[name] is not signal.SIG_IGN:
            signal.signal(name, stop)
    try:
        yield
    finally:
        for name, handler in before.items():
            if handler is signal.default_int_handler and last_stop > -math.inf:
                # We are on our way out: a further Ctrl-C must not show where the interpreter was.
                handler = signal.SIG_DFL
            # None: a handler that was not installed from Python, and cannot be put back from here.
            if handler is not None:
                signal.signal(name, handler)
