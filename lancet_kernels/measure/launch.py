"""Ranks on one machine: torch's launcher starts and ends them; the one that failed first is named.

    launcher ──┬── rank 0 ── report_errors(main) ── start_ranks      (lancet_kernels.measure.ranks)
               └── rank 1 ── ...

A rank that raises writes an error file; a rank that is killed writes none. Either way the others are ended.
If the launcher itself is killed, each rank sees that its parent is gone.

Not the agent of torchrun: it waits 30 s for a stopped process, and tells who failed first in whole seconds.
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
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    ProcessFailure,
    SignalException,
    SubprocessContext,
)

from lancet_kernels.errors import RankFailed, UserError
from lancet_kernels.measure.ranks import LAUNCHER_PID
from lancet_kernels.ops.comm.waiting import BOARD_FILE, Board

MONITOR_INTERVAL_S = 0.1
# Between SIGTERM and SIGKILL. Ranks end on SIGTERM; this is for one that hangs inside the system.
SHUTDOWN_S = 3
CPU_RANK = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Large tensors come from memory that the process keeps: else each one costs page faults, which for 32 MB
    # take several times as long as writing them.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
}
"""Environment of a rank that computes on the CPU."""
# The command `lancet` as arguments of the interpreter. `-m` would look in the current folder first, where a
# clone has the package without ops, graph and schedules.
LANCET = (
    "-c",
    "import sys; sys.path = [folder for folder in sys.path if folder]; "
    "from lancet_kernels.cli.main import main; sys.exit(main())",
)
# Those that torch's launcher turns into a SignalException.
_HINTS: dict[int, str] = {
    signal.SIGKILL: " (out of memory, or killed by hand)",
    # By gloo, where a message has another size than a rank expects.
    signal.SIGABRT: " (LANCET_CHECK=1 names collectives that differ between ranks)",
}
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

    arguments: what follows the interpreter, e.g. `[*LANCET, "train"]`; the program must
        call `report_errors`.
    device: "cpu" gives each process one compute thread.
    environment: further variables for the processes.
    finish_s: how long ranks may take to end by themselves when this process is told to stop; they get the
        same signal. A second one ends them at once.

    Raises RankFailed, whose one line names the rank that failed first, once all other ranks are ended; and
    SystemExit(128 + signal) if this process is told to stop (Ctrl-C: 130), when all ranks are ended.
    """
    if ranks < 1:
        raise UserError("ranks", got=ranks, expected="at least 1", do="choose a number of ranks")
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
    _run(arguments, environments, finish_s)


def _run(arguments: Sequence[str], environments: Sequence[Mapping[str, str]], finish_s: float) -> None:
    """`launch` with the variables of each rank."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {name: signal.getsignal(name) for name in STOP_SIGNALS if in_main_thread}
    # What it says is said by our one line.
    log = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    level, log.level = log.level, logging.CRITICAL
    with tempfile.TemporaryDirectory(prefix="lancet-ranks-") as folder:
        board = Path(folder, "board")
        Board.create(board, len(environments))
        ours = {
            LAUNCHER_PID: str(os.getpid()),
            BOARD_FILE: str(board),
            # Without it each rank whose launcher goes away warns in a page of native frames.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }
        ranks = _Ranks(
            name="lancet",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(len(environments)), tuple(arguments)),
            envs={rank: ours | dict(variables) for rank, variables in enumerate(environments)},
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            ranks.start()
            for name, handler in handlers.items():
                if handler is signal.SIG_IGN:  # nohup: a signal that was ignored from the start stays ignored
                    signal.signal(name, handler)
            result = ranks.wait(period=MONITOR_INTERVAL_S)
            assert result is not None
            failures = {rank: result.failures[rank] for rank in result.failures if rank not in ranks.ended}
            if failures:
                _leave_if_stopped(failures)
                raise root_cause(failures)
        except SignalException as stop:
            if finish_s:
                with contextlib.suppress(SignalException):  # a second one
                    ranks.let_finish(stop.sigval, finish_s)
            for name in handlers:
                # An impatient second Ctrl-C must not leave some of the ranks behind.
                signal.signal(name, signal.SIG_IGN)
            # And a third one, on our way out, must not show where the interpreter was.
            handlers[signal.SIGINT] = signal.SIG_DFL
            raise SystemExit(128 + stop.sigval) from None
        finally:
            ranks.close()
            for name, handler in handlers.items():
                signal.signal(name, handler)
            log.level = level


class _Ranks(SubprocessContext):
    """The processes of a job. All end soon, also stopped ones, as soon as one of them has failed."""

    def __init__(self, **arguments) -> None:
        super().__init__(**arguments)
        self.ended: set[int] = set()
        """Ranks that did not end by themselves."""

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
    codes = {failure.exitcode for failure in failures.values() if not _said(failure)}
    for number in STOP_SIGNALS:
        if codes == {128 + number}:
            raise SystemExit(128 + number)


# Whose failure the others follow from comes first: a rank that raised an error of its own; that was killed or
# left without a word; that waited in vain for a peer; that saw a connection close.
_BLAME_ORDER = {"self": 0, "silent": 1, "timeout": 2, "peer": 3}


def root_cause(failures: Mapping[int, ProcessFailure]) -> RankFailed:
    """The failure that caused the others, among the ranks that ended by themselves.

    A rank whose wait timed out names the rank that it waited for, if it knows it: then that one failed.
    """

    def order(rank: int) -> tuple[int, int, int]:
        said = _said(failures[rank])
        return _BLAME_ORDER[said.get("blames", "silent")], said.get("time_ns", 0), rank

    rank = min(failures, key=order)
    failure, said = failures[rank], _said(failures[rank])
    if said:
        what = "lost a peer" if said["blames"] == "peer" else "failed"
        if said["blames"] == "timeout" and said["missing"]:
            rank, what = said["missing"][0], "did not answer"
        text = failure.error_file_data["message"]["message"]
        return RankFailed(rank, f"{what}: {text}", traceback_file=said["traceback_file"])
    if failure.exitcode < 0:
        hint = _HINTS.get(-failure.exitcode, "")
        return RankFailed(rank, f"was killed by {failure.signal_name()}{hint}")
    return RankFailed(rank, f"ended with exit code {failure.exitcode}")


def _said(failure: ProcessFailure) -> Mapping:
    """What `report_errors` wrote about a failure; empty if the rank had no time to write."""
    message = failure.error_file_data["message"]
    return message["extraInfo"] if isinstance(message, dict) else {}
