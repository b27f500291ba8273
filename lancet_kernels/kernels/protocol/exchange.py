"""Where do rows land on a peer, and when may they be overwritten? Regions, signals and credits of one layer.

    W  PEs, L experts on each, E = W * L    D  width    B  banks
    S  most rows that a PE sends            R  most rows that a PE receives

Rows lie compact (`schedule.py`). Every PE has, in symmetric memory,

    rows     [B, R, D]            rows received, by local expert, then source, then slot
    arrived  [B, tiles, W]        word(epoch, 0): what source w sends into that tile of rows is here
    row_weights [B, R]            in a backward: what each of these rows counts in its token's sum, float32
    results  [S, D]               what the experts made of the rows that this PE sent, in the order of sending
    dots     [S]                  in a backward: gradients of the weights of these rows, float32
    returned [B, chunks]          word(epoch, 0): the results of that chunk are here
    counts   [B, W, E]            rows of PE w for every expert; counted [B, W]: word(epoch, 0): they are here
    released [B, W]               word(epoch, 0): PE w needs its rows of that epoch no more
    stages   [S, D], [S], [R, D], [R]    only where NVSHMEM carries rows: those sent with their weights, and
                                  results with their dots, on their way out

A use of the exchange (a forward pass with its backward, or one of the two alone) has an epoch, 1, 2, 3, ...,
and takes bank `epoch % B`. Signals only grow and nothing is zeroed in flight. Before a PE puts counts or rows
of epoch e it waits until the peer has released epoch e - B of that bank. Results need neither banks nor a
credit of their own: a PE returns results of epoch e only after it saw the source's rows of epoch e, and the
source sends those in a launch behind the one that read its last results. That holds for passes through any
exchange, so all layers have one region of results (`ResultBuffers`).

The epoch lives in device memory, so a captured CUDA graph counts on in every replay; the host only checks
that no more than B uses are open, since another one would wait for a release that comes after it.

Nothing here depends on how many tokens there are, as long as they send at most S rows and the experts of
each PE receive at most R.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.kernel_launch import launch, small_kernel
from lancet_kernels.kernels.protocol import device
from lancet_kernels.kernels.protocol.arguments import Arrivals, PassState, Returns
from lancet_kernels.kernels.protocol.failure import (
    TOO_MANY_ROWS,
    WAIT_READY,
    FailureReport,
    timed_out,
)
from lancet_kernels.kernels.protocol.schedule import (
    TILES_AT_ONCE,
    exchange_counts_kernel,
    most_chunks,
    most_tiles,
    schedule_kernel,
    table_words,
)
from lancet_kernels.symmetric.memory import Region, SymmetricMemory

# use.words: the epoch, then counters of claims.
EPOCH, USE_WORDS = 0, 8


@dataclass
class Use:
    """One pass through the exchange: its epoch, counters and table, in fresh device memory.

    Attributes:
        bank: epoch % B, as the host counts.
        words: int64 [8], the epoch, then counters of claims.
        ready: int64 [tiles], finished column tiles of the first GEMM by tile.
        done: int64 [tiles], finished column tiles of the second GEMM by tile.
        table: int32, where rows lie and which task has which number (`schedule.py`); a backward's use has
            that of its forward.
    """

    bank: int
    words: Tensor
    ready: Tensor
    done: Tensor
    table: Tensor
    open: bool = True


class ResultBuffers:
    """What an exchange needs only while a launch runs: results, dots, stages. Collective to make.

    Exchanges of the same sizes share them, if every PE launches their passes one behind the other: in one
    stream, or in streams that wait for each other.

    Attributes:
        spoiled: int64 [1] on the device: not 0 once a wait in a pass through any of these exchanges failed.
            What that pass waited for may still come, among results of a later one: all are NaN from then on.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        name: str,
        *,
        send_rows: int,
        receive_rows: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        def region(what: str, *shape: int, of: torch.dtype = torch.float32) -> Region:
            return memory.allocate(f"{name}.{what}", shape, of)

        self.results, self.dots = region("results", send_rows, width, of=dtype), region("dots", send_rows)
        self.spoiled = torch.zeros(1, dtype=torch.int64, device=memory.device)
        self.stage: Stage | None = None
        if memory.far:
            self.stage = Stage(
                region("stage of rows", send_rows, width, of=dtype),
                region("stage of weights", send_rows),
                region("stage of results", receive_rows, width, of=dtype),
                region("stage of dots", receive_rows),
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all regions, on this PE."""
        return sum(region.local.nbytes for region in (self.results, self.dots, *(self.stage or ())))


class Stage(NamedTuple):
    """Symmetric memory from which NVSHMEM sends."""

    rows: Region
    weights: Region
    results: Region
    dots: Region


class Exchange:
    """The regions above on every PE. Collective: every PE makes the same one in the same order.

    Args:
        memory: symmetric memory. name: unique in it.
        local_experts, send_rows, receive_rows, width, dtype: L, S, R, D and the type of a row.
        chunk_rows: rows of a tile of the GEMMs, and at most of what one signal is for.
        banks: B, how many uses may be open at once, plus none: forward passes before their backward.
        buffers: of the same sizes, shared with other exchanges; None: its own.
        timeout_s: how long a wait may last.

    Attributes:
        begun: how many uses have been opened.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        name: str,
        *,
        local_experts: int,
        send_rows: int,
        receive_rows: int,
        width: int,
        dtype: torch.dtype,
        chunk_rows: int,
        banks: int = 2,
        buffers: ResultBuffers | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if banks < 1:
            raise UserError("banks", got=banks, expected="at least 1", do="one for each pass open at once")
        self.memory, self.name, self.banks, self.timeout_s = memory, name, banks, timeout_s
        self.world, self.rank = memory.world, memory.rank
        self.local_experts, self.width, self.dtype = local_experts, width, dtype
        self.send_rows, self.receive_rows, self.chunk_rows = send_rows, receive_rows, chunk_rows
        experts = self.world * local_experts
        self.tiles = most_tiles(receive_rows, local_experts, chunk_rows)
        self.chunks = most_chunks(send_rows, experts, chunk_rows)
        self.rows = self._region("rows", (banks, receive_rows, width), dtype)
        self.row_weights = self._region("weights of rows", (banks, receive_rows), torch.float32)
        self.buffers = buffers or ResultBuffers(
            memory, name, send_rows=send_rows, receive_rows=receive_rows, width=width, dtype=dtype
        )
        self.results = self.buffers.results
        self.arrived = self._region("arrived", (banks, self.tiles, self.world))
        self.returned = self._region("returned", (banks, self.chunks))
        self.counts = self._region("counts", (banks, self.world, experts), torch.int32)
        self.counted = self._region("counted", (banks, self.world))
        self.released = self._region("released", (banks, self.world))
        self._epoch = torch.zeros(1, dtype=torch.int64, device=memory.device)
        self.arrivals = Arrivals(
            self.rows.local, self.rows.peers, self.row_weights.local, self.row_weights.peers,
            self.arrived.local, self.arrived.peers, self.released.local,
        )  # fmt: skip
        self.returns = Returns(
            self.results.local, self.results.peers, self.buffers.dots.local, self.buffers.dots.peers,
            self.returned.local, self.returned.peers, self.buffers.spoiled,
        )  # fmt: skip
        self._failures = FailureReport(memory.device)
        self.report = self._failures.words
        # On every PE or on none: also who is only sent rows over the network must take them in.
        self.nvshmem = memory.far
        self.begun = 0
        # By bank: who uses it, and the epoch to release should its user have been dropped without a backward.
        self._open: dict[int, tuple[weakref.ref[Use], Tensor]] = {}

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        rows = [self.banks, self.receive_rows, self.width]
        return (
            f"Exchange({self.name}, PE {self.rank} of {self.world}, symmetric memory: {self.memory.kind}, "
            f"{dtype} rows {rows}, sends {self.send_rows})"
        )

    def _region(self, what: str, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Region:
        return self.memory.allocate(f"{self.name}.{what}", shape, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of its own regions, on this PE."""
        own = (
            self.rows,
            self.row_weights,
            self.arrived,
            self.returned,
            self.counts,
            self.counted,
            self.released,
        )
        return sum(region.local.nbytes for region in own)

    @property
    def has_free_bank(self) -> bool:
        """Is the bank of the next use free, or was its user dropped?"""
        holder = self._open.get((self.begun + 1) % self.banks)
        return holder is None or holder[0]() is None

    def begin(self, table: Tensor | None = None) -> Use:
        """Open the next use. Raises UserError if its bank is still taken by a use that was not released.

        table: of the forward that this is the backward of; None: a new one, to be filled by `schedule`.
        """
        self.begun += 1
        bank = self.begun % self.banks
        if bank in self._open:
            holder, words = self._open[bank]
            if holder() is not None:
                self.begun -= 1
                raise UserError(
                    f"forward passes through {self.name} before a backward",
                    got=f"one more while pass {self.begun + 1 - self.banks} still waits for its backward",
                    expected=f"at most {self.banks} open at once (its banks)",
                    do="run that backward first, use torch.no_grad(), or make more banks",
                )
            self._send_release(words)
        self._epoch += 1
        words = torch.zeros(USE_WORDS, dtype=torch.int64, device=self.memory.device)
        words[EPOCH : EPOCH + 1].copy_(self._epoch)
        # `done` begins at a multiple of 16 bytes, whatever the sizes: kernels are compiled for alignments.
        first_done = -(-self.tiles // 2) * 2
        counters = words.new_zeros(first_done + self.tiles)
        ready, done = counters[: self.tiles], counters[first_done:]
        if table is None:
            experts = self.world * self.local_experts
            size = table_words(self.world, experts, self.tiles, self.chunks)
            table = torch.zeros(size, dtype=torch.int32, device=self.memory.device)
        use = Use(bank, words, ready, done, table)
        self._open[bank] = weakref.ref(use), words
        return use

    def schedule(self, use: Use, count: Tensor) -> None:
        """Exchange counts with all PEs and fill the table of the use. count: int64 [E], rows for each expert.

        Launched before the passes' own kernel. It waits for the counts of every PE.
        """
        experts = self.world * self.local_experts
        blocks = {"BE": triton.next_power_of_2(experts), "BW": triton.next_power_of_2(self.world)}
        launch(
            exchange_counts_kernel, (1,),
            use_ptr=use.words, kept_ptr=count, counts_ptr=self.counts.local,
            counts_peers_ptr=self.counts.peers, counted_ptr=self.counted.local,
            counted_peers_ptr=self.counted.peers, released_ptr=self.released.local, table_ptr=use.table,
            report_ptr=self.report, rank=self.rank, W=self.world, L=self.local_experts, R=self.receive_rows,
            max_polls=self.max_polls(),
            BANKS=self.banks, NVSHMEM=self.nvshmem, BM=self.chunk_rows, **blocks, num_warps=4,
        )  # fmt: skip
        launch(
            schedule_kernel, (self.local_experts,),
            table_ptr=use.table, rank=self.rank, W=self.world, L=self.local_experts, tiles=self.tiles,
            chunks=self.chunks, BM=self.chunk_rows, BT=TILES_AT_ONCE, **blocks, num_warps=4,
        )  # fmt: skip

    def state(self, use: Use) -> PassState:
        """The use as kernels are given it."""
        return PassState(use.words, use.table, use.ready, use.done, self.report)

    def release(self, use: Use) -> None:
        """Tell every PE that this one is through with the rows and results of the use; again is harmless."""
        if use.open:
            holder = self._open.get(use.bank)
            if holder is None or holder[0]() is not use:
                raise UserError(
                    f"release of a pass of {self.name}",
                    got="a pass of another exchange",
                    expected="one that began here",
                    do="release it where it began",
                )
            use.open = False
            del self._open[use.bank]
            self._send_release(use.words)

    def _send_release(self, words: Tensor) -> None:
        launch(
            release_kernel, (self.world,),
            use_ptr=words, released_ptr=self.released.local, released_peers_ptr=self.released.peers,
            rank=self.rank, world=self.world, banks=self.banks,
            NVSHMEM=self.nvshmem, **small_kernel(self.nvshmem),
        )  # fmt: skip

    def max_polls(self) -> int:
        return runtime.max_polls(self.timeout_s)

    def watch(self, layer: str = "") -> None:
        """Raise CommunicationError for a wait that ran out of time, without waiting for the device.

        On a GPU the report of the latest pass is still to come: the next call, or `check`, raises it. layer:
        whose pass was the latest one, to be named where several share the exchange.
        """
        if self._failures.is_failed():
            self.check(layer)

    def check(self, layer: str = "") -> None:
        """Raise CommunicationError if a wait of this PE ran out of time. Waits for the device."""
        failure = self._failures.first()
        if failure is None:
            return
        name = self.name
        if layer and layer not in name:
            name += f" (in or before a pass of {layer})"
        if failure.op == TOO_MANY_ROWS.value:
            raise UserError(
                f"rows that PE {failure.peer} receives in {name}, on PE {failure.rank}",
                got=f"{failure.expected} (nothing was sent)",
                expected=f"at most {failure.seen}",
                do="set a larger receive_factor, or None for the most rows that there can be",
            )
        expected, seen = f"tiles {failure.expected}", str(failure.seen)
        if failure.op != WAIT_READY.value:
            expected, seen = f"epoch {failure.expected >> 32}", str(failure.seen >> 32)
        raise timed_out(name, failure, self.timeout_s, expected, seen, self.memory.kind)


@triton.jit(do_not_specialize=["rank", "world", "banks"])
def release_kernel(
    use_ptr, released_ptr, released_peers_ptr, rank, world, banks, NVSHMEM: tl.constexpr
):  # fmt: skip
    """Send word(epoch, 0) to `released[bank, rank]` of every PE.

    Grid: (world,). Each program tells one PE. Work: one signal each.
    Example: epoch 3, banks 2, rank 1: released[1, 1] becomes 3 << 32 on every PE.
    """
    epoch = tl.load(use_ptr)
    peer = tl.program_id(0)
    bank = epoch % banks
    word = device.word(epoch, tl.full((), 0, tl.int64))
    device.put_signal(released_ptr, released_peers_ptr, peer, bank * world + rank, word, NVSHMEM)
