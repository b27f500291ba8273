"""Waits of ranks for one another: the error of a failed collective names ranks and collective in one line.

    with waiting("all_to_all", group, layer="blocks.3.feed_forward"):
        dist.all_to_all_single(...)

A rank that waits for several others learns only that one of them is missing. So under our launcher the ranks
of a job share a `Board`: a few bytes per rank with the collective that it entered last, and its latest
heartbeat. A rank whose wait timed out reads there which rank is missing. Entering a collective costs one
write of about a microsecond; without a board (torchrun, no launcher) the line names op, layer and peers.
"""

from __future__ import annotations

import mmap
import operator
import os
import re
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from lancet_kernels.errors import CommunicationError
from lancet_kernels.ops.base import now

BOARD_FILE = "LANCET_BOARD"
"""Environment variable with the path of the job's board."""
# How gloo and NCCL, which raise plain RuntimeErrors, say that a peer went away or did not answer.
LOST_PEER = re.compile(
    r"gloo|NCCL|pair closure|socket (unexpectedly )?closed|connect timeout|broken pipe|"
    r"connection (was )?(closed|reset|refused|aborted)",
    re.IGNORECASE,
)
TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_SOURCE_PLACE = re.compile(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*")
# A rank without a heartbeat for longer than this, and for half of the wait, is not running.
SILENT_S = 2.0


class Waitable(Protocol):
    """A started collective: torch's Work, or several as one."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class Entry:
    """The board's entry of one rank; times on the monotonic clock of the machine, in seconds."""

    last_sign: float
    """0: the rank has not started yet."""
    entered_at: float
    number: int
    """The number of collectives that it has entered."""
    where: str


class Board:
    """The entries of a job's ranks: a file that they all map. Ranks of one machine only.

    A rank writes its entries to two slots in turn, each number last: of one that is stopped while it writes,
    the entry before that is still whole.
    """

    _SIGN, _ENTRY = struct.Struct("=d"), struct.Struct("=232sdq")
    _ROW = _SIGN.size + 2 * _ENTRY.size

    def __init__(self, path: str | os.PathLike[str], rank: int) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self.rank, self.ranks = rank, len(self._memory) // self._ROW
        self._number = 0

    @classmethod
    def create(cls, path: str | os.PathLike[str], ranks: int) -> None:
        """Make the file of an empty board."""
        with open(path, "wb") as file:
            file.truncate(ranks * cls._ROW)

    def sign(self) -> None:
        """Send a heartbeat."""
        self._SIGN.pack_into(self._memory, self.rank * self._ROW, time.monotonic())

    def enter(self, where: bytes) -> None:
        """This rank enters a collective."""
        self._number += 1
        place = self._places(self.rank)[self._number % 2]
        self._ENTRY.pack_into(self._memory, place, where, time.monotonic(), self._number)

    def entry(self, rank: int) -> Entry:
        """The latest entry of a rank."""
        (last_sign,) = self._SIGN.unpack_from(self._memory, rank * self._ROW)
        entries = [self._ENTRY.unpack_from(self._memory, place) for place in self._places(rank)]
        where, entered_at, number = max(entries, key=operator.itemgetter(2))
        return Entry(last_sign, entered_at, number, where.rstrip(b"\0").decode(errors="replace"))

    def _places(self, rank: int) -> tuple[int, int]:
        first = rank * self._ROW + self._SIGN.size
        return first, first + self._ENTRY.size


_board: Board | None = None
_inside: list[str] = []
"""The contexts `waiting` of this process, the innermost last."""


def join_board() -> Board | None:
    """The board of this job, on which collectives are noted from here on; None: there is none."""
    global _board
    path = os.environ.get(BOARD_FILE)
    if path and os.path.exists(path):
        _board = Board(path, int(os.environ["RANK"]))
    return _board


def enter_layer(name: str) -> None:
    """The collectives of MoE layers that are entered next belong to the layer of this name."""
    now.layer = name


def current_layer() -> str:
    """The latest name given to `enter_layer`; "": none, or the layer has no name."""
    return now.layer


def where_waiting() -> str:
    """The collective and layer whose context this is; "": outside of `waiting`."""
    return _inside[-1] if _inside else ""


class waiting:
    """Context of a collective of `group` (None: of all ranks), or of an exchange with `peers`, places in it.

    A failure raises CommunicationError with rank, op, layer, the peers that it waited for, and for how long.
    Errors that are not about peers are not changed.
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup | None = None,
        layer: str = "",
        peers: Sequence[int] | None = None,
    ) -> None:
        self.where, self.group, self.peers = f"{op} of {layer}" if layer else op, group, peers
        self.began = 0.0

    def __enter__(self) -> None:
        self.began = time.monotonic()
        _inside.append(self.where)
        if _board is not None:
            _board.enter(self.where.encode())

    def __exit__(self, kind, error, trace) -> None:
        _inside.pop()
        if error is not None and blames(error) != "self" and not getattr(error, "described", False):
            raise self._described(error) from error

    def _described(self, error: BaseException) -> CommunicationError:
        waited = time.monotonic() - self.began
        rank, peers = _rank_and_peers(self.group)
        if self.peers is not None:
            ranks = dist.get_process_group_ranks(self.group)
            peers = [ranks[place] for place in self.peers if ranks[place] != rank]
        reason = _SOURCE_PLACE.sub("", str(error).splitlines()[0] if str(error) else type(error).__name__)
        if blames(error) == "peer":
            return CommunicationError(
                f"rank {rank} lost its connection to one of rank(s) {_listed(peers)} "
                f"in {self.where}: {reason}",
                described=True,
            )
        all_ranks = sorted([rank, *peers])
        named = [all_ranks[peer] for peer in getattr(error, "missing", ())]
        missing, signs = _missing(rank, peers, waited)
        missing = missing or named or (peers if len(peers) == 1 else [])
        # What the kernels know, beyond who waited for whom.
        detail = f" [{reason}]" if isinstance(error, CommunicationError) else ""
        return CommunicationError(
            f"rank {rank} waited {waited:.1f} s in {self.where} for rank(s) {_listed(missing or peers)}"
            + "".join(f"; {signs[peer]}" for peer in missing if peer in signs)
            + detail,
            missing=missing,
            timed_out=True,
            described=True,
        )


def _rank_and_peers(group: dist.ProcessGroup | None) -> tuple[int, list[int]]:
    """This rank and the other ones of the group, as numbers of the whole job."""
    if not (dist.is_available() and dist.is_initialized()):
        # Before the first process group: all that a launcher has started.
        rank, ranks = (int(os.environ.get(name, alone)) for name, alone in (("RANK", 0), ("WORLD_SIZE", 1)))
        return rank, [peer for peer in range(ranks) if peer != rank]
    rank = dist.get_rank()
    return rank, [peer for peer in dist.get_process_group_ranks(group) if peer != rank]


def _missing(rank: int, peers: list[int], waited: float) -> tuple[list[int], dict[int, str]]:
    """The peers that are missing according to the board, and what it says about each peer.

    These are the peers without a heartbeat; if all have one, those that entered fewer collectives than this
    rank.
    """
    if _board is None or _board.ranks <= max([rank, *peers]):
        return [], {}
    now, own = time.monotonic(), _board.entry(rank)
    entries = {peer: _board.entry(peer) for peer in peers}
    silent = [p for p, entry in entries.items() if now - entry.last_sign > max(SILENT_S, waited / 2)]
    behind = [p for p, entry in entries.items() if entry.number < own.number]
    signs = {}
    for peer, entry in entries.items():
        if not entry.last_sign:
            signs[peer] = f"rank {peer} has not started yet"
            continue
        entered = f"last entered {entry.where} {now - entry.entered_at:.1f} s ago"
        signs[peer] = f"rank {peer} {entered if entry.number else 'has entered no collective yet'}"
        quiet = f"has shown no sign of life for {now - entry.last_sign:.1f} s"
        signs[peer] += f" and {quiet if peer in silent else 'still runs'}"
    return silent or behind, signs


def blames(error: BaseException | None) -> str:
    """The root cause of an error: a "peer" that went away, a "timeout", else "self"."""
    while error is not None:
        if isinstance(error, CommunicationError):
            return "timeout" if error.timed_out else "peer"
        if "EADDRINUSE" in str(error):  # the port at which the ranks are to meet
            return "self"
        lost = isinstance(error, (dist.DistError, ConnectionError, TimeoutError))
        if lost or (isinstance(error, RuntimeError) and LOST_PEER.search(str(error))):
            return "timeout" if isinstance(error, TimeoutError) or TIMED_OUT.search(str(error)) else "peer"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "self"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
