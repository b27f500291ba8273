"""Compiles many specimens in a few worker processes.

Processes, because an error in LLVM ends the process: it must cost one row, not the whole table. Also, because
the caller may interpret its kernels (TRITON_INTERPRET), which the workers never do.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.compile import CompiledKernel, all_specimens, compile_specimen, problems
from lancet_kernels.kernels.specimen import Specimen


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
    chosen: Sequence[tuple[ModuleType | None, Specimen]],
    arch: int,
    *,
    workers: int = 2,
    timeout_s: float = 600.0,
    on_done: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Compile specimens of `all_specimens`. -> one row each, in their order. Each may take `timeout_s`.

    For module None, the specimen is not in a module's list; its kernel must be importable by its name.
    """
    jobs: queue.SimpleQueue[int] = queue.SimpleQueue()
    # Linking NVSHMEM takes longest, so it is first: then all workers end at about the same time.
    for i in sorted(range(len(chosen)), key=lambda i: not chosen[i][1].nvshmem):
        jobs.put(i)
    rows: dict[int, Row] = {}
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with _Worker() as worker:
                while not failures:
                    i = jobs.get_nowait()
                    rows[i] = worker.compile(*chosen[i], arch, timeout_s)
                    if on_done is not None:
                        on_done(rows[i])
        except queue.Empty:
            pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(min(workers, len(chosen)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [rows[i] for i in range(len(chosen))]


class _Worker:
    """A child process that compiles one job per line; it is restarted when it dies."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (__exit__ closes it)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._log.close()

    def compile(self, module: ModuleType | None, specimen: Specimen, arch: int, timeout_s: float) -> Row:
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        self._log.seek(0)
        self._log.truncate()
        job: dict[str, Any] = {"arch": arch}
        if module is None:
            job["specimen"] = _as_data(specimen)
        else:
            job |= {"module": module.__name__, "name": specimen.name, "config": specimen.config}
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            return Row(specimen, None, self._reason_of_death(process, timeout_s))
        reply = json.loads(answer)
        compiled = CompiledKernel(**reply["compiled"]) if "compiled" in reply else None
        return Row(specimen, compiled, reply.get("error"))

    def _start(self) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        # The worker must import modules from the same paths as this process.
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        return subprocess.Popen(
            [sys.executable, "-m", "lancet_kernels.kernels.compile_pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def _reason_of_death(self, process: subprocess.Popen[str], timeout_s: float) -> str:
        code = process.wait()
        self._process = None
        self._log.seek(0)
        last = self._log.read().strip()[-2000:]
        reason = f"the compiler died (exit code {code}) or took more than {timeout_s:g} s"
        return f"{reason}: {last}" if last else reason


def _as_data(specimen: Specimen) -> dict[str, Any]:
    data = {field.name: getattr(specimen, field.name) for field in dataclasses.fields(specimen)}
    return data | {"kernel": [specimen.kernel.fn.__module__, specimen.kernel.fn.__name__]}


def _specimen_of(job: dict[str, Any]) -> Specimen:
    if "specimen" in job:
        module, name = job["specimen"]["kernel"]
        return Specimen(**job["specimen"] | {"kernel": getattr(import_module(module), name)})
    (specimen,) = (
        specimen
        for _, specimen in all_specimens(job["arch"], [import_module(job["module"])])
        if (specimen.name, specimen.config) == (job["name"], job["config"])
    )
    return specimen


def _serve() -> None:
    """The worker process: reads one job per line from standard input, writes one reply per line."""
    # When the assembler fails, Triton prints whole programs; these go to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        reply: dict[str, object]
        try:
            reply = {"compiled": dataclasses.asdict(compile_specimen(_specimen_of(job), job["arch"]))}
        except UserError as error:
            reply = {"error": str(error)}
        except Exception as error:
            reply = {"error": _innermost(error)}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _innermost(error: BaseException) -> str:
    """The original error, which Triton wraps once for each calling function."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[:4000]


if __name__ == "__main__":
    _serve()
