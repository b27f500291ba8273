"""Ranks on one machine: torch's launcher starts and ends them; the error names the one that failed first.

    launch ──┬── rank 0 ── report_errors(main) ── start_ranks
             └── rank 1 ── ...

A rank that raises writes an error file; a rank that is killed writes none. Either way the others are ended.
If the launcher itself is killed, each rank sees that its parent is gone.

torchrun's agent would wait 30 s for a stopped process, and orders failures by whole seconds only. Ranks work
under torchrun, too, and alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    ProcessFailure,
    SignalException,
    SubprocessContext,
)

from lancet_kernels.errors import CommunicationError, RankFailed, UserError
from lancet_kernels.files import write_json_atomically
from lancet_kernels.ops.comm.waiting import BOARD_FILE, Board, blames, join_board, waiting

# Set by our launcher, not by torchrun: a rank ends when that process has ended.
LAUNCHER_PID = "LANCET_LAUNCHER_PID"
WATCHDOG_INTERVAL_S = 0.5
# How long a rank that lost a peer lives on, so that the launcher sees the root cause first.
LAST_WORDS_S = 2.0


@dataclass(frozen=True)
class Rank:
    """This process among `world`; `local_rank` counts on this machine only."""

    rank: int
    world: int
    local_rank: int
    device: torch.device


def under_launcher() -> bool:
    """Whether this process is a rank that a launcher, ours or torchrun, has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_ranks(device: str, timeout_s: float, even_alone: bool = False) -> Rank:
    """Join the other ranks, on "cpu" (gloo, one compute thread) or "cuda" (NCCL, GPU number LOCAL_RANK).

    timeout_s: how long a collective may wait for a peer before it raises. Alone (no launcher, or a world of
    one) there is no process group; even_alone: there is one for a world of one that a launcher started.
    Raises UserError for an incomplete environment, and if there is no such device; CommunicationError if a
    rank does not come.
    """
    try:
        rank, world, local_rank = (
            int(os.environ[name]) if under_launcher() else alone
            for name, alone in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
    except (KeyError, ValueError) as error:
        raise UserError(
            "environment of a rank",
            got=repr(error),
            expected="numbers RANK, WORLD_SIZE and LOCAL_RANK",
            do="start it with torchrun, or set all three",
        ) from error
    place = _place(device, local_rank)
    if place.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(place)
    if world > 1 or even_alone:
        with waiting("meeting of the ranks"):
            dist.init_process_group(
                "nccl" if place.type == "cuda" else "gloo",
                timeout=timedelta(seconds=timeout_s),
                device_id=place if place.type == "cuda" else None,
            )
    return Rank(rank, world, local_rank, place)


def report_errors(main: Callable[[], int]) -> int:
    """Run `main` and return its exit code; when it fails under a launcher, end this process within seconds.

    A failure is recorded for the launcher, and its traceback is written to a temporary file. Our launcher
    prints the error in one line; under torchrun, or alone, this function prints it. A UserError leaves no
    traceback.

    Wrap the whole program in it: from here on the rank ends when its launcher does, even inside a collective.
    """
    if under_launcher():
        # The defaults end the process at once; Python's KeyboardInterrupt waits for the collective to return.
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_DFL)
        _watch_launcher()
    try:
        code = main() or 0
    except SystemExit as leave:
        if isinstance(leave.code, str):
            print(leave.code, file=sys.stderr)
        code = leave.code if isinstance(leave.code, int) else 1
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Exception as error:
        _report(error)
        code = 1
    if code and under_launcher():
        # Not the usual way out: freeing a process group whose peers wait in a collective may block.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    return code


def _report(error: Exception) -> None:
    """Write torch's error file for the launcher; without our launcher, print the error."""
    # The peers' errors follow within milliseconds.
    now = time.time_ns()
    lines = "".join(traceback.format_exception(error))
    blamed = blames(error)
    # Only the root cause leaves a temporary file, not each rank that lost a peer.
    traceback_file = None if isinstance(error, UserError) or blamed == "peer" else _write_traceback(lines)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {  # read by `root_cause`
            "py_callstack": lines,
            "timestamp": str(now // 10**9),
            "time_ns": now,
            "blames": blamed,
            "missing": getattr(error, "missing", ()),
            "traceback_file": traceback_file,
        }
        # Atomic, because torch's launcher itself fails on half a file.
        write_json_atomically(file, {"message": {"message": _one_line(error), "extraInfo": extra}})
    if LAUNCHER_PID not in os.environ:
        verbs = {"self": "failed", "timeout": "gave up", "peer": "lost a peer, whose own line says why"}
        where = f"rank {os.environ['RANK']} {verbs[blamed]}: " if under_launcher() else ""
        hint = f" (traceback in {traceback_file})" if traceback_file else ""
        what = str(error) if isinstance(error, UserError) else _one_line(error)
        print(f"{where}{what}{hint}", file=sys.stderr)
    if blamed == "peer" and under_launcher():
        time.sleep(LAST_WORDS_S)


def _write_traceback(lines: str) -> str | None:
    rank = os.environ.get("RANK", "0")
    path = Path(tempfile.gettempdir(), f"lancet-{os.getpid()}-rank-{rank}.traceback.txt")
    with contextlib.suppress(OSError):
        path.write_text(lines, encoding="utf-8")
        return str(path)
    return None


def _one_line(error: BaseException) -> str:
    """`Type: message` in one line, without the C++ frames that torch appends, at most some 400 characters."""
    text = " ".join(str(error).split("\nException raised from")[0].split())
    if len(text) > 400:
        text = text[:400] + " ..."
    if text and isinstance(error, CommunicationError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place(device: str, local_rank: int) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            "CUDA devices",
            got=count,
            expected=f"at least {local_rank + 1}, one for each rank on this machine",
            do="use fewer ranks or the device cpu",
        )
    return torch.device("cuda", local_rank)


def _watch_launcher() -> None:
    """End this process when our launcher is gone, and send heartbeats until then.

    A thread, as the main one may sit in a collective.
    """
    launcher = int(os.environ.get(LAUNCHER_PID, 0))
    if not launcher:
        return

    board = join_board()

    def watch() -> None:
        while os.getppid() == launcher:
            if board is not None:
                board.sign()
            time.sleep(WATCHDOG_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watchdog", daemon=True).start()


MONITOR_INTERVAL_S = 0.1
# Between SIGTERM and SIGKILL. Ranks end on SIGTERM; this is for one that hangs inside the system.
SHUTDOWN_S = 3
CPU_RANK = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # The allocator keeps freed memory: otherwise each large tensor costs page faults, which for 32 MB take
    # several times as long as writing it.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
}
"""Environment of a rank that computes on the CPU."""
# The command `lancet` as arguments of the interpreter. `-m` would look in the current folder first, where a
# clone has the package without ops, graph and schedules. Ctrl-C ends a rank while it imports, too: torch may
# swallow Python's KeyboardInterrupt, and the rank would train on.
LANCET = (
    "-c",
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "sys.path = [folder for folder in sys.path if folder]; "
    "from lancet_kernels.__main__ import main; sys.exit(main())",
)
_HINTS: dict[int, str] = {
    signal.SIGKILL: " (out of memory, or killed by hand)",
    # gloo aborts where a message has another size than a rank expects.
    signal.SIGABRT: " (LANCET_CHECK=1 names collectives that differ between ranks)",
}
# Those that torch's launcher turns into a SignalException.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def launch(
    ranks: int,
    arguments: Sequence[str],
    *,
    device: str = "cpu",
    environment: Mapping[str, str] | None = None,
    finish_s: float = 0.0,
) -> None:
    """Run `sys.executable *arguments` as `ranks` processes on this machine and wait until all have ended.

    arguments: of the interpreter, as `[*LANCET, "train"]`; the program must call `report_errors`.
    device: "cpu" gives each process one compute thread.
    environment: further variables for the processes.
    finish_s: how long ranks may take to end by themselves when this process is told to stop; they get the
        same signal. A second one ends them at once.

    Raises RankFailed, which names the rank that failed first, and SystemExit(128 + signal) if this process is
    told to stop (Ctrl-C: 130); in both cases after all ranks have ended.
    """
    # The launcher has the store, because rank 0 may fail.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {name: signal.getsignal(name) for name in STOP_SIGNALS if in_main_thread}
    # RankFailed replaces torch's own log of failures.
    log = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    level, log.level = log.level, logging.CRITICAL
    with tempfile.TemporaryDirectory(prefix="lancet-ranks-") as folder:
        board = Path(folder, "board")
        Board.create(board, ranks)
        shared = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            # For torch: the launcher, not rank 0, keeps the store.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            LAUNCHER_PID: str(os.getpid()),
            BOARD_FILE: str(board),
            # Otherwise each rank whose launcher ends logs a page of C++ frames.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            **(CPU_RANK if device == "cpu" else {}),
            **(environment or {}),
        }
        job = _Ranks(
            name="lancet",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(ranks), tuple(arguments)),
            envs={rank: shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)},
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            job.start()
            for name, handler in handlers.items():
                if handler is signal.SIG_IGN:  # nohup: a signal that was ignored from the start stays ignored
                    signal.signal(name, handler)
            result = job.wait(period=MONITOR_INTERVAL_S)
            assert result is not None
            failures = {rank: result.failures[rank] for rank in result.failures if rank not in job.ended}
            if failures:
                _leave_if_stopped(failures)
                codes = {rank: handler.proc.poll() for rank, handler in job.subprocess_handlers.items()}
                left = [rank for rank in codes if codes[rank] == 0 and rank not in job.ended]
                raise root_cause(failures, left)
        except SignalException as stop:
            if finish_s:
                with contextlib.suppress(SignalException):  # a second one
                    job.let_finish(stop.sigval, finish_s)
            for name in handlers:
                # A second Ctrl-C must not leave some of the ranks behind.
                signal.signal(name, signal.SIG_IGN)
            # A third one, while this process leaves, must not print a traceback.
            handlers[signal.SIGINT] = signal.SIG_DFL
            raise SystemExit(128 + stop.sigval) from None
        finally:
            job.close()
            for name, handler in handlers.items():
                signal.signal(name, handler)
            log.level = level


class _Ranks(SubprocessContext):
    """The processes of a job. As soon as one has failed, all are ended, stopped ones, too."""

    def __init__(self, **arguments) -> None:
        super().__init__(**arguments)
        self.ended: set[int] = set()
        """Ranks that `close` ended."""

    def let_finish(self, number: int, seconds: float) -> None:
        """Send a signal to all ranks, and wait until they have ended, but not longer than that."""
        processes = [handler.proc for handler in self.subprocess_handlers.values()]
        deadline = time.monotonic() + seconds
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(MONITOR_INTERVAL_S)

    def close(self, death_sig: signal.Signals | None = None, timeout: int = SHUTDOWN_S) -> None:
        for rank, handler in self.subprocess_handlers.items():
            if handler.proc.poll() is None:
                self.ended.add(rank)
                # A stopped process sees no other signal until it goes on.
                os.killpg(handler.proc.pid, signal.SIGCONT)
        super().close(death_sig, timeout)


def _leave_if_stopped(failures: Mapping[int, ProcessFailure]) -> None:
    """Raise SystemExit if the ranks were told to stop, not by us, and have done so by themselves."""
    codes = {failure.exitcode for failure in failures.values() if not _error_report(failure)}
    for number in STOP_SIGNALS:
        if codes == {128 + number}:
            raise SystemExit(128 + number)


# Root causes first: a rank that raised an error of its own; that was killed, or wrote no error file; whose
# wait for a peer timed out; whose connection to a peer closed.
_BLAME_ORDER = {"self": 0, "silent": 1, "timeout": 2, "peer": 3}


def root_cause(failures: Mapping[int, ProcessFailure], left: Sequence[int] = ()) -> RankFailed:
    """The failure that caused the others, among the ranks that ended by themselves.

    A rank whose wait timed out names the rank that it waited for, if it knows it: then that one failed.

    Args: left: ranks that ended without an error, which others may have lost.
    """

    def order(rank: int) -> tuple[int, int, int]:
        report = _error_report(failures[rank])
        return _BLAME_ORDER[report.get("blames", "silent")], report.get("time_ns", 0), rank

    rank = min(failures, key=order)
    failure, report = failures[rank], _error_report(failures[rank])
    if report:
        what = "lost a peer" if report["blames"] == "peer" else "failed"
        if report["blames"] == "timeout" and report["missing"]:
            rank, what = report["missing"][0], "did not answer"
        if report["blames"] == "peer" and left:
            rank = left[0]
        if rank in left:
            what = "ended with exit code 0 before the others"
        text = failure.error_file_data["message"]["message"]
        return RankFailed(rank, f"{what}: {text}", traceback_file=report["traceback_file"])
    if failure.exitcode < 0:
        hint = _HINTS.get(-failure.exitcode, "")
        return RankFailed(rank, f"was killed by {failure.signal_name()}{hint}")
    return RankFailed(rank, f"ended with exit code {failure.exitcode}")


def _error_report(failure: ProcessFailure) -> Mapping:
    """The `extraInfo` that `report_errors` wrote; empty if the rank wrote no error file."""
    message = failure.error_file_data["message"]
    return message["extraInfo"] if isinstance(message, dict) else {}
