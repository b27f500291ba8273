"""What does one launch of the square kernel do, and in which order?

    PUT   t, operand, chunk     a chunk of the operand of step t, to where step t + 1 needs it
    TILE  t, m, n               a tile of the product of step t

Step by step; of every `programs` tasks `comm_programs` are puts, as long as there are any of the step, so
that tiles travel while others are multiplied.

Example, 2 steps, two tiles, one chunk of each operand, two programs of which one puts:
    PUT(0, 0, 0) TILE(0, 0, 0) PUT(0, 1, 0) TILE(0, 0, 1) TILE(1, 0, 0) TILE(1, 0, 1)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import triton.language as tl

PUT = tl.constexpr(0)
TILE = tl.constexpr(1)
# Of a task: its kind and three numbers.
TASK_WORDS = tl.constexpr(4)


@dataclass(frozen=True)
class SquareShape:
    """Everything that decides a list.

    Attributes:
        steps: of the phase. chunks: of operand a and b. tiles: rows and columns of them.
        programs: size of the grid. comm_programs: how many put while the others multiply.
    """

    steps: int
    chunks: tuple[int, int]
    tiles: tuple[int, int]
    programs: int = 1
    comm_programs: int = 1


def build_square_tasks(shape: SquareShape) -> np.ndarray:
    """-> int32 [tasks, 4]."""
    tasks: list[tuple[int, int, int, int]] = []
    beside = max(1, shape.programs - shape.comm_programs)
    for t in range(shape.steps):
        puts = []
        if t + 1 < shape.steps:
            # A chunk of each operand before the second chunk of any.
            puts = [
                (PUT.value, t, operand, chunk)
                for chunk in range(max(shape.chunks))
                for operand in (0, 1)
                if chunk < shape.chunks[operand]
            ]
        tiles = [(TILE.value, t, m, n) for m, n in product(*map(range, shape.tiles))]
        while puts:
            tasks += puts[: shape.comm_programs] + tiles[:beside]
            puts, tiles = puts[shape.comm_programs :], tiles[beside:]
        tasks += tiles
    return np.array(tasks, dtype=np.int32)
