"""The fused phases of P(2^k x 2^k) on real processes in the interpreter: products against float64, tiles that
travelled bitwise, a late rank named."""

import pytest
import torch

from lancet_kernels import CommunicationError
from lancet_kernels.graph.slices import Partition, square
from lancet_kernels.graph.tile_layouts import movements
from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.square_kernel import PUT, TILE
from lancet_kernels.kernels.square_launch import SquareConfig, SquarePhase, square_tasks
from lancet_kernels.symmetric import SharedMemory
from tests.grids import few_of
from tests.ranks import RankPool

CONFIG = SquareConfig(GemmConfig(16, 32, 16, 1, 1), put_rows=4, put_block=32, programs=2)


def tiles_of(shape: tuple[int, int], dtype: torch.dtype, seed: int, ranks: int) -> torch.Tensor:
    """[ranks, *shape]: of every rank, alike everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ranks, *shape, generator=generator).to(dtype)


def travelled(tiles: torch.Tensor, sources: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
    """The tiles of every rank at each step."""
    steps = [tiles]
    for source_of in sources:
        steps.append(steps[-1][list(source_of)])
    return steps


def reference(kind: str, a: list, b: list, sum_sources: tuple) -> torch.Tensor:
    """float64 [ranks, M, N]."""
    total = torch.zeros(())
    for t, (x, y) in enumerate(zip(a, b, strict=True)):
        x, y = x.double(), y.double()
        if t and sum_sources:
            total = total[list(sum_sources[t - 1])]
        x, y = (x.mT if kind == "tn" else x), (y.mT if kind == "nt" else y)
        total = total + x @ y
    return total


def phase_on_rank(memory, kind: str, k: int, sizes, dtype, seed: int, runs: int = 2) -> dict:
    m, n, o = sizes
    moves = movements(Partition((square(k),)))
    a_shape, b_shape, sources = {
        "nt": ((m, n), (o, n), (moves.forward_x, moves.forward_weight, ())),
        "nn": ((m, o), (o, n), (moves.backward_dy, moves.backward_weight, ())),
        "tn": ((m, o), (m, n), (moves.gradient_dy, moves.gradient_x, moves.gradient_dweight)),
    }[kind]
    phase = SquarePhase(memory, f"{kind} {sizes}", kind, a_shape, b_shape, dtype, *sources, config=CONFIG)
    worst = 0.0
    for run in range(runs):
        a, b = (
            tiles_of(s, dtype, 2 * seed + 10 * run + i, memory.world)
            for i, s in enumerate((a_shape, b_shape))
        )
        out, a_last, b_last = phase.run(a[memory.rank], b[memory.rank])
        a_steps, b_steps = travelled(a, sources[0]), travelled(b, sources[1])
        assert torch.equal(a_last, a_steps[-1][memory.rank]), "puts are bitwise"
        assert torch.equal(b_last, b_steps[-1][memory.rank]), "puts are bitwise"
        expected = reference(kind, a_steps, b_steps, sources[2])[memory.rank]
        worst = max(worst, ((out.double() - expected).abs().max() / expected.abs().max()).item())
    return worst


def run_phases(k: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> dict[str, float]:
    with SharedMemory(timeout_s=60.0) as memory:
        return {kind: phase_on_rank(memory, kind, k, sizes, dtype, 1) for kind in ("nt", "nn", "tn")}


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    few_of(
        [
            ((17, 16, 33), torch.float32),
            ((20, 24, 40), torch.float32),
            ((16, 16, 32), torch.bfloat16),
            ((33, 18, 7), torch.float32),
            ((1, 1, 1), torch.float32),
        ]
    ),
)
def test_phases_on_four_processes(pool: RankPool, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for errors in pool.run(run_phases, 1, sizes, dtype, ranks=4, timeout_s=120):
        assert max(errors.values()) < bound, errors


@pytest.mark.long
def test_phases_on_sixteen_processes(pool_of_16: RankPool) -> None:
    for errors in pool_of_16.run(run_phases, 2, (16, 16, 32), torch.float32, ranks=16, timeout_s=500):
        assert max(errors.values()) < 1e-5, errors


def late_rank() -> str:
    """Rank 3 makes the regions, and then launches nothing."""
    with SharedMemory(timeout_s=60.0) as memory:
        moves = movements(Partition((square(1),)))
        # Only those who wait for rank 3 run out of time, on a busy machine, too.
        timeout_s = 2.0 if memory.rank in (1, 2) else 60.0
        phase = SquarePhase(
            memory, "forward of fc1", "nt", (16, 16), (32, 16), torch.float32,
            moves.forward_x, moves.forward_weight, config=CONFIG, timeout_s=timeout_s,
        )  # fmt: skip
        message = ""
        if memory.rank != 3:
            try:
                phase.run(torch.ones(16, 16), torch.ones(32, 16))
            except CommunicationError as error:
                message = str(error)
        memory.barrier()
    return message


def test_a_rank_that_launches_nothing_is_named(pool: RankPool) -> None:
    """It sends I to rank 2 and W to rank 1; nothing from it is missing on rank 0."""
    *messages, silent = pool.run(late_rank, ranks=4, timeout_s=120)
    assert messages[0] == silent == ""
    for rank in (1, 2):
        assert (
            f"forward of fc1: rank {rank} waited for rank 3 to put its tile of an operand" in messages[rank]
        )


def test_tasks_of_a_step_alternate() -> None:
    """The example of square_tasks, and: each chunk and tile of each step once, steps in their order."""
    tasks = square_tasks(2, (1, 1), (1, 2), programs=2, comm_programs=1).tolist()
    assert tasks == [
        [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1], [1, 1, 0, 0], [1, 1, 0, 1],
    ]  # fmt: skip
    chunks = (3, 5)
    tasks = [tuple(task) for task in square_tasks(4, chunks, (3, 2), 8, comm_programs=2).tolist()]
    puts = {(PUT.value, t, o, c) for t in range(3) for o in (0, 1) for c in range(chunks[o])}
    tiles = {(TILE.value, t, m, n) for t in range(4) for m in range(3) for n in range(2)}
    assert len(tasks) == len(puts) + len(tiles)
    assert set(tasks) == puts | tiles
    assert [t for _, t, *_ in tasks] == sorted(t for _, t, *_ in tasks)
