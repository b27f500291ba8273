"""When would a slower wire have carried this? Puts paced to a given GB/s on the device clock: emulated.

For measurements of overlap where the wire is out of reach: virtual PEs on one GPU reach each other at the
speed of its memory. A put is posted, as over NVLink or a network card: rows are stored at once and the
program that put them goes on. The wire decides only when they count as arrived. The program that puts books
the wire and writes the time at which the last byte would have come, `due`, beside the signal; a program
that waits for the signal waits for that time, too (`device.wait`). So neither sender nor wire ever idles
for the other's sake.

The wire: every PE has one way out, `gb_per_s` wide, that carries what is booked in that order, each as soon
as it is free; all ways out carry at once (full duplex). What a PE sends itself does not take it. Latency,
signals and releases cost nothing. What comes in from several PEs at once is not limited.

    due = max(time of booking, time at which the wire is free) + bytes / rate

Example, 40 GB/s, wire free: 1 MiB booked at 5,000 ns is due at 31,214 ns; another booked at 6,000 ns at
57,429 ns; a third booked at 100,000 ns at 126,214 ns.

All PEs must look at one clock: virtual PEs of one GPU at its nanosecond timer, processes in the interpreter
at a word that goes on by `TICK_NS` with every look.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import runtime
from lancet_kernels.symmetric import SharedMemory, SymmetricMemory, VirtualMemory

INTERPRETED = tl.constexpr(runtime.INTERPRETED)
TICK_NS = tl.constexpr(100)

# wire.words: where the clock is, when the way out is free, what a byte costs, and who gets rows for nothing.
CLOCK = tl.constexpr(0)
FREE_NS = tl.constexpr(1)
FS_PER_BYTE = tl.constexpr(2)
NEAR_PE = tl.constexpr(3)
WORDS = 4
FS_PER_NS = tl.constexpr(1_000_000)


class Wire:
    """The emulated way out of one PE. Collective: every PE makes one. Until `pace` it takes no time.

    Args:
        memory: symmetric memory whose PEs share a clock. name: unique in it.
        loopback: what a PE sends itself takes the wire, too: for tests with one PE.

    Attributes:
        words: int64 [4] on the device, as above; may be changed between launches and replays of CUDA graphs.
        gb_per_s: the rate; infinity: not paced.
    """

    def __init__(self, memory: SymmetricMemory, name: str = "wire", *, loopback: bool = False) -> None:
        if not isinstance(memory, VirtualMemory | SharedMemory):
            raise UserError(
                "emulated wire",
                got=type(memory).__name__,
                expected="virtual PEs of one device, or processes in the interpreter, which share a clock",
                do="leave the wire out: between GPUs there is a real one",
            )
        self._clock = memory.signals(f"{name}.clock", 1)
        self.words = torch.zeros(WORDS, dtype=torch.int64, device=memory.device)
        self.words[CLOCK.value : CLOCK.value + 1].copy_(self._clock.peers[:1])
        self.words[NEAR_PE.value] = -1 if loopback else memory.rank
        self.gb_per_s = math.inf

    def pace(self, gb_per_s: float) -> None:
        """From the next launch on carry `gb_per_s` (1e9 bytes a second); infinity: everything at once.

        Raises UserError if that is no positive number.
        """
        if not gb_per_s > 0:
            raise UserError(
                "rate of an emulated wire", got=gb_per_s, expected="GB/s > 0", do="give infinity for no pace"
            )
        self.gb_per_s = gb_per_s
        self.words[FS_PER_BYTE.value] = fs_per_byte(gb_per_s)

    def now(self) -> Tensor:
        """int64 [1] on the device: the latest time at which anyone looked at the clock, in ns."""
        return self._clock.local


def fs_per_byte(gb_per_s: float) -> int:
    """Femtoseconds for a byte. Example: 40 GB/s -> 25,000; infinity -> 0."""
    return 0 if math.isinf(gb_per_s) else max(1, round(1e6 / gb_per_s))


@triton.jit
def now_ns(wire_ptr):
    """The time, the same for all threads of the program; never before a time that any program has seen.

    Threads that read the timer for themselves would part ways before a barrier. So one thread moves a word on
    to the time that it reads, and all are handed that word.
    """
    clock_ptr = tl.load(wire_ptr + CLOCK).to(wire_ptr.dtype)
    if INTERPRETED:
        now = tl.atomic_add(clock_ptr, TICK_NS, sem="relaxed", scope="sys") + TICK_NS
    else:
        tl.atomic_max(clock_ptr, tl.extra.cuda.globaltimer(), sem="relaxed", scope="gpu")
        now = tl.atomic_add(clock_ptr, 0, sem="relaxed", scope="gpu")
    return now


@triton.jit
def book(wire_ptr, peer, num_bytes):
    """Book the way out for `num_bytes` (int64) to `peer`. -> due, in ns; 0: there at once."""
    due = tl.full((), 0, tl.int64)
    fs = tl.load(wire_ptr + FS_PER_BYTE)
    if (fs > 0) & (peer != tl.load(wire_ptr + NEAR_PE)):
        # Free from now on, or later; what others book in between only moves both of them on.
        tl.atomic_max(wire_ptr + FREE_NS, now_ns(wire_ptr), sem="relaxed", scope="gpu")
        duration = num_bytes * fs // FS_PER_NS
        due = tl.atomic_add(wire_ptr + FREE_NS, duration, sem="relaxed", scope="gpu") + duration
    return due


@triton.jit
def put_due(dues_ptr, peers_ptr, peer, index, due):
    """Tell the peer when what it will be signalled next is due. Call it before that signal.

    Of what several programs say about one signal the latest counts. Words are never reset: what an earlier
    epoch left is past, since time only goes on.
    """
    if due > 0:
        p_due = tl.load(peers_ptr + peer).to(dues_ptr.dtype) + index
        tl.atomic_max(p_due, due, sem="relaxed", scope="sys")


@triton.jit
def travels(due_ptr, wire_ptr):
    """Is what was signalled still on the wire? Only after the signal was seen."""
    due = tl.load(due_ptr, volatile=True)
    on_the_way = due > 0
    if on_the_way:
        on_the_way = due > now_ns(wire_ptr)
    return on_the_way
