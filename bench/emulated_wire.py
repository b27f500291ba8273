"""A slower wire between virtual PEs, emulated: what is put is there at once, but said to be there later.

For measurements of overlap where the wire is out of reach: virtual PEs on one GPU reach each other at the
speed of its memory. Rows are stored straight at the peer. Their signals take a detour: in the table that a
sender has of its peers' signals, those of the others are addresses of an *outbox* of its own, and a program
beside the sender, the *relay*, looks for new words there and hands each on when a wire would have carried
the rows that it announces. The kernels know nothing of it.

The wire: every PE has one way out, `gb_per_s` wide, that carries messages in the order in which they are
signalled, each as soon as it is free; all ways out carry at once (full duplex). What a PE sends itself takes
none of it. Latency, counts and releases cost nothing. What comes in from several PEs at once is not limited.

    due = max(time of the signal, time at which the wire is free) + bytes / rate

Example, 40 GB/s, wire free: 1 MiB signalled at 5,000 ns is due at 31,214 ns; another signalled at 6,000 ns at
57,429 ns; a third signalled at 100,000 ns at 126,214 ns.

A relay is one program that must be resident while launches wait for what it hands on: leave it room
(`FusedLayer(spare_programs=1)`). Its clock is the GPU's nanosecond timer; in the interpreter, which runs one
launch after the other, a word that goes on by `TICK_NS` with every look.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import device, runtime
from lancet_kernels.kernels.exchange import Exchange
from lancet_kernels.symmetric.memory import Region

INTERPRETED = tl.constexpr(runtime.INTERPRETED)
TICK_NS = tl.constexpr(100)
# wire.words: the latest time that was read, and what a byte costs.
CLOCK = tl.constexpr(0)
FS_PER_BYTE = tl.constexpr(1)
FS_PER_NS = tl.constexpr(1_000_000)
TIMEOUT_S = 10.0


@triton.jit
def now_ns(wire_ptr):
    """The time, the same for all threads of the program, which would part ways before a barrier otherwise."""
    if INTERPRETED:
        now = tl.atomic_add(wire_ptr + CLOCK, TICK_NS, sem="relaxed", scope="gpu") + TICK_NS
    else:
        tl.atomic_max(wire_ptr + CLOCK, tl.extra.cuda.globaltimer(), sem="relaxed", scope="gpu")
        now = tl.atomic_add(wire_ptr + CLOCK, 0, sem="relaxed", scope="gpu")
    return now


@triton.jit(do_not_specialize=["banks", "num", "max_polls"])
def relay_kernel(
    epoch_ptr, source_ptr, target_ptr, bytes_ptr, wire_ptr, banks, num, max_polls, SIZE: tl.constexpr
):  # fmt: skip
    """Hand on `num` signal words of an epoch, each when its bytes have come over the wire.

    Grid: (1,). source, target int64 [banks, num], addresses of words; bytes int64 [num]. Source 0: there is
    nothing to wait for. Ends when all are handed on, or after max_polls looks at them.
    Example: 1e9 bytes a second, two messages of 100 bytes, signalled at 1000 and 1010 ns: handed on at 1100
    and 1200 ns.
    """
    epoch = tl.load(epoch_ptr)
    word = device.word(epoch, tl.full((), 0, tl.int64))
    i = tl.arange(0, SIZE)
    m_open = i < num
    p = (epoch % banks) * num + i
    source = tl.load(source_ptr + p, mask=m_open, other=0)
    target = tl.load(target_ptr + p, mask=m_open, other=0).to(epoch_ptr.dtype)
    duration = tl.load(bytes_ptr + i, mask=m_open, other=0) * tl.load(wire_ptr + FS_PER_BYTE) // FS_PER_NS
    nothing = tl.zeros([SIZE], tl.int64)
    due = nothing
    free = tl.full((), 0, tl.int64)
    left = tl.sum(m_open.to(tl.int32), 0)
    polls = tl.full((), 0, tl.int64)
    while (left > 0) & (polls < max_polls):
        now = now_ns(wire_ptr)
        m_waits = m_open & (due == 0) & (source != 0)
        seen = tl.atomic_add(
            source.to(epoch_ptr.dtype), nothing, mask=m_waits, sem="acquire", scope="sys"
        )  # fmt: skip
        m_begins = m_open & (due == 0) & ((source == 0) | (seen >= word))
        b_taken = tl.where(m_begins, duration, 0)
        free = tl.maximum(free, now)
        due = tl.where(m_begins, free + tl.cumsum(b_taken, 0), due)
        free += tl.sum(b_taken, 0)
        # What one thread has acquired, another one may hand on.
        tl.debug_barrier()
        m_due = m_open & (due > 0) & (due <= now)
        tl.atomic_xchg(target, nothing + word, mask=m_due, sem="release", scope="sys")
        m_open = m_open & (m_due == 0)
        left = tl.sum(m_open.to(tl.int32), 0)
        polls += 1


@dataclass(frozen=True)
class Messages:
    """Signals that a PE sends in one pass, by bank: from where, to where, and the bytes that they announce.

    Attributes:
        source, target: int64 [banks, M], addresses of words. num_bytes: int64 [M].
    """

    source: Tensor
    target: Tensor
    num_bytes: Tensor

    def __add__(self, other: Messages) -> Messages:
        return Messages(
            torch.cat((self.source, other.source), 1),
            torch.cat((self.target, other.target), 1),
            torch.cat((self.num_bytes, other.num_bytes)),
        )


class Wire:
    """The way out of one PE, with a stream of its own. Until `pace` it takes no time.

    Attributes:
        words: int64 [2] on the device, as above; the rate may change between launches and graph replays.
        gb_per_s: the rate; infinity: not paced.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self.words = torch.zeros(2, dtype=torch.int64, device=device)
        self.gb_per_s = math.inf
        self._stream = _stream(device, rank) if device.type == "cuda" else None

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

    def carry(self, messages: Messages, epoch: Tensor) -> None:
        """Carry messages of the epoch (int64 [1]) from what the current stream has been given on."""
        banks, num = messages.source.shape
        if num == 0:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.words.device))
        with torch.cuda.stream(self._stream):
            relay_kernel[(1,)](
                epoch, messages.source, messages.target, messages.num_bytes, self.words, banks, num,
                runtime.max_polls(TIMEOUT_S), SIZE=max(256, triton.next_power_of_2(num)), num_warps=8,
            )  # fmt: skip

    def join(self) -> None:
        """What comes on the current stream waits until everything was carried."""
        if self._stream is not None:
            torch.cuda.current_stream(self.words.device).wait_stream(self._stream)


@functools.cache
def _stream(device: torch.device, rank: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def fs_per_byte(gb_per_s: float) -> int:
    """Femtoseconds for a byte. Example: 40 GB/s -> 25,000; infinity -> 0."""
    return 0 if math.isinf(gb_per_s) else max(1, round(1e6 / gb_per_s))


class Detour:
    """The signals that one PE sends through an exchange, by way of its outbox.

    Args: count: rows of every PE for every expert, [W][E], in all passes. loopback: what a PE sends itself
        takes the wire, too: for runs with one PE.

    Attributes:
        there, back, both: messages of rows, of results on their way back, and all of them.
    """

    def __init__(self, exchange: Exchange, count: Sequence[Sequence[int]], *, loopback: bool = False) -> None:
        self._exchange = exchange
        rank, world = exchange.rank, exchange.world
        near = -1 if loopback else rank
        row_bytes = exchange.width * exchange.dtype.itemsize
        rows, results = chunks_of(count, rank, exchange.local_experts, exchange.chunk_rows)
        self._outboxes, self._regions, messages = [], {}, []
        for name, sent in (("arrived", rows), ("returned", results)):
            region: Region = getattr(exchange, name)
            outbox = torch.zeros((world, *region.local.shape), dtype=torch.int64, device=region.local.device)
            peers = region.peers.tolist()
            addresses = [peers[p] if p == near else outbox[p].data_ptr() for p in range(world)]
            self._outboxes.append(outbox)
            self._regions[name] = Region(name, region.local, torch.tensor(addresses).to(region.peers))
            far = [(peer, index, num_rows) for peer, index, num_rows in sent if peer != near]
            offset = torch.tensor([8 * index for _, index, _ in far], dtype=torch.int64)
            offset = offset + 8 * region.local[0].numel() * torch.arange(exchange.banks)[:, None]
            to = torch.tensor([peer for peer, *_ in far], dtype=torch.int64)
            num_bytes = torch.tensor([row_bytes * num_rows for *_, num_rows in far], dtype=torch.int64)
            source, target = (torch.tensor(bases)[to] + offset for bases in (addresses, peers))
            messages.append(Messages(*(t.to(region.peers) for t in (source, target, num_bytes))))
        self.there, self.back = messages
        self.both = self.there + self.back

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, what is launched puts its signals into the outbox."""
        direct = {name: getattr(self._exchange, name) for name in self._regions}
        try:
            for name, region in self._regions.items():
                setattr(self._exchange, name, region)
            yield
        finally:
            for name, region in direct.items():
                setattr(self._exchange, name, region)

    def launch(self, launch, wire: Wire) -> None:
        """Do a held-back launch with all its stages (`held_back.HeldLaunch`), its signals over the wire."""
        epoch = self._exchange._epoch
        with self.taken():
            if runtime.INTERPRETED:
                # One launch after the other: nothing may wait for what is carried later.
                launch("put")
                wire.carry(self.there, epoch)
                launch("in out wgrad dense")
                wire.carry(self.back, epoch)
                launch("reduce")
            else:
                wire.carry(self.both, epoch)
                launch("put in out wgrad dense reduce")
        wire.join()


def chunks_of(
    count: Sequence[Sequence[int]], rank: int, local_experts: int, block_m: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """What PE `rank` signals in one pass: (peer, word of a bank, rows), of `arrived` and of `returned`.

    `schedule.py` says what a chunk is, and has the example: there, with rank 1, the rows for expert 0 are
    (0, 1, 2) and (0, 3, 1) of `arrived`: two rows in tile 0, one in tile 1.
    """
    world = len(count)
    there, back = [], []
    first_send = [0] * world
    first_tile = 0
    for e in range(world * local_experts):
        peer = e // local_experts
        if e % local_experts == 0:
            first_tile = 0
        before = 0
        for w in range(world):
            rows = count[w][e]
            for m in range(before // block_m, -(-(before + rows) // block_m) if rows else 0):
                inside = min(before + rows, (m + 1) * block_m) - max(before, m * block_m)
                if w == rank:
                    there.append((peer, (first_tile + m) * world + rank, inside))
                if peer == rank:
                    chunk = first_send[w] // block_m + 2 * e + m - before // block_m
                    back.append((w, chunk, inside))
            before += rows
            first_send[w] += rows
        first_tile += -(-before // block_m)
    return there, back
