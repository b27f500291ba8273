"""Where do rows land on a peer, and when may they be overwritten? Regions, signals and credits of one layer.

    W  PEs, L experts on each      C  capacity      D  width      B  banks

Every PE has, in symmetric memory,

    rows     [B, W, L, C, D]      rows that source w sent to expert l here
    arrived  [B, W, L, chunks]    word(epoch, count): that chunk of rows is here; chunk 0 always comes
    results  [B, E, C, D]         what expert e made of the rows that this PE sent it
    returned [B, E, chunks]       word(epoch, 0): that chunk of results is here
    released [B, W]               word(epoch, 0): PE w needs its rows of that epoch no more
    stage    [2, W, L, C, D]      only where NVSHMEM carries rows: those sent, and results, on their way out

With an emulated wire (`wire.py`) `arrived` and `returned` are twice as long, [2 * B, ...]: words, then
their dues.

A use of the exchange (a forward pass with its backward, or a backward's own exchange) has an epoch, 1, 2,
3, ..., and takes bank `epoch % B`. Signals only grow and nothing is zeroed in flight. Before a PE puts rows
of epoch e it waits until the peer has released epoch e - B of that bank. Results need no credit of their
own: a PE returns results of epoch e only after it saw the source's rows of epoch e, and the source sends
those only when it is through with its results of epoch e - B.

The epoch lives in device memory, so a captured CUDA graph counts on in every replay; the host only checks
that no more than B uses are open, since another one would wait for a release that comes after it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lancet_kernels.errors import CommunicationError, UserError
from lancet_kernels.kernels import device, runtime
from lancet_kernels.kernels.nvshmem_launch import launch, small_kernel
from lancet_kernels.kernels.wire import Wire
from lancet_kernels.symmetric.memory import Region, SymmetricMemory

# use.words: the epoch, then one task counter for each launch of the use.
EPOCH, FIRST_COUNTER = 0, 1
USE_WORDS = 8

# What a report's op says (device.wait); REPORTED[op] completes "PE 0 waited for PE 1 ...".
WAIT_RELEASE, WAIT_ROWS, WAIT_READY, WAIT_RESULTS = range(4)
REPORTED = (
    "to release the bank (its backward of an earlier pass)",
    "to send its rows (dispatch)",
    "to finish the first GEMM of those rows",
    "to return results (combine)",
)


@dataclass
class Use:
    """One pass through the exchange: its epoch and counters, in fresh device memory.

    Attributes:
        bank: epoch % B, as the host counts.
        words: int64 [8], the epoch, then the task counters of its launches.
        ready: int64 [W * L * chunks + L], finished tiles of the first GEMM by chunk, then by expert.
        done: int64 [W * L * chunks], finished tiles of the second GEMM by chunk.
    """

    bank: int
    words: Tensor
    ready: Tensor
    done: Tensor
    launches: int = 0
    open: bool = True

    def next_counter(self) -> int:
        """Which word of `words` the next launch counts its tasks in."""
        if FIRST_COUNTER + self.launches >= USE_WORDS:
            raise AssertionError("a use has seven launches at most")
        self.launches += 1
        return FIRST_COUNTER + self.launches - 1


class Exchange:
    """The regions above on every PE. Collective: every PE makes the same one in the same order.

    Args:
        memory: symmetric memory. name: unique in it.
        local_experts, capacity, width, dtype: L, C, D and the type of a row.
        chunk_rows: rows per signal; the row tile of the GEMMs that read them.
        banks: B, how many uses may be open at once, plus none: forward passes before their backward.
        timeout_s: how long a wait may last.
        wire: this PE's emulated wire, on every PE or on none; None: rows arrive when they are there.

    Attributes:
        wire: that one. Between launches it may be taken away and put back: those without it are not paced.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        name: str,
        *,
        local_experts: int,
        capacity: int,
        width: int,
        dtype: torch.dtype,
        chunk_rows: int,
        banks: int = 2,
        timeout_s: float = 60.0,
        wire: Wire | None = None,
    ) -> None:
        if banks < 2:
            raise UserError("banks", got=banks, expected="at least 2", do="one bank would stop every sender")
        self.memory, self.name, self.banks, self.timeout_s = memory, name, banks, timeout_s
        self.world, self.rank = memory.world, memory.rank
        self.local_experts, self.capacity, self.width, self.dtype = local_experts, capacity, width, dtype
        self.chunk_rows = chunk_rows
        self.chunks = max(1, -(-capacity // chunk_rows))
        experts = self.world * local_experts
        self.rows = self._region("rows", (banks, self.world, local_experts, capacity, width), dtype)
        self.results = self._region("results", (banks, experts, capacity, width), dtype)
        self.wire = wire
        words = banks if wire is None else 2 * banks
        self.arrived = self._region("arrived", (words, self.world, local_experts, self.chunks))
        self.returned = self._region("returned", (words, experts, self.chunks))
        self.released = self._region("released", (banks, self.world))
        self._epoch = torch.zeros(1, dtype=torch.int64, device=memory.device)
        self.report = torch.zeros(device.REPORT_WORDS.value, dtype=torch.int64, device=memory.device)
        # On every PE or on none: also who is only sent rows over the network must take them in.
        self.nvshmem = memory.far
        self.stage = None
        if self.nvshmem:
            self.stage = self._region("stage", (2, self.world, local_experts, capacity, width), dtype)
        self._watched: tuple[Tensor, torch.cuda.Event] | None = None
        self._begun = 0
        # By bank: who uses it, and the epoch to release should its user have been dropped without a backward.
        self._open: dict[int, tuple[weakref.ref[Use], Tensor]] = {}

    def _region(self, what: str, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Region:
        return self.memory.allocate(f"{self.name}.{what}", shape, dtype)

    def begin(self) -> Use:
        """Open the next use. Raises UserError if its bank is still taken by a use that was not released."""
        self._begun += 1
        bank = self._begun % self.banks
        if bank in self._open:
            holder, words = self._open[bank]
            if holder() is not None:
                self._begun -= 1
                raise UserError(
                    f"forward passes through {self.name} before a backward",
                    got=f"one more while pass {self._begun + 1 - self.banks} still waits for its backward",
                    expected=f"at most {self.banks} open at once (its banks)",
                    do="run that backward first, use torch.no_grad(), or make more banks",
                )
            self._send_release(words)
        self._epoch += 1
        words = torch.zeros(USE_WORDS, dtype=torch.int64, device=self.memory.device)
        words[EPOCH : EPOCH + 1].copy_(self._epoch)
        chunks = self.world * self.local_experts * self.chunks
        # `done` begins at a multiple of 16 bytes, whatever the sizes: kernels are compiled for alignments.
        first_done = -(-(chunks + self.local_experts) // 2) * 2
        counters = words.new_zeros(first_done + chunks)
        ready, done = counters[: chunks + self.local_experts], counters[first_done:]
        use = Use(bank, words, ready, done)
        self._open[bank] = weakref.ref(use), words
        return use

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
            words, self.released.local, self.released.peers, self.rank, self.world, self.banks,
            NVSHMEM=self.nvshmem, **small_kernel(self.nvshmem),
        )  # fmt: skip

    def max_polls(self) -> int:
        return runtime.max_polls(self.timeout_s)

    def watch(self) -> None:
        """Raise CommunicationError for a wait that ran out of time, without waiting for the device.

        On a GPU the report of the latest pass is still to come: the next call, or `check`, raises it.
        """
        if self.report.device.type != "cuda":
            self.check()
        elif not torch.cuda.is_current_stream_capturing():
            if self._watched is None:
                self._watched = torch.zeros_like(self.report, device="cpu").pin_memory(), torch.cuda.Event()
            elif self._watched[1].query() and self._watched[0][0]:
                self.check()
            copy, event = self._watched
            copy.copy_(self.report, non_blocking=True)
            event.record()

    def check(self) -> None:
        """Raise CommunicationError if a wait of this PE ran out of time. Waits for the device."""
        claimed, rank, peer, op, index, expected, seen, _ = self.report.tolist()
        if not claimed:
            return
        what = "tiles"
        if op != WAIT_READY:
            what, expected, seen = "epoch", expected >> 32, seen >> 32
        raise CommunicationError(
            f"{self.name}: PE {rank} waited for PE {peer} {REPORTED[op]} more than {self.timeout_s:g} s: "
            f"expected {what} {expected} at signal {index}, seen {seen}; "
            f"PE {peer} is late, dead, or in another layer: look at its log",
            missing=(peer,),
            timed_out=True,
        )


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
