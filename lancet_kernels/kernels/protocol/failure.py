"""Which wait of a PE ran out of time first? Kernels write it (`device.report_failure`), the host reads it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from lancet_kernels.kernels.protocol.device import REPORT_WORDS

# What was waited for: a report's op.
WAIT_RELEASE = tl.constexpr(0)
WAIT_ROWS = tl.constexpr(1)
WAIT_READY = tl.constexpr(2)
WAIT_RESULTS = tl.constexpr(3)
WAIT_COUNTS = tl.constexpr(4)
# No wait: `peer` would receive `expected` rows, more than its region holds, `seen`.
TOO_MANY_ROWS = tl.constexpr(5)

# REPORTED[op] completes "PE 0 waited for PE 1 ...".
REPORTED = (
    "to release its rows (the backward before this one)",
    "to send its rows (dispatch)",
    "to finish the first GEMM of those rows",
    "to return results (combine)",
    "to send its counts (dispatch)",
)


class Failure(NamedTuple):
    """PE `rank` waited for `peer`; op: one of the constants above; expected, seen: words at a signal."""

    rank: int
    peer: int
    op: int
    signal: int
    expected: int
    seen: int


class FailureReport:
    """The report of one PE.

    Attributes:
        words: int64 [8] on its device, as `device.wait` writes them.
    """

    def __init__(self, where: torch.device) -> None:
        self.words = torch.zeros(REPORT_WORDS.value, dtype=torch.int64, device=where)
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None

    def is_failed(self) -> bool:
        """Has a wait run out of time? Does not wait for the device: what a GPU reports of a launch, a later
        call says."""
        if self.words.device.type != "cuda":
            return bool(self.words[0])
        if torch.cuda.is_current_stream_capturing():
            return False
        if self._copy is None:
            self._copy = torch.zeros_like(self.words, device="cpu").pin_memory(), torch.cuda.Event()
        elif self._copy[1].query() and self._copy[0][0]:
            return True
        copy, event = self._copy
        copy.copy_(self.words, non_blocking=True)
        event.record()
        return False

    def first(self) -> Failure | None:
        """What ran out of time first. Waits for the device."""
        claimed, *words, _ = self.words.tolist()
        return Failure(*words) if claimed else None
