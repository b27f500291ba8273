"""The stages of `optimize`: a log record with the time of each, and optionally a progress line."""

from __future__ import annotations

import logging
import sys
import time

import torch.distributed as dist

_log = logging.getLogger(__name__)


class Progress:
    """The stages of a long call, one after the other.

    Each is logged (level INFO) with its seconds when it ends. On the first rank, `shown` also writes to
    standard error: a bar on a terminal, else a line per stage.

    Args: names: in order.
    """

    def __init__(self, names: tuple[str, ...], shown: bool) -> None:
        first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        self._names, self._shown = names, shown and first
        self._current, self._start, self._number = "", 0.0, 0
        self._bar = None
        if self._shown and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=len(names), unit="stage", leave=False, bar_format="{l_bar}{bar}| {elapsed}"
            )

    def begin(self, name: str) -> None:
        """End the stage before, and start this one."""
        self._finish()
        self._current, self._start = name, time.perf_counter()
        self._number += 1
        if self._bar is not None:
            self._bar.set_description(f"{name} ({self._number} of {len(self._names)})")

    def end(self, conclusion: str = "") -> None:
        """After the last stage. Args: conclusion: a line about the result; "": none."""
        self._finish()
        if conclusion:
            self._say(conclusion)
        if self._bar is not None:
            self._bar.close()

    def _finish(self) -> None:
        if not self._current:
            return
        self._say(f"{self._current}: {time.perf_counter() - self._start:.1f} s")
        if self._bar is not None:
            self._bar.update()
        self._current = ""

    def _say(self, line: str) -> None:
        _log.info(line)
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        elif self._shown:
            print(line, file=sys.stderr, flush=True)
