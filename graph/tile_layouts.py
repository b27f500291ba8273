"""Which tile of an activation does each rank have, and what has to travel to another layout?
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

from lancet_kernels.graph.slices import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    LINEAR,
    Operand,
    Partition,
    Sources,
    Tile,
    all_reduces,
    begins_at_home,
    hand_over,
    shifts,
    sources,
)
from lancet_kernels.ops.redistribute import Piece, Redistribution
from lancet_kernels.ops.square_linear import Movements

UNCUT = "1"
"""Stands for a dimension that no primitive cuts."""


@dataclass(frozen=True)
class Layout:
    """Of a matrix.

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
        wanted = _box(tile, needed.slices, units)
        for held_tile, ranks in holders.items():
            rows, columns = (
                (max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(wanted, boxes_held[held_tile], strict=True)
            )
            if rows[0] < rows[1] and columns[0] < columns[1]:
                # The exclusive or is smallest where the leading bits agree, and zero for the rank itself.
                source = min(rank ^ target for rank in ranks) ^ target
                pieces.append(Piece(source, target, rows, columns))
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


def movements(
    partition: Partition, takes: Sequence[Tile] | None = None, gives: Sequence[Tile] | None = None
) -> Movements:
    """Who sends which tile to whom in the phases of a linear layer, by dimension slice indices.

    Args: takes, gives: the tile (batch, rows, features) of each device of the input that comes from another
        layer, and of the output that goes to one. None: they come and go where the phases begin and end.
    """
    (x, weight), (dy, _) = LINEAR[FORWARD].operands, LINEAR[BACKWARD].operands
    dweight, dx, y = LINEAR[GRADIENT].result, LINEAR[BACKWARD].result, LINEAR[FORWARD].result
    stay = tuple(range(partition.devices))
    is_home = begins_at_home(partition)
    kept = 0 if is_home else -1

    def between(phase: str, tensor: Operand) -> tuple[Sources, ...]:
        return shifts(partition, phase, tensor)

    def align(tensor: Operand, before: tuple[str, int], after: tuple[str, int]) -> Sources:
        return hand_over(partition, tensor, before, after)

    def tiles(phase: str, tensor: Operand, t: int) -> tuple[Tile, ...]:
        return partition.tiles(phase, tensor.dimensions, t)

    return Movements(
        x_to_forward=sources(takes, tiles(FORWARD, x, 0)) if takes else stay,
        forward_x=between(FORWARD, x),
        forward_weight=between(FORWARD, weight),
        y_from_forward=sources(tiles(FORWARD, y, -1), gives) if gives else stay,
        weight_to_backward=align(weight, (FORWARD, kept), (BACKWARD, 0)),
        dy_to_backward=sources(gives, tiles(BACKWARD, dy, 0)) if gives else stay,
        backward_dy=between(BACKWARD, dy),
        backward_weight=between(BACKWARD, weight),
        dx_from_backward=sources(tiles(BACKWARD, dx, -1), takes) if takes else stay,
        dy_to_gradient=align(dy, (BACKWARD, kept), (GRADIENT, 0)),
        dy_directly=sources(gives or tiles(BACKWARD, dy, 0), tiles(GRADIENT, dy, 0)),
        x_to_gradient=align(x, (FORWARD, kept), (GRADIENT, 0)),
        gradient_x=between(GRADIENT, x),
        gradient_dy=between(GRADIENT, dy),
        gradient_dweight=between(GRADIENT, dweight),
        dweight_to_weight=align(dweight, (GRADIENT, -1), (FORWARD, 0)),
        begins_at_home=is_home,
    )


@cache
def summing_groups(partition: Partition) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Ranks whose results are summed at the end of each phase; "bias": over whom the gradient of the bias is
    summed, which is that of a slice of the features on all ranks that have it."""
    groups = {phase: all_reduces(partition, product) for phase, product in LINEAR.items()}
    ranks_of: dict[Tile, dict[Tile, list[int]]] = defaultdict(lambda: defaultdict(list))
    rows_of = partition.tiles(BACKWARD, ("b", "m"), 0)
    for rank, features in enumerate(partition.tiles(BACKWARD, ("k",), 0)):
        ranks_of[features][rows_of[rank]].append(rank)
    bias = (zip(*by_rows.values(), strict=True) for by_rows in ranks_of.values() if len(by_rows) > 1)
    groups["bias"] = tuple(sorted(tuple(sorted(ranks)) for zipped in bias for ranks in zipped))
    return groups


def is_executable(partition: Partition) -> bool:
    """Does every shift send one tile from and one to each rank, and has a rank's output the features of the
    gradient that comes back? What `ops.square_linear` needs; with replicas in the way it may not be so."""
    derived = movements(partition)
    every = [derived.dy_directly, *(sources for _, _, sources in derived.every())]
    same_features = partition.tiles(FORWARD, ("k",), -1) == partition.tiles(BACKWARD, ("k",), 0)
    return same_features and all(sorted(s) == list(range(partition.devices)) for s in every)
