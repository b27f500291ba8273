"""Ranks on one machine: how they are started, how they end together, and who is blamed when one fails.

Launcher side: `launch`. Worker side, the same under our launcher and under torchrun: `report_errors` around
the whole program, `start_ranks` before the first collective.

    launcher ── elastic agent ──┬── rank 0 ── report_errors(main) ── start_ranks
                                └── rank 1 ── ...

A rank that raises writes an error file, which the agent hands back; a rank that is killed writes none. Either
way the agent sends SIGTERM to the others, which end at once: a rank keeps no signal handler. If the launcher
itself is killed, each rank's watchdog sees that its parent is gone.
"""

import contextlib
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from lancet_kernels.errors import RankFailed, UserError
from lancet_kernels.ranks import LAUNCHER_PID, Rank, report_errors, start_ranks, under_launcher

__all__ = [
    "Rank",
    "launch",
    "report_errors",
    "root_cause",
    "start_ranks",
    "stop_signals",
    "under_launcher",
]

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
    with (
        stop_signals(),
        tempfile.TemporaryDirectory(prefix="lancet-ranks-") as folder,
        _environment(_worker_environment(device, environment or {})),
        _silent_elastic(),
    ):
        # Here, not above: the ranks import this module too, and need none of it.
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            run_id=uuid.uuid4().hex,
            role="rank",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            # Without it the machine's own name is looked up, which a laptop may not be able to resolve.
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=MONITOR_INTERVAL_S,
            # The other signals are handled by stop_signals; elastic wants at least one name.
            signals_to_handle="SIGQUIT",
        )
        # Elastic reads arguments as templates, in which two dollar signs stand for one.
        literal = [argument.replace("$", "$$") for argument in arguments]
        try:
            elastic_launch(config, sys.executable)(*literal)
        except ChildFailedError as error:
            raise root_cause(error.failures) from None


def root_cause(failures: Mapping[int, object]) -> RankFailed:
    """The failure that the others follow from, out of elastic's `ProcessFailure` for each global rank.

    Elastic's own choice knows whole seconds only, and does not know that a rank whose peer was killed merely
    reports it. In this order, and the first of its sort: a rank that raised an error of its own; that was
    killed or left without a word; that waited in vain for a peer; that was ended by SIGTERM, which most are
    by elastic itself; that saw a connection close.
    """
    sorts = {"self": 0, "timeout": 2, "peer": 4}

    def order(item: tuple[int, tuple[int, object]]) -> tuple[int, int, int]:
        place, (_, failure) = item
        record = _record(failure)
        if record:
            return (sorts[record["blames"]], record["time_ns"], place)
        # By place: elastic lists those it found dead before those that it ended.
        return (3 if failure.exitcode == -signal.SIGTERM else 1, 0, place)

    _, (rank, failure) = min(enumerate(failures.items()), key=order)
    record = _record(failure)
    if record:
        return RankFailed(
            rank, f"failed: {failure.message['message']}", traceback_file=record["traceback_file"]
        )
    if failure.exitcode < 0:
        hint = " (out of memory, or killed by hand)" if failure.exitcode == -signal.SIGKILL else ""
        return RankFailed(rank, f"was killed by {signal.Signals(-failure.exitcode).name}{hint}")
    return RankFailed(rank, f"ended with exit code {failure.exitcode}")


def _record(failure: object) -> dict | None:
    """What `report_errors` wrote about a failure; None if the rank had no time to write."""
    extra = failure.message["extraInfo"] if isinstance(failure.message, dict) else {}
    return extra if "blames" in extra else None


def _worker_environment(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    variables = {
        LAUNCHER_PID: str(os.getpid()),
        # Elastic's own default is 30 s.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S),
        # Without it each rank whose launcher goes away warns in a page of native frames.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    if device == "cpu":
        variables |= CPU_RANK
    return variables | dict(environment)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables and put them back: elastic's workers get the launcher's environment."""
    # Elastic leaves this one behind.
    names = [*variables, "TORCHELASTIC_SIGNALS_TO_HANDLE"]
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _silent_elastic() -> Iterator[None]:
    """Keep elastic's warnings and tables from the terminal: what they say is in RankFailed."""
    loggers = [logging.getLogger(f"torch.distributed.{name}") for name in ("elastic", "launcher")]
    before = [(logger.propagate, logger.handlers) for logger in loggers]
    for logger in loggers:
        logger.propagate, logger.handlers = False, [logging.NullHandler()]
    try:
        yield
    finally:
        for logger, (propagate, handlers) in zip(loggers, before, strict=True):
            logger.propagate, logger.handlers = propagate, handlers


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Turn a signal that asks us to stop into SystemExit, at which elastic ends the ranks with SIGTERM.

    Elastic's own handlers would pass SIGINT on, which a rank inside a collective answers too late, and would
    let a second Ctrl-C interrupt the clean-up. Outside the main thread there are no signals to handle.
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

    before = {name: signal.getsignal(name) for name in (*STOP_SIGNALS, signal.SIGQUIT)}
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
