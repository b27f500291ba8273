"""Regions and launches of one phase of P(2^k x 2^k); the kernel is in `square_kernel.py`.

Every rank has, in symmetric memory, for each phase of a layer,

    a, b      [S - 1, rows, width]   inboxes: the operands of step 1, 2, ...
    a/b words [S - 1, chunks]        word(epoch, 1): that chunk is here
    sums      fp32 [M, N]            sums that another rank began (gradient)
    ready     [2, tiles]             word(epoch, t): a tile of the own sums, of those in `sums`, has t steps
    released  [ranks]                word(epoch, 0): that rank's inboxes are free of the epoch

so the bytes put in a launch never wait for a host. Peers must be reached by pointers (CPU processes of one
machine, GPUs of one NVLink domain).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.exchange import release_kernel
from lancet_kernels.kernels.failure_report import FailureReport, timed_out
from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.gemm_tile import KINDS
from lancet_kernels.kernels.kernel_launch import launch, small_kernel
from lancet_kernels.kernels.overlap_config import most_registers, overlap_tile, plain_tile
from lancet_kernels.kernels.square_kernel import PUT, TILE, square_kernel
from lancet_kernels.symmetric.memory import Region, SymmetricMemory

Sources = tuple[int, ...]


@dataclass(frozen=True)
class SquareConfig:
    """How launches are cut.

    Attributes:
        gemm: the tile. put_rows, put_block: rows and elements of a row that one put step copies.
        programs: size of the grid, at most what is resident. comm_programs: how many of them put while the
            others multiply. tma: load operands through tensor descriptors.
    """

    gemm: GemmConfig
    put_rows: int = 8
    put_block: int = 512
    programs: int = 1
    comm_programs: int = 1
    tma: bool = False

    @classmethod
    def default(cls, dtype: torch.dtype, widths: Sequence[int], where: torch.device) -> SquareConfig:
        """For operands of these widths; in the interpreter small tiles, one program."""
        if where.type == "cpu":
            return cls(GemmConfig(16, 32, 16, 1, 1), put_rows=16, put_block=64)
        aligned = all(w * dtype.itemsize % 16 == 0 for w in widths)
        tile, tma = square_tile(dtype, runtime.architecture(where), aligned)
        programs = torch.cuda.get_device_properties(where).multi_processor_count
        return cls(tile, programs=programs, comm_programs=max(1, programs // 8), tma=tma)


def square_tile(dtype: torch.dtype, arch: int, aligned: bool) -> tuple[GemmConfig, bool]:
    """-> the default tile of an architecture, and whether operands come through tensor descriptors."""
    tile, tma = overlap_tile("none", dtype, arch), arch >= 90 and aligned
    return (tile if tma or (arch < 90 and aligned) else plain_tile(tile, dtype)), tma


class SquarePhase:
    """One phase (forward, backward or gradient) of one layer. Made by all ranks in the same order.

    Args:
        memory: of the ranks of the square. name: unique in it.
        kind: "nt", "nn" or "tn" (`square_kernel`).
        a_shape, b_shape: of a tile of each operand. dtype: float32, float16 or bfloat16.
        a_sources, b_sources: whom each rank's tiles come from, between each step and the next.
        sum_sources: the same of its sums; they may move on once.
        timeout_s: how long a wait may last.
    Raises: UserError (peers that no pointer reaches, a movement that is not that of a square).
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        name: str,
        kind: str,
        a_shape: tuple[int, int],
        b_shape: tuple[int, int],
        dtype: torch.dtype,
        a_sources: Sequence[Sources],
        b_sources: Sequence[Sources],
        sum_sources: Sequence[Sources] = (),
        *,
        config: SquareConfig | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.memory, self.name, self.kind, self.timeout_s = memory, name, kind, timeout_s
        self.steps = len(a_sources) + 1
        self.config = config or SquareConfig.default(dtype, (a_shape[1], b_shape[1]), memory.device)
        self.a_shape, self.b_shape, self.dtype = a_shape, b_shape, dtype
        m, k = a_shape if kind != "tn" else a_shape[::-1]
        n = b_shape[0] if kind == "nt" else b_shape[1]
        self.result_shape, self.contraction = (m, n), k
        gemm = self.config.gemm
        self._chunk_rows = gemm.block_m, gemm.block_n if kind == "nt" else gemm.block_m
        self._tiles = -(-m // gemm.block_m), -(-n // gemm.block_n)
        chunks = tuple(
            -(-shape[0] // r) for shape, r in zip((a_shape, b_shape), self._chunk_rows, strict=True)
        )
        moving = [n for n, sources in enumerate(sum_sources) if list(sources) != sorted(sources)]
        self._check_movements([*a_sources, *b_sources], moving)
        self._moved_at = moving[0] + 1 if moving else -1
        self._inboxes = [
            self._region(which, (self.steps - 1, *shape), dtype)
            for which, shape in (("a", a_shape), ("b", b_shape))
        ]
        self._arrived = [
            self._region(f"{which} words", (self.steps - 1, count))
            for which, count in zip("ab", chunks, strict=True)
        ]
        self._sums = self._region("sums", (m, n) if moving else (1, 1), torch.float32)
        self._ready = self._region("ready", (2, *self._tiles))
        self._released = self._region("released", (memory.world,))
        if memory.far:
            raise UserError(
                f"fused square of {name}",
                got="ranks that no pointer reaches",
                expected="ranks of one NVLink domain",
                do='use backend="torch"',
            )
        where = memory.device
        self._acc = torch.empty(m, n, dtype=torch.float32, device=where)
        self._epoch = torch.zeros(1, dtype=torch.int64, device=where)
        self._failures = FailureReport(where)
        self._tasks = square_tasks(
            self.steps, (chunks[0], chunks[1]), self._tiles, self.config.programs, self.config.comm_programs
        ).to(where)
        self._routes = self._routes_of(a_sources, b_sources, sum_sources or a_sources).to(where)
        self._row = torch.arange(max(a_shape[0], b_shape[0]), dtype=torch.int32, device=where)

    def run(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> the result [M, N], and the operands of the last step. Collective: every rank runs it.

        Args: a, b: this rank's tiles at step 0.
        Raises: UserError (shapes), CommunicationError, naming whom a wait was for (of a launch on a GPU a
            later call raises it, or `check`).
        """
        for what, tile, shape in (("a", a, self.a_shape), ("b", b, self.b_shape)):
            if tuple(tile.shape) != shape or tile.dtype != self.dtype:
                raise UserError(
                    f"operand {what} of {self.name}",
                    got=f"{tuple(tile.shape)} of {tile.dtype}",
                    expected=f"{shape} of {self.dtype}",
                    do="give the tile that the regions were made for",
                )
        runtime.check_device(self.name, a)
        a, b, out = a.contiguous(), b.contiguous(), a.new_empty(self.result_shape)
        self._epoch += 1
        counter = torch.zeros(1, dtype=torch.int64, device=a.device)
        gemm, config = self.config.gemm, self.config
        if config.tma:
            runtime.provide_scratch()
        operands: dict[str, Tensor | int] = {}
        of_each = zip("ab", (a, b), self._inboxes, self._arrived, self._chunk_rows, strict=True)
        for which, tile, inbox, words, chunk_rows in of_each:
            operands |= {
                f"{which}_ptr": tile,
                f"{which}_inbox_ptr": inbox.local,
                f"{which}_inbox_peers_ptr": inbox.peers,
                f"{which}_arrived_ptr": words.local,
                f"{which}_arrived_peers_ptr": words.peers,
                f"{which}_rows": tile.shape[0],
                f"{which}_width": tile.shape[1],
                f"{which}_chunk_rows": chunk_rows,
            }
        options = {} if runtime.INTERPRETED else {"maxnreg": most_registers(gemm)}
        launch(
            square_kernel, (config.programs,),
            tasks_ptr=self._tasks, num_tasks=len(self._tasks), counter_ptr=counter, epoch_ptr=self._epoch,
            routes_ptr=self._routes, row_ptr=self._row, report_ptr=self._failures.words,
            rank=self.memory.rank, max_polls=runtime.max_polls(self.timeout_s), **operands,
            acc_ptr=self._acc, sums_ptr=self._sums.local, sums_peers_ptr=self._sums.peers,
            ready_ptr=self._ready.local, ready_peers_ptr=self._ready.peers,
            released_ptr=self._released.local, out_ptr=out,
            M=self.result_shape[0], N=self.result_shape[1], K=self.contraction,
            steps=self.steps, moved_at=self._moved_at,
            KIND=KINDS[self.kind], UPCAST=runtime.needs_upcast(self.dtype), TMA=config.tma,
            BM=gemm.block_m, BN=gemm.block_n, BK=gemm.block_k,
            PUT_ROWS=config.put_rows, PUT_BLOCK=config.put_block,
            num_warps=gemm.num_warps, num_stages=gemm.num_stages, **options,
        )  # fmt: skip
        last = [inbox.local[-1].clone() for inbox in self._inboxes]
        if self._failures.is_failed():
            self.check()
        launch(
            release_kernel, (self.memory.world,), use_ptr=self._epoch, released_ptr=self._released.local,
            released_peers_ptr=self._released.peers, rank=self.memory.rank, world=self.memory.world, banks=1,
            NVSHMEM=False, **small_kernel(False),
        )  # fmt: skip
        return out, last[0], last[1]

    def check(self) -> None:
        """Raise CommunicationError if a wait of this rank ran out of time. Waits for the device."""
        failure = self._failures.first()
        if failure is not None:
            expected, seen = (
                f"epoch {word >> 32}, step {word & 0xFFFFFFFF}" for word in (failure.expected, failure.seen)
            )
            raise timed_out(
                self.name, failure, self.timeout_s, expected, seen, who="rank", memory=self.memory.kind
            )

    def _region(self, what: str, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Region:
        return self.memory.allocate(f"{self.name}.{what}", shape, dtype)

    def _check_movements(self, operands: Sequence[Sources], moving: Sequence[int]) -> None:
        ranks = range(self.memory.world)
        all_move = all(source != rank for sources in operands for rank, source in enumerate(sources))
        if not operands or not all_move or any(sorted(s) != list(ranks) for s in operands) or len(moving) > 1:
            raise UserError(
                f"movements of {self.name}",
                got="operands that stay, or sums that move on more than once",
                expected="those of P(2^k x 2^k) with k >= 1",
                do='use backend="torch"',
            )

    def _routes_of(self, *sources: Sequence[Sources]) -> Tensor:
        """int32 [S, 6]: for each step whom a, b and sums come from, and whom those before it go to."""
        rank, routes = self.memory.rank, torch.zeros(self.steps, 6, dtype=torch.int32)
        for which, of_steps in enumerate(sources):
            for t, source_of in enumerate(of_steps):
                routes[t + 1, which] = source_of[rank]
                routes[t + 1, 3 + which] = list(source_of).index(rank)
        return routes


def square_tasks(
    steps: int, chunks: tuple[int, int], tiles: tuple[int, int], programs: int, comm_programs: int
) -> Tensor:
    """-> int32 [tasks, 4]: what one launch does, in this order.

        PUT   t, operand, chunk     a chunk of the operand of step t, to where step t + 1 needs it
        TILE  t, m, n               a tile of the product of step t

    Step by step; of every `programs` tasks `comm_programs` are puts, as long as there are any of the step, so
    that tiles travel while others are multiplied. chunks: of operands a and b. tiles: rows and columns.

    Example, 2 steps, two tiles, one chunk of each operand, two programs of which one puts:
        PUT(0, 0, 0) TILE(0, 0, 0) PUT(0, 1, 0) TILE(0, 0, 1) TILE(1, 0, 0) TILE(1, 0, 1)
    """
    tasks: list[tuple[int, int, int, int]] = []
    beside = max(1, programs - comm_programs)
    for t in range(steps):
        # A chunk of each operand before the second chunk of any.
        numbers = product(range(max(chunks) if t + 1 < steps else 0), (0, 1))
        puts = [(PUT.value, t, operand, chunk) for chunk, operand in numbers if chunk < chunks[operand]]
        mine = [(TILE.value, t, m, n) for m, n in product(*map(range, tiles))]
        while puts:
            tasks += puts[:comm_programs] + mine[:beside]
            puts, mine = puts[comm_programs:], mine[beside:]
        tasks += mine
    return torch.tensor(tasks, dtype=torch.int32)
