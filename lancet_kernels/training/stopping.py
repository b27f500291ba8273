"""Ends a training loop behind the step it is in, when its process is told to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Inside the block, Ctrl-C and SIGTERM set `number` (of the signal; 0: none came) and interrupt nothing.
    A second one ends the process as if there were no block.

    Outside the main thread, which alone gets signals, nothing is changed.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.number = number
