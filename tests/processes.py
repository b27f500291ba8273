"""Processes of tests: commands that they run, and forks of a process that has imported what they need."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node".split()
"""What follows Python; the number of ranks comes next."""
# None of them starts a thread, which a fork would lose.
PRELOADED = ["pytest", "torch", "lancet_kernels.optimization.optimize", "lancet_kernels.kernels.overlap"]


def processes() -> ForkServerContext:
    """Where to take Process and Queue from; the functions are found by name, as with "spawn".

    Environment and imports are those of the first call. One thread each: ranks share the cores.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


def run(*command: object, timeout_s: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder of the sources, with these environment variables, too."""
    return subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def printed(*arguments: object, timeout_s: float = 300, **variables: str) -> str:
    """What Python prints for these arguments, with which it must succeed."""
    done = run(sys.executable, *arguments, timeout_s=timeout_s, **variables)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@contextmanager
def started(*command: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a command in the folder of the sources; killed on the way out if it still runs."""
    defaults = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*map(str, command)], **defaults | options) as process:
        try:
            yield process
        finally:
            process.kill()


def running(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text()
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc").exists()  # macOS: signals only
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    """Until `condition()` holds; fails the test if that takes longer than allowed."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
