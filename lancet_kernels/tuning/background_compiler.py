"""Compiles the next candidates of the tuner while it times those that are compiled."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence

from lancet_kernels.kernels import compile_pool
from lancet_kernels.kernels.compile import SHARED_LIMIT
from lancet_kernels.kernels.launch_model import Facts
from lancet_kernels.kernels.specimen import Specimen
from lancet_kernels.tuning.candidates import Outcome


class BackgroundCompiler:
    """Compiles the specimens of all tasks in their order, in the background, each specimen once."""

    def __init__(self, outcomes: Sequence[Outcome], arch: int, workers: int) -> None:
        self._arch = arch
        self._specimens = {
            id(candidate): outcome.task.tunable.specimens(outcome.task, candidate.config, arch)
            for outcome in outcomes
            for candidate in outcome.kept
        }
        self._chosen: dict[str, Specimen] = {}
        for specimens in self._specimens.values():
            for specimen in specimens:
                self._chosen.setdefault(_identity(specimen), specimen)
        self._rows: dict[str, compile_pool.Row] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._failure: BaseException | None = None
        # Nothing is compiled for an architecture with unknown limits.
        self._works = workers > 0 and arch in SHARED_LIMIT
        self._workers = workers
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> BackgroundCompiler:
        if self._works:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True

    def _work(self) -> None:
        chosen = [(None, specimen) for specimen in self._chosen.values()]
        try:
            compile_pool.compile_all(chosen, self._arch, workers=self._workers, on_done=self._done)
        except _Stop:
            pass
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _done(self, row: compile_pool.Row) -> None:
        with self._changed:
            self._rows[_identity(row.specimen)] = row
            self._changed.notify_all()
        if self._stopped:
            raise _Stop

    def judge(self, outcome: Outcome, deadline: float, say: Callable[[str], None]) -> bool:
        """Add compile results, or the reason for pruning, to the candidates. -> False if time ran out."""
        if not self._works:
            return time.monotonic() < deadline
        kept = outcome.kept
        for number, candidate in enumerate(kept):
            say(f"compiling {number + 1}/{len(kept)} of {outcome.key}")
            rows = [self._row(specimen, deadline) for specimen in self._specimens[id(candidate)]]
            if None in rows:
                return False
            compiled = [row for row in rows if row is not None]
            problems = [problem for row in compiled for problem in row.problems]
            if problems:
                candidate.reason = "compiler: " + "; ".join(dict.fromkeys(problems))
            else:
                kernels = [row.compiled for row in compiled if row.compiled is not None]
                candidate.facts = Facts(
                    max(kernel.registers for kernel in kernels),
                    max(kernel.shared_bytes for kernel in kernels),
                )
        return True

    def _row(self, specimen: Specimen, deadline: float) -> compile_pool.Row | None:
        key = _identity(specimen)
        with self._changed:
            while key not in self._rows:
                if self._failure is not None:
                    raise self._failure
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                # Not for ever: Ctrl-C must get through.
                self._changed.wait(min(left, 1.0))
            return self._rows[key]


class _Stop(Exception):
    """The remaining results are not needed."""


def _identity(specimen: Specimen) -> str:
    what = (
        specimen.name, specimen.signature, specimen.constexprs, specimen.aligned, specimen.num_warps,
        specimen.num_stages, specimen.nvshmem, specimen.options,
    )  # fmt: skip
    return json.dumps(what, sort_keys=True)
