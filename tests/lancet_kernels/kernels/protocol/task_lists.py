"""Task lists of a fused pass in plain Python, from the rules in `kernels/schedule.py`."""

from __future__ import annotations

from dataclasses import dataclass

from lancet_kernels.kernels.protocol import steps, tasks

PUT, TILE_IN, TILE_OUT, WGRAD, DENSE = (
    getattr(tasks, name).value for name in "PUT TILE_IN TILE_OUT WGRAD DENSE".split()
)
GROUP, PARTS = tasks.GROUP.value, steps.PARTS.value
Task = tuple[int, ...]
Key = tuple[int, int]  # local expert, tile of the expert


@dataclass(frozen=True)
class LaunchShape:
    """What a launch has, apart from puts and tiles, whose numbers the counts decide.

    Attributes: tiles_in, tiles_out: column tiles of the first and second GEMM. wgrad: weight gradients.
        dense_tiles: tiles of independent GEMMs. programs: size of the grid.
    """

    tiles_in: int = 1
    tiles_out: int = 1
    wgrad: bool = False
    dense_tiles: int = 0
    programs: int = 1

    @property
    def lag(self) -> int:
        """By how many tiles the second GEMM is behind the first."""
        return GROUP * -(-self.programs // (GROUP * self.tiles_in))


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

    def puts(self, rank: int) -> list[tuple[Key, Task]]:
        """(key, task) in order: by local expert and tile, to rank + 1 first and to the PE itself last."""
        found = []
        for expert in range(self.world * self.local):
            peer, local = divmod(expert, self.local)
            step = (peer - rank - 1) % self.world
            found += [
                ((local, m), step, (PUT, expert, m, part))
                for m in self.touched(rank, expert)
                for part in range(PARTS)
            ]
        return [(key, task) for key, _, task in sorted(found)]


def task_list(
    routed: Routed, rank: int, shape: LaunchShape, dense: list = (), wgrads: list = ()
) -> list[Task]:
    """All tasks of a launch in the order of their numbers.

    dense: (row tiles, column tiles) of each independent GEMM; wgrads: tasks of the weight gradients.
    """
    tiles = routed.tiles(rank)
    listed = [task for _, task in routed.puts(rank)]
    for problem, (rows, columns) in enumerate(dense):
        listed += [(DENSE, problem, m, n) for m, n in in_groups(rows, columns)]
    ins, outs = (
        _of_tiles(kind, tiles, n) for kind, n in ((TILE_IN, shape.tiles_in), (TILE_OUT, shape.tiles_out))
    )
    lag = min(shape.lag, len(tiles))
    listed += ins[: lag * shape.tiles_in]
    for first in range(0, len(tiles), GROUP):
        turn = slice((lag + first) * shape.tiles_in, (lag + first + GROUP) * shape.tiles_in)
        listed += ins[turn] + outs[first * shape.tiles_out : (first + GROUP) * shape.tiles_out]
    return listed + list(wgrads)


def in_groups(rows: int, columns: int) -> list[tuple[int, int]]:
    """The tiles of a matrix: GROUP rows at a time, each group column by column."""
    groups = [range(rows)[first : first + GROUP] for first in range(0, rows, GROUP)]
    return [(m, n) for group in groups for n in range(columns) for m in group]


def _of_tiles(kind: int, tiles: list[Key], columns: int) -> list[Task]:
    """All tasks of one GEMM: the tiles of each expert in groups."""
    listed = []
    for local in sorted({local for local, _ in tiles}):
        first = tiles.index((local, 0))
        rows = sum(key[0] == local for key in tiles)
        listed += [(kind, first + m, n) for m, n in in_groups(rows, columns)]
    return listed
