"""Regions and signals of passes: places of rows on a peer, and when they may be overwritten.

Rows lie compact (`schedule.py`). Every PE has, in symmetric memory,

    rows     [A, D]           rows received, by pass, local expert, source, slot
    arrived  [tiles, W]       word(epoch, 0): what source w sends into that tile of rows is here
    row_weights [R]           in a backward: what each of these rows counts in its token's sum, float32
    results  [S, D]           what the experts made of the rows that this PE sent, in the order of sending
    dots     [S]              in a backward: gradients of the weights of these rows, float32
    returned [chunks]         word(epoch, 0): the results of that chunk are here
    counts   [2, W, E + 2]    rows of PE w for every expert, and where on w there is room for its own;
                              counted [2, W]: word(epoch, 0): they are here
    released [W]              word(epoch, 0): PE w is through with its backward of that epoch
    stages   [S, D], [S], [R, D], [R]    only where NVSHMEM carries rows: those sent with their weights, and
                              results with their dots, on their way out

The passes of an exchange (forwards, or backwards) have epochs, 1, 2, 3, ... Signals only grow and nothing is
zeroed in flight. Whatever a PE puts to a peer, the peer has said before that it is there: in a forward by its
counts of that epoch, which come behind all that it did before and say where it has room; in a backward by
releasing the one before, since all backwards put their rows to the same place. A PE returns results of an
epoch only after it saw the source's rows of that epoch, and the source sends those in a launch behind the one
that read its last results. That holds for passes through any exchange, so all layers have one region of
results (`ResultBuffers`). All of it needs passes one behind the other in a stream, or in streams that wait
for each other.

The epoch lives in device memory, and so does what rows are occupied: a captured CUDA graph counts on in every
replay. The host only checks that no more passes are open than there are places to note their rows in.
"""

from __future__ import annotations

import weakref
from collections import namedtuple
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lancet_kernels.errors import CommunicationError, UserError
from lancet_kernels.kernels.protocol import Arrivals, PassState, Returns, device, schedule
from lancet_kernels.kernels.protocol.device import REPORT_WORDS, TOO_MANY_ROWS, WAIT_READY
from lancet_kernels.kernels.protocol.schedule import exchange_counts_kernel, schedule_kernel
from lancet_kernels.kernels.runtime import launch, small_kernel
from lancet_kernels.kernels.symmetric.memory import Region, SymmetricMemory

# REPORTED[op] completes "PE 0 waited for PE 1 ...".
REPORTED = (
    "to release its rows (the backward before this one)",
    "to send its rows (dispatch)",
    "to finish the first GEMM of those rows",
    "to return results (combine)",
    "to send its counts (dispatch)",
)


Failure = namedtuple("Failure", "rank peer op signal expected seen")
"""PE `rank` waited for `peer`; op: one of the constants above; expected, seen: words at a signal."""

Stage = namedtuple("Stage", "rows weights results dots")
"""Regions from which NVSHMEM sends."""


class FailureReport:
    """The report of one PE. words: int64 [8] on its device, as `device.wait` writes them."""

    def __init__(self, where: torch.device) -> None:
        self.words = torch.zeros(REPORT_WORDS.value, dtype=torch.int64, device=where)
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None

    def is_failed(self) -> bool:
        """Has a wait run out of time? Does not wait: on a GPU a later call tells of a launch."""
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
        """The first timeout. Waits for the device."""
        claimed, *words, _ = self.words.tolist()
        return Failure(*words) if claimed else None


@dataclass(eq=False)
class OpenPass:
    """One pass through the exchange: its state is fresh device memory. place: which open one it is."""

    place: int
    state: PassState
    backward: bool
    open: bool = True


class ResultBuffers:
    """Buffers of an exchange that are in use only while a launch runs: results, dots, stages. Collective to
    create.

    Exchanges of the same sizes share them, if every PE launches their passes one behind the other.

    Attributes:
        poisoned: int64 [1] on the device: not 0 once a wait in a pass through any of these exchanges failed.
            What that pass waited for may still come, among results of a later one: all are NaN from then on.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        name: str,
        send_rows: int,
        receive_rows: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        def region(what: str, *shape: int, of: torch.dtype = torch.float32) -> Region:
            return memory.allocate(f"{name}.{what}", shape, of)

        self.results, self.dots = region("results", send_rows, width, of=dtype), region("dots", send_rows)
        self.poisoned = torch.zeros(1, dtype=torch.int64, device=memory.device)
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


class Exchange:
    """The regions above on every PE. Collective: every PE makes the same one in the same order.

    Args:
        memory: symmetric memory. name: unique in it.
        local_experts, send_rows, receive_rows, width, dtype: L, S, R, D and the type of a row.
        chunk_rows: rows of a tile of the GEMMs, and at most of what one signal is for.
        passes: how many may be open at once: forward passes before their backward. room: A; None: R for each.
        buffers: of the same sizes, shared with other exchanges; None: its own.
        timeout_s: how long a wait may last.
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
        passes: int = 2,
        room: int | None = None,
        buffers: ResultBuffers | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if passes < 1:
            raise UserError("passes", got=passes, expected="at least 1", do="one for each open at once")
        self.memory, self.name, self.passes, self.timeout_s = memory, name, passes, timeout_s
        self.world, self.rank = memory.world, memory.rank
        self.local_experts, self.width, self.dtype = local_experts, width, dtype
        self.send_rows, self.receive_rows, self.chunk_rows = send_rows, receive_rows, chunk_rows
        experts = self.world * local_experts
        self.tiles = schedule.most_tiles(receive_rows, local_experts, chunk_rows)
        self.chunks = schedule.most_chunks(send_rows, experts, chunk_rows)
        self.room = passes * receive_rows if room is None else room
        self._own: list[Region] = []
        self.rows = self._region("rows", (self.room, width), dtype)
        self.row_weights = self._region("weights of rows", (receive_rows,), torch.float32)
        self.buffers = buffers or ResultBuffers(memory, name, send_rows, receive_rows, width, dtype)
        self.results = self.buffers.results
        self.arrived = self._region("arrived", (self.tiles, self.world))
        self.returned = self._region("returned", (self.chunks,))
        banks, words = schedule.COUNT_BANKS.value, experts + schedule.MORE_COUNTS.value
        self.counts = self._region("counts", (banks, self.world, words), torch.int32)
        self.counted = self._region("counted", (banks, self.world))
        self.released = self._region("released", (self.world,))
        # Of each open pass the rows [begin, end) that it has here.
        self.occupied = torch.zeros(passes, 2, dtype=torch.int32, device=memory.device)
        self._kept: dict[int, Tensor] = {}
        self._epoch = torch.zeros(1, dtype=torch.int64, device=memory.device)
        self.arrivals = Arrivals(
            self.rows.local, self.rows.peers, self.row_weights.local, self.row_weights.peers,
            self.arrived.local, self.arrived.peers, self.released.local,
        )  # fmt: skip
        self.returns = Returns(
            self.results.local, self.results.peers, self.buffers.dots.local, self.buffers.dots.peers,
            self.returned.local, self.returned.peers, self.buffers.poisoned,
        )  # fmt: skip
        self._failures = FailureReport(memory.device)
        self.report = self._failures.words
        # On every PE or on none: also who is only sent rows over the network must take them in.
        self.nvshmem = memory.far
        # By place: whose it is, and the words to release should that pass have been dropped.
        self._open: dict[int, tuple[weakref.ref[OpenPass], Tensor]] = {}

    def _region(self, what: str, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Region:
        self._own.append(self.memory.allocate(f"{self.name}.{what}", shape, dtype))
        return self._own[-1]

    @property
    def timeout_us(self) -> int:
        """The timeout of waits in kernels."""
        return int(1e6 * self.timeout_s)

    @property
    def nbytes(self) -> int:
        """Bytes of its own regions, and of what forwards keep beside rows, on this PE."""
        return sum(t.nbytes for t in (*self._kept.values(), *(region.local for region in self._own)))

    def kept(self, columns: int) -> Tensor:
        """[A, columns], of this PE alone: what forwards keep of each row beside it. One for all layers."""
        if columns not in self._kept:
            self._kept[columns] = self.rows.local.new_empty(self.room, columns)
        return self._kept[columns]

    def free_place(self) -> int | None:
        """A place of no pass, or of one that was dropped; None: no more pass can be opened."""
        free = (p for p in range(self.passes) if p not in self._open or self._open[p][0]() is None)
        return next(free, None)

    def begin(self, table: Tensor | None = None) -> OpenPass:
        """Open the next pass. Raises UserError if there are as many open as there may be.

        table: of the forward that this is the backward of; None: a new one, to be filled by `schedule`.
        """
        place = self.free_place()
        if place is None or (table is not None and place > 0):
            raise UserError(
                f"forward passes through {self.name} before a backward",
                got=f"one more while {len(self._open)} wait for their backward",
                expected=f"at most {self.passes} open at once (its passes)",
                do="run a backward first, use torch.no_grad(), or make it for more passes",
            )
        if place in self._open:
            self._give_back(place, self._open[place][1], backward=table is not None)
        self._epoch += 1
        words = torch.zeros(8, dtype=torch.int64, device=self.memory.device)
        words[:1].copy_(self._epoch)
        # Each begins at a multiple of 16 bytes, whatever the sizes: kernels are compiled for alignments.
        even = -(-self.tiles // 2) * 2
        ready, done, sent = words.new_zeros(2 * even + self.chunks).split((even, even, self.chunks))
        backward = table is not None
        if table is None:
            size = schedule.table_words(self.world, self.world * self.local_experts, self.tiles, self.chunks)
            table = torch.zeros(size, dtype=torch.int32, device=self.memory.device)
        opened = OpenPass(place, PassState(words, table, ready, done, sent, self.report), backward)
        self._open[place] = weakref.ref(opened), words
        return opened

    def schedule(self, opened: OpenPass, count: Tensor) -> None:
        """Exchange counts with all PEs and fill the table of the pass. count: int64 [E], of each expert."""
        experts = self.world * self.local_experts
        launch(
            exchange_counts_kernel, (1,),
            words_ptr=opened.state.words, kept_ptr=count, counts_ptr=self.counts.local,
            counts_peers_ptr=self.counts.peers, counted_ptr=self.counted.local,
            counted_peers_ptr=self.counted.peers, occupied_ptr=self.occupied, table_ptr=opened.state.table,
            report_ptr=self.report, rank=self.rank, W=self.world, L=self.local_experts, R=self.receive_rows,
            A=self.room, passes=self.passes, place=opened.place, timeout_us=self.timeout_us,
            NVSHMEM=self.nvshmem, BM=self.chunk_rows,
            BE=triton.next_power_of_2(self.counts.local.shape[2]), BW=triton.next_power_of_2(self.world),
            BP=triton.next_power_of_2(self.passes), **small_kernel(self.nvshmem) | {"num_warps": 8},
        )  # fmt: skip
        launch(
            schedule_kernel, (self.local_experts,),
            table_ptr=opened.state.table, rank=self.rank, W=self.world, L=self.local_experts,
            tiles=self.tiles, chunks=self.chunks, BM=self.chunk_rows, BT=schedule.TILES_AT_ONCE,
            BE=triton.next_power_of_2(experts), BW=triton.next_power_of_2(self.world), num_warps=4,
        )  # fmt: skip

    def release(self, opened: OpenPass) -> None:
        """This PE is through with the rows and results of the pass; again is harmless."""
        if opened.open:
            holder = self._open.get(opened.place)
            if holder is None or holder[0]() is not opened:
                raise UserError(
                    f"release of a pass of {self.name}",
                    got="a pass of another exchange",
                    expected="one that began here",
                    do="release it where it began",
                )
            opened.open = False
            del self._open[opened.place]
            self._give_back(opened.place, opened.state.words, backward=opened.backward)

    def _give_back(self, place: int, words: Tensor, *, backward: bool) -> None:
        """Make room where the rows of a forward were, in stream order; tell every PE of a backward."""
        if not backward:
            self.occupied[place].zero_()
            return
        launch(
            release_kernel, (self.world,),
            words_ptr=words, released_ptr=self.released.local, released_peers_ptr=self.released.peers,
            rank=self.rank, NVSHMEM=self.nvshmem, **small_kernel(self.nvshmem),
        )  # fmt: skip

    def watch(self, layer: str = "") -> None:
        """`check` that does not wait: on a GPU the next call raises what the latest pass will report."""
        if self._failures.is_failed():
            self.check(layer)

    def check(self, layer: str = "") -> None:
        """Raise CommunicationError if a wait of this PE ran out of time. Waits for the device.

        layer: whose pass was the latest one, to be named where several share the exchange.
        """
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
                do="set a larger receive_factor, or checkpoint activations so that fewer passes keep rows",
            )
        expected, seen = f"tiles {failure.expected}", str(failure.seen)
        if failure.op != WAIT_READY.value:
            expected, seen = f"epoch {failure.expected >> 32}", str(failure.seen >> 32)
        raise CommunicationError(
            f"{name}: PE {failure.rank} waited for PE {failure.peer} {REPORTED[failure.op]} more than "
            f"{self.timeout_s:g} s: expected {expected} at signal {failure.signal}, seen {seen}; PE "
            f"{failure.peer} is late, dead, or in another layer: look at its log (symmetric memory: "
            f"{self.memory.kind})",
            missing=(failure.peer,),
            timed_out=True,
        )


@triton.jit(do_not_specialize=["rank"])
def release_kernel(words_ptr, released_ptr, released_peers_ptr, rank, NVSHMEM: tl.constexpr):
    """Send word(epoch, 0) to `released[rank]` of every PE.

    Grid: (W,). Each program tells one PE. Work: one signal each.
    Example: epoch 3, rank 1: released[1] becomes 3 << 32 on every PE.
    """
    word = device.word(tl.load(words_ptr), tl.full((), 0, tl.int64))
    device.put_signal(released_ptr, released_peers_ptr, tl.program_id(0), rank, word, NVSHMEM)
