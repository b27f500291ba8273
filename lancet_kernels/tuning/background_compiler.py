"""Compiles the next candidates of the tuner while it times the compiled ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import ExitStack

from lancet_kernels.compiling.compile import SHARED_LIMIT
from lancet_kernels.compiling.compile_pool import CompilePool, Row
from lancet_kernels.compiling.specimen import Specimen
from lancet_kernels.tuning.candidates import Outcome


class BackgroundCompiler:
    """Compiles the specimens of all tasks in the background, in the order of the tasks, each specimen once.

    Args: workers: processes; with 0 nothing is compiled. Nothing is compiled for an architecture with unknown
    limits either: candidates that do not run there are dropped when they are timed.
    """

    def __init__(self, outcomes: Sequence[Outcome], arch: int, workers: int) -> None:
        self._outcomes, self._arch = outcomes, arch
        self._workers = workers if arch in SHARED_LIMIT else 0
        self._rows: dict[int, list[Future[Row]]] = {}
        self._pool = ExitStack()

    def __enter__(self) -> BackgroundCompiler:
        if self._workers:
            pool = self._pool.enter_context(CompilePool(self._arch, self._workers))
            rows: dict[str, Future[Row]] = {}
            for outcome in self._outcomes:
                for candidate in outcome.candidates:
                    specimens = outcome.task.tunable.specimens(outcome.task, candidate.config, self._arch)
                    for specimen in specimens:
                        if _identity(specimen) not in rows:
                            rows[_identity(specimen)] = pool.submit(specimen)
                    self._rows[id(candidate)] = [rows[_identity(specimen)] for specimen in specimens]
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def judge(self, outcome: Outcome, deadline: float, say: Callable[[str], None]) -> bool:
        """Set the reason of candidates that have problems. -> False if the deadline passed before all were
        compiled."""
        for number, candidate in enumerate(outcome.candidates):
            problems: dict[str, None] = {}
            for row in self._rows.get(id(candidate), ()):
                say(f"compiling {number + 1}/{len(outcome.candidates)} of {outcome.key}")
                left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
                try:
                    problems |= dict.fromkeys(row.result(left).problems)
                except TimeoutError:
                    return False
            if problems:
                candidate.reason = "compiler: " + "; ".join(problems)
        return time.monotonic() < deadline


def _identity(specimen: Specimen) -> str:
    """Of launches with other tensors, the same text."""
    return repr((specimen.name, specimen.arguments))
