"""One rank of a job: its number, how it joins the others, and how it ends after a failure.

Works under `lancet_kernels.measure.launch`, under torchrun, and alone.
"""

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lancet_kernels.errors import CommunicationError, UserError
from lancet_kernels.files import write_json_atomically
from lancet_kernels.ops.comm.waiting import blames, join_board, waiting

# Set by our launcher alone: the process whose end must end the rank.
LAUNCHER_PID = "LANCET_LAUNCHER_PID"
WATCHDOG_INTERVAL_S = 0.5
# How long a rank that lost a peer lives on, so that the launcher first sees the one that failed.
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


def start_ranks(device: str, timeout_s: float) -> Rank:
    """Join the other ranks, on "cpu" (gloo, one compute thread) or "cuda" (NCCL, GPU number LOCAL_RANK).

    timeout_s: how long a collective may wait for a peer before it raises. Alone (no launcher, or a world of
    one) there is no process group. Raises UserError if there is no such device, CommunicationError if a rank
    does not come.
    """
    rank, world, local_rank = (
        int(os.environ[name]) if under_launcher() else alone
        for name, alone in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    place = _place(device, local_rank)
    if place.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(place)
    if world > 1:
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
    """Tell the launcher, in the form of torch's error files, and without our launcher the user."""
    # First of all: the peers' errors follow within milliseconds.
    now = time.time_ns()
    lines = "".join(traceback.format_exception(error))
    blamed = blames(error)
    # Every peer of a failed rank loses it: no reason to leave a temporary file for each.
    traceback_file = None if isinstance(error, UserError) or blamed == "peer" else _write_traceback(lines)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        # With what `launch.root_cause` needs.
        extra = {
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
        # Who lost a peer or waited in vain knows what happened to itself, and not why.
        told = {"self": "failed", "timeout": "gave up", "peer": "lost a peer, whose own line says why"}
        where = f"rank {os.environ['RANK']} {told[blamed]}: " if under_launcher() else ""
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
        return text  # it says what happened, and to which rank
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place(device: str, local_rank: int) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    if device != "cuda":
        raise UserError("device", got=repr(device), expected="cpu or cuda", do="choose one of them")
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
