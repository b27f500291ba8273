"""What does one launch of the overlap kernel do, and in which order? Task lists, built on the host.

A task is six int32: its kind and up to five numbers. The programs of a launch claim tasks in list order
from one counter. What a task waits for (`needs`) and what it makes true (`provides`) are facts such as
("arrived", 1, 0, 3, 0): at PE 1, of source 0, local expert 3, chunk 0.

Rule. Walking the lists of all PEs from the front, one task after the other, every task finds what it needs
provided by an earlier task of its own list or by tasks of its peers that need nothing of what comes later.
So a launch finishes even where only one program per PE is resident, and the serial interpreter can run it.

    kind      numbers                        needs                              provides
    PUT       expert, chunk                  (released: an earlier launch)      arrived at the expert's PE
    TILE_IN   source, local, m, n            arrived 0 and m of the source      ready (one of the n tiles)
    TILE_OUT  source, local, m, n            ready, all n, if in this launch    returned at the source
    WGRAD     which, local, m, n             ready of all sources of the expert -
    DENSE     problem, m, n                  -                                  -
    REDUCE    block                          returned, of the tokens in it      -
    DWEIGHT   block                          (results of an earlier launch)     -

Order: puts to peers, to rank+1 first, so that rows come from rank-1 first; between them what fills the time
in which they travel, so that about `comm_programs` of the programs put while the others compute: own rows
and their tiles, independent tiles (DENSE, DWEIGHT), then the tiles of sources whose rows should be here. When
all is put, the rest of the expert tiles, source by source, the second GEMM of a source one source behind
its first; then weight gradients, which fill the time in which results travel back; the reductions, which
wait for the peers, last.

Why tiles that wait for a peer may stand before puts: those of source rank-s stand behind all own puts to
rank+1, ..., rank+s, on every PE. Were all PEs stuck, take one that waits for rows of the smallest s: they are
put by a peer that waits in a tile of an s at least as large, so behind that put.

Example, 2 PEs, one expert each, one chunk, one tile per GEMM, one program, PE 0:
    PUT(1, 0) PUT(0, 0) TILE_IN(0,0,0,0) TILE_IN(1,0,0,0) TILE_OUT(0,0,0,0) TILE_OUT(1,0,0,0) REDUCE(0)
The same with two chunks and three programs, one of them for puts to peers:
    PUT(1, 0) PUT(0, 0) PUT(0, 1) PUT(1, 1) TILE_IN(0,0,0,0) TILE_IN(0,0,1,0) TILE_IN(1,0,0,0) ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from lancet_kernels.errors import UserError

TASK_WORDS = 6
PUT, TILE_IN, TILE_OUT, WGRAD, DENSE, REDUCE, DWEIGHT = range(7)

Task = tuple[int, ...]
Fact = tuple[str | int, ...]


@dataclass(frozen=True)
class LaunchShape:
    """Everything that decides a task list; equal shapes share one list.

    Attributes:
        world, rank: PEs, and whose list this is.
        local_experts: L. chunks: chunks of rows per (source, expert), one signal each.
        put: send rows. tiles_in, tiles_out: column tiles of the first and second GEMM; 0: not in this launch.
        wgrads: (row tiles, column tiles) of each weight gradient; `which` counts them.
        dense: (row tiles, column tiles) of each independent GEMM.
        reduce_blocks: blocks of tokens to add up; 0: none.
        dweight_blocks: blocks of tokens whose gradient of the combine weights is wanted; 0: none.
        programs, comm_programs: size of the grid, and how many of it put while the others have tiles.
    """

    world: int
    rank: int
    local_experts: int
    chunks: int
    put: bool = True
    tiles_in: int = 0
    tiles_out: int = 0
    wgrads: tuple[tuple[int, int], ...] = ()
    dense: tuple[tuple[int, int], ...] = ()
    reduce_blocks: int = 0
    dweight_blocks: int = 0
    programs: int = 1
    comm_programs: int = 1

    def __post_init__(self) -> None:
        check_comm_programs(self.comm_programs, self.programs)


def check_comm_programs(comm_programs: int, programs: int) -> None:
    """Raise UserError unless some of the programs of a launch, or all, can put."""
    if not 1 <= comm_programs <= programs:
        raise UserError(
            "comm_programs",
            got=comm_programs,
            expected=f"1 to {programs} (the programs of the launch)",
            do="give communication fewer programs",
        )


def build_tasks(shape: LaunchShape) -> np.ndarray:
    """The task list of one PE. -> int32 [tasks, 6]."""
    tasks = [*_puts_and_tiles(shape), *_weight_gradients(shape)]
    tasks += [(REDUCE, block) for block in range(shape.reduce_blocks)]
    table = np.zeros((len(tasks), TASK_WORDS), dtype=np.int32)
    for row, task in zip(table, tasks, strict=True):
        row[: len(task)] = task
    return table


def _puts_and_tiles(shape: LaunchShape) -> Iterator[Task]:
    """Of every `programs` tasks `comm_programs` are puts to peers, while the others have something to do."""
    steps = range(1, shape.world) if shape.put else range(0)
    puts = [(step, put) for step in steps for put in _puts(shape, step)]
    fillers = deque(_fillers(shape))
    early: set[Task] = set()
    for start in range(0, len(puts), shape.comm_programs):
        group = puts[start : start + shape.comm_programs]
        yield from (put for _, put in group)
        through = group[-1][0] if start + len(group) < len(puts) else shape.world
        for _ in range(shape.programs - shape.comm_programs):
            if fillers and fillers[0][0] < through:
                early.add(fillers[0][1])
                yield fillers.popleft()[1]
    yield from (task for task in _in_order_of_arrival(shape) if task not in early)


def _fillers(shape: LaunchShape) -> Iterator[tuple[int, Task]]:
    """(s, task): what fills the time while others put; it stands behind all puts to rank+1, ..., rank+s."""
    own = [*_own_puts(shape), *_tiles(TILE_IN, 0, shape), *_independent_tiles(shape)]
    yield from ((0, task) for task in (*own, *_tiles(TILE_OUT, 0, shape)))
    for step in range(1, shape.world):
        yield from ((step, task) for task in _tiles(TILE_IN, step, shape))
        if step > 1:
            yield from ((step, task) for task in _tiles(TILE_OUT, step - 1, shape))


def _in_order_of_arrival(shape: LaunchShape) -> Iterator[Task]:
    """All but the puts to peers, as they come best when nothing is left to put."""
    yield from _own_puts(shape)
    yield from _independent_tiles(shape)
    for step in range(shape.world + 1):
        if step < shape.world:
            yield from _tiles(TILE_IN, step, shape)
        if step > 0:
            yield from _tiles(TILE_OUT, step - 1, shape)


def _own_puts(shape: LaunchShape) -> Iterator[Task]:
    return _puts(shape, shape.world) if shape.put else iter(())


def _puts(shape: LaunchShape, step: int) -> Iterator[Task]:
    """To rank+step; a chunk of each expert before the second chunk of any."""
    peer = (shape.rank + step) % shape.world
    for chunk, local in product(range(shape.chunks), range(shape.local_experts)):
        yield PUT, peer * shape.local_experts + local, chunk


def _independent_tiles(shape: LaunchShape) -> Iterator[Task]:
    yield from ((DWEIGHT, block) for block in range(shape.dweight_blocks))
    for problem, (rows, columns) in enumerate(shape.dense):
        yield from ((DENSE, problem, m, n) for m, n in product(range(rows), range(columns)))


def _tiles(kind: int, step: int, shape: LaunchShape) -> Iterator[Task]:
    """Of the rows that come from rank-step."""
    source = (shape.rank - step) % shape.world
    columns = shape.tiles_in if kind == TILE_IN else shape.tiles_out
    for local, m, n in product(range(shape.local_experts), range(shape.chunks), range(columns)):
        yield kind, source, local, m, n


def _weight_gradients(shape: LaunchShape) -> Iterator[Task]:
    for which, (rows, columns) in enumerate(shape.wgrads):
        for local, m, n in product(range(shape.local_experts), range(rows), range(columns)):
            yield WGRAD, which, local, m, n


def needs(task: Task, shape: LaunchShape) -> Iterator[Fact]:
    """Facts that must hold before the task can finish, if every chunk has rows (the most that can be)."""
    kind, *numbers = task
    rank, experts = shape.rank, range(shape.local_experts)
    if kind == TILE_IN:
        source, local, m, _ = numbers[:4]
        yield from {("arrived", rank, source, local, 0), ("arrived", rank, source, local, m)}
    elif kind == TILE_OUT and shape.tiles_in:
        source, local, m, _ = numbers[:4]
        yield from (("ready", rank, source, local, m, n) for n in range(shape.tiles_in))
    elif kind == WGRAD and shape.tiles_in:
        each = product(range(shape.world), range(shape.chunks), range(shape.tiles_in))
        yield from (("ready", rank, source, numbers[1], m, n) for source, m, n in each)
    elif kind == REDUCE:
        columns = range(max(shape.tiles_out, 1))
        results = product(range(shape.world), experts, range(shape.chunks), columns)
        yield from (("returned", rank, owner, local, m, n) for owner, local, m, n in results)


def provides(task: Task, shape: LaunchShape) -> Iterator[Fact]:
    """Facts that hold once the task is done."""
    kind, *numbers = task
    if kind == PUT:
        expert, chunk = numbers[:2]
        yield "arrived", expert // shape.local_experts, shape.rank, expert % shape.local_experts, chunk
    elif kind == TILE_IN:
        source, local, m, n = numbers[:4]
        yield "ready", shape.rank, source, local, m, n
    elif kind == TILE_OUT:
        source, local, m, n = numbers[:4]
        yield "returned", source, shape.rank, local, m, n
