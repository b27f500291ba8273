"""Rendezvous of ranks that make the same request, over the store of their process group.

A collective that a rank does not join, or joins with other arguments, hangs or mixes up the data. Here every
rank writes its request under the number of the meeting, and reads those of the others. A rank that differs or
stays away is named, within a timeout. A meeting costs a few requests to a server: for set-up, not for layers.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from lancet_kernels.errors import CommunicationError, UserError
from lancet_kernels.kernels.symmetric.memory import SymmetricMemory, by_rank, disagreement

FIRST_LOOK_S, LAST_LOOK_S = 1e-4, 5e-3
GAVE_UP = "gave up"
Result = TypeVar("Result")


def machine() -> str:
    """Equal for processes of one machine, also in different containers of it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class Meetings:
    """The meetings of one memory's ranks; `rank` of `world`. group: None means all ranks."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float):
        self.timeout_s = timeout_s
        group = group or dist.group.WORLD
        assert group is not None  # initialized
        self.rank, self.world = group.rank(), group.size()
        self._store = _get_process_group_store(group)
        # Which memory of this group it is: the same number on every rank that makes them in the same order.
        number = self._store.add(f"symmetric/count/{self.rank}", 1)
        self._prefix = f"symmetric/{number}"
        self._number = 0
        self._broken = ""

    def meet(self, step: str, value: Any = "", timeout_s: float | None = None) -> list[Any]:
        """Wait until every rank has come to `step`. -> the values (JSON) that they brought, by rank.

        Raises UserError, on every rank, if another rank is at another step; CommunicationError if one stays
        away. The latter breaks the memory: this and the other ranks' next meeting fails at once.
        """
        if self._broken:
            raise CommunicationError(f"rank {self.rank}: {step} failed: {self._broken}")
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            answers = self._exchange(step, value, timeout_s)
        except CommunicationError:
            raise
        except RuntimeError as error:
            # The store's own errors: the process that keeps it (rank 0's, or the launcher) is gone.
            self._broken = f"no answer from the store of the process group ({_one_line(error)})"
            raise CommunicationError(f"rank {self.rank}: {step} failed: {self._broken}") from error
        if any(theirs != step for theirs, _ in answers):
            raise disagreement({rank: theirs for rank, (theirs, _) in enumerate(answers)})
        return [value for _, value in answers]

    def together(self, step: str, work: Callable[[], Result], do: str) -> Result:
        """Do `work` on every rank. If it raises on one, every rank raises UserError, saying which and why.

        do: what the user can do about it.
        """
        failure, error = "", None
        try:
            result = work()
        except Exception as caught:
            failure, error = _one_line(caught) or type(caught).__name__, caught
        failures = self.meet(step, failure)
        if any(failures):
            raise UserError(
                f"symmetric memory: {step}",
                got=by_rank({rank: text for rank, text in enumerate(failures) if text}),
                expected="success on every rank",
                do=do,
            ) from error
        return result

    def _exchange(self, step: str, value: Any, timeout_s: float) -> list[tuple[str, Any]]:
        self._number += 1
        self._say(self._number, step, value)
        deadline = time.monotonic() + timeout_s
        missing, pause = list(range(self.world)), FIRST_LOOK_S
        while missing := [r for r in missing if not self._store.check([self._key(self._number, r)])]:
            if time.monotonic() >= deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, LAST_LOOK_S)
        if missing:
            waited = f"waiting for rank(s) {', '.join(map(str, missing))}: no answer within {timeout_s:g} s"
            # For those who come late, or came just now: this rank is not in this meeting, nor in the next.
            self._say(self._number, GAVE_UP, waited)
            self._say(self._number + 1, GAVE_UP, waited)
            self._broken = f"an earlier step failed while {waited}"
            raise CommunicationError(
                f"rank {self.rank}: {step} failed while {waited}", missing=missing, timed_out=True
            )
        answers = [tuple(json.loads(self._store.get(self._key(self._number, r)))) for r in range(self.world)]
        # A rank that takes part in this meeting has read the last one.
        self._store.delete_key(self._key(self._number - 1, self.rank))
        for rank, (theirs, waited) in enumerate(answers):
            if theirs == GAVE_UP:
                self._broken = f"rank {rank} gave up {waited}"
                raise CommunicationError(f"rank {self.rank}: {step} failed: {self._broken}")
        return answers

    def _say(self, number: int, step: str, value: Any) -> None:
        self._store.set(self._key(number, self.rank), json.dumps([step, value]))

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"


class MemoryOfRanks(SymmetricMemory):
    """Symmetric memory whose PEs are the ranks of a process group: they agree in meetings."""

    def __init__(self, meetings: Meetings, device: torch.device, reason: str) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(meetings.rank, meetings.world, device, reason)
        self._meetings = meetings

    def barrier(self, timeout_s: float | None = None) -> None:
        super().barrier()
        self._meetings.meet("barrier", timeout_s=timeout_s)

    def _gather(self, request: str, value: Any = "") -> list[Any]:
        return self._meetings.meet(request, value)


def _one_line(error: BaseException) -> str:
    """The message without the C++ frames that torch appends."""
    return " ".join(str(error).split("\nException raised from")[0].split())
