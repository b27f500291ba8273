"""Tiles of an activation on each rank, and transfers to another layout.
(PrimePar, slides "Inter-operator communication: redistribution between operators")

Activations here are matrices [rows, features], so a partition cuts rows by its dimension `m` and features by
`n`, `k` or `h`. Pieces of a redistribution follow from comparing tiles: a rank takes what it has itself, the
rest from the nearest rank that has it.

Example, 2 ranks: from rows in halves to features in halves, rank 0 keeps the upper left quarter and gets the
lower left one from rank 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from lancet_kernels.graph.rules.slices import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    LINEAR,
    Partition,
    Tile,
    all_reduces,
    begins_at_home,
    hand_over,
    moves,
    nearest,
    shifts,
)
from lancet_kernels.ops.comm.redistribute import Piece, Redistribution
from lancet_kernels.ops.square_linear import Movements

UNCUT = "1"
"""Stands for a dimension that no primitive cuts."""


@dataclass(frozen=True)
class Layout:
    """The layout of a matrix on the ranks.

    Attributes:
        slices: how many slices rows and features are cut into.
        tiles: slice of the rows and slice of the features, for each rank.
    """

    slices: tuple[int, int]
    tiles: tuple[Tile, ...]


def layout_of(partition: Partition, phase: str, dimensions: tuple[str, str], t: int) -> Layout:
    """The tiles of a tensor with these dimensions at one step."""
    rows, features = (partition.slices(d) for d in dimensions)
    return Layout((rows, features), partition.tiles(phase, dimensions, t))


@lru_cache(maxsize=1000)
def redistribution(held: Layout, needed: Layout) -> Redistribution:
    """The pieces that go from rank to rank; layouts are cut into powers of two."""
    units = tuple(max(a, b) for a, b in zip(held.slices, needed.slices, strict=True))
    holders: dict[Tile, list[int]] = defaultdict(list)
    for rank, tile in enumerate(held.tiles):
        holders[tile].append(rank)
    boxes_held = {tile: _box(tile, held.slices, units) for tile in holders}
    pieces = []
    for target, tile in enumerate(needed.tiles):
        box = _box(tile, needed.slices, units)
        for held_tile, ranks in holders.items():
            rows, columns = (
                (max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(box, boxes_held[held_tile], strict=True)
            )
            if rows[0] < rows[1] and columns[0] < columns[1]:
                pieces.append(Piece(nearest(ranks, target), target, rows, columns))
    return Redistribution(
        (units[0], units[1]),
        tuple(_box(tile, held.slices, units) for tile in held.tiles),
        tuple(_box(tile, needed.slices, units) for tile in needed.tiles),
        tuple(pieces),
    )


def _box(tile: Tile, slices: Sequence[int], units: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Begin and end of rows and features, in units."""
    rows, features = ((i * u // s, (i + 1) * u // s) for i, s, u in zip(tile, slices, units, strict=True))
    return rows, features


@cache
def movements(partition: Partition) -> Movements:
    """Transfers of tiles in the phases of a linear layer, from dimension slice indices."""
    (x, weight), dy = LINEAR[FORWARD].operands, LINEAR[BACKWARD].operands[0]
    return Movements(
        forward_x=shifts(partition, FORWARD, x),
        forward_weight=shifts(partition, FORWARD, weight),
        backward_dy=shifts(partition, BACKWARD, dy),
        backward_weight=shifts(partition, BACKWARD, weight),
        gradient_x=shifts(partition, GRADIENT, x),
        gradient_dy=shifts(partition, GRADIENT, dy),
    )


@cache
def summing_groups(partition: Partition) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Ranks whose results are summed at the end of forward, backward and gradient; and over whom the gradient
    of the bias is summed, which is that of a slice of the features on all ranks that have it."""
    groups = [all_reduces(partition, LINEAR[phase]) for phase in (FORWARD, BACKWARD, GRADIENT)]
    ranks_of: dict[Tile, dict[Tile, list[int]]] = defaultdict(lambda: defaultdict(list))
    rows_of = partition.tiles(BACKWARD, ("b", "m"), 0)
    for rank, features in enumerate(partition.tiles(BACKWARD, ("k",), 0)):
        ranks_of[features][rows_of[rank]].append(rank)
    bias = (zip(*by_rows.values(), strict=True) for by_rows in ranks_of.values() if len(by_rows) > 1)
    return (*groups, tuple(sorted(tuple(sorted(ranks)) for zipped in bias for ranks in zipped)))


def is_executable(partition: Partition) -> bool:
    """Can `ops.square_linear` run it? Every phase begins with the tiles that the forward began with, the
    gradient of a weight stays, a rank's output has the features of the gradient that comes back, and every
    shift sends one tile from and one to each rank (with replicas not every one does)."""
    dweight, everyone = LINEAR[GRADIENT].result, list(range(partition.devices))
    home = hand_over(partition, dweight, (GRADIENT, -1), (FORWARD, 0))
    stays = [*shifts(partition, GRADIENT, dweight), home]
    same_features = partition.tiles(FORWARD, ("k",), -1) == partition.tiles(BACKWARD, ("k",), 0)
    return (
        begins_at_home(partition)
        and not any(map(moves, stays))
        and same_features
        and all(sorted(step) == everyone for steps in movements(partition) for step in steps)
    )
