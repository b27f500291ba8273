"""Compiles many specimens in a few worker processes.

Processes, because an error in LLVM ends the process: it must cost one row, not the whole table. (In a
`ProcessPoolExecutor` it fails all futures, and a compiler that hangs cannot be ended.) Also, because the
caller may interpret its kernels (TRITON_INTERPRET), which the workers never do.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.tuning.compile import CompiledKernel, compile_specimen, problems
from lancet_kernels.kernels.tuning.specimens import Specimen

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Row:
    """The result for one specimen: the compiled kernel, or the error."""

    specimen: Specimen
    compiled: CompiledKernel | None
    error: str | None

    @property
    def problems(self) -> list[str]:
        """The problems of the kernel; empty if there are none."""
        if self.compiled is None:
            return ["does not compile"]
        return problems(self.specimen, self.compiled)


def compile_all(
    specimens: Sequence[Specimen],
    arch: int,
    *,
    workers: int = 2,
    timeout_s: float = TIMEOUT_S,
    on_done: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Compile them all in `workers` processes. -> rows in the order of the specimens.

    The kernel of a specimen must be importable by its name. A specimen may take `timeout_s`.
    """
    pool = [_Worker(arch, timeout_s) for _ in range(workers)]
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in pool:
        idle.put(worker)

    def compile_one(specimen: Specimen) -> Row:
        worker = idle.get()
        try:
            return worker.compile(specimen)
        finally:
            idle.put(worker)

    # Linking NVSHMEM takes longest, so it is first: then all workers end at about the same time.
    order = sorted(range(len(specimens)), key=lambda i: not specimens[i].nvshmem)
    threads = ThreadPoolExecutor(workers)
    try:
        futures = {i: threads.submit(compile_one, specimens[i]) for i in order}
        for future in as_completed(futures.values()):
            on_done(future.result())
        return [futures[i].result() for i in range(len(specimens))]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in pool:
            worker.end()
        threads.shutdown()
        for worker in pool:
            worker.close()


class _Worker:
    """A child process that compiles one specimen after another; it is restarted when it dies."""

    def __init__(self, arch: int, timeout_s: float) -> None:
        self._arch, self._timeout_s = arch, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (`close`)

    def end(self) -> None:
        """Kill the process; may be called while another thread waits for its answer."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """After `end`, when no thread waits."""
        if self._process is not None:
            self._process.communicate()
        self._log.close()

    def compile(self, specimen: Specimen) -> Row:
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        self._log.seek(0)
        self._log.truncate()
        timer = threading.Timer(self._timeout_s, process.kill)
        timer.start()
        try:
            pickle.dump((specimen, self._arch), process.stdin)
            process.stdin.flush()
            return Row(specimen, *pickle.load(process.stdout))
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            return Row(specimen, None, self._reason_of_death(process))
        finally:
            timer.cancel()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        # The worker must import modules from the same paths as this process.
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        return subprocess.Popen(
            [sys.executable, "-m", "lancet_kernels.kernels.tuning.compile_pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )

    def _reason_of_death(self, process: subprocess.Popen[bytes]) -> str:
        code = process.wait()
        self._process = None
        self._log.seek(0)
        last = self._log.read().strip()[-2000:]
        reason = f"the compiler died (exit code {code}) or took more than {self._timeout_s:g} s"
        return f"{reason}: {last}" if last else reason


def _serve() -> None:
    """The worker process: for each specimen from standard input, (compiled kernel, error) to the caller."""
    # When the assembler fails, Triton prints whole programs; these go to the log.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        compiled, reason = None, None
        try:
            compiled = compile_specimen(*pickle.load(sys.stdin.buffer))
        except EOFError:
            return
        except UserError as error:
            reason = str(error)
        except Exception as error:
            reason = _innermost(error)
        pickle.dump((compiled, reason), answers)
        answers.flush()


def _innermost(error: BaseException) -> str:
    """The original error, which Triton wraps once for each calling function."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[:4000]


if __name__ == "__main__":
    _serve()
