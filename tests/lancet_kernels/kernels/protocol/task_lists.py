"""Task lists of a fused pass in plain Python, from the rules in `kernels/schedule.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lancet_kernels.kernels.protocol import tasks
from lancet_kernels.kernels.protocol.tasks import LaunchShape

PUT, TILE_IN, TILE_OUT, WGRAD, DENSE, REDUCE = (
    getattr(tasks, name).value for name in "PUT TILE_IN TILE_OUT WGRAD DENSE REDUCE".split()
)
Task = tuple[int, ...]
Key = tuple[int, int]  # local expert, tile of the expert
BEHIND_ALL: Key = (1 << 30, 0)


@dataclass(frozen=True)
class Routed:
    """Counts of all PEs, and what follows from them.

    Attributes:
        counts: [W][E]. local: experts on each PE. block_m: rows of a tile.
    """

    counts: tuple[tuple[int, ...], ...]
    local: int
    block_m: int

    @property
    def world(self) -> int:
        return len(self.counts)

    def tiles(self, rank: int) -> list[Key]:
        """The tiles of a PE, in order."""
        found = []
        for local in range(self.local):
            rows = sum(count[rank * self.local + local] for count in self.counts)
            found += [(local, m) for m in range(-(-rows // self.block_m))]
        return found

    def touched(self, source: int, expert: int) -> set[int]:
        """The tiles of an expert in which rows of a source lie."""
        before = sum(count[expert] for count in self.counts[:source])
        return {i // self.block_m for i in range(before, before + self.counts[source][expert])}

    def sources(self, rank: int, tile: int) -> list[int]:
        """Whose rows lie in a tile of a PE."""
        local, m = self.tiles(rank)[tile]
        expert = rank * self.local + local
        return [source for source in range(self.world) if m in self.touched(source, expert)]

    def puts(self, rank: int) -> list[tuple[Key, Task]]:
        """(key, task) in order: by local expert and tile, to rank + 1 first and to the PE itself last."""
        found = []
        for expert in range(self.world * self.local):
            peer, local = divmod(expert, self.local)
            step = (peer - rank - 1) % self.world
            found += [((local, m), step, (PUT, expert, m)) for m in self.touched(rank, expert)]
        return [(key, task) for key, _, task in sorted(found)]


def others(
    shape: LaunchShape, tiles: list[Key], dense: list, wgrads: list
) -> Iterator[tuple[Key | None, Task]]:
    """(the tile whose puts stand before the task, task). None: no put has to; (inf, 0): all have to.

    dense: (row tiles, column tiles) of each independent GEMM; wgrads: tasks of the weight gradients.
    """
    for problem, (rows, columns) in enumerate(dense):
        yield from ((None, (DENSE, problem, m, n)) for m in range(rows) for n in range(columns))
    lag = min(shape.lag, len(tiles))
    for step in range(len(tiles) + lag):
        key = tiles[step] if step < len(tiles) else BEHIND_ALL
        if step < len(tiles):
            yield from ((key, (TILE_IN, step, n)) for n in range(shape.tiles_in))
        if step >= lag:
            yield from ((key, (TILE_OUT, step - lag, n)) for n in range(shape.tiles_out))
    yield from ((BEHIND_ALL, task) for task in wgrads)
    yield from ((BEHIND_ALL, (REDUCE, block)) for block in range(shape.reduce_blocks))


def task_list(
    routed: Routed, rank: int, shape: LaunchShape, dense: list = (), wgrads: list = ()
) -> list[Task]:
    """All tasks of a launch in the order of their numbers."""
    puts = routed.puts(rank) if shape.put else []
    beside = shape.programs - shape.comm_programs
    listed: list[Task] = []
    placed = 0
    for j, (key, task) in enumerate(others(shape, routed.tiles(rank), dense, wgrads)):
        wanted = (j // beside + 1) * shape.comm_programs if beside else len(puts)
        if key is not None:
            wanted = max(wanted, max((i + 1 for i, (first, _) in enumerate(puts) if first <= key), default=0))
        while placed < min(wanted, len(puts)):
            listed.append(puts[placed][1])
            placed += 1
        listed.append(task)
    return listed + [task for _, task in puts[placed:]]
