"""Redistribution by dimension slices: every rank gets each element of its tile once, from a rank that has it,
and from itself where it can; movements and sums of partitions."""

from itertools import product

import numpy as np
import pytest

from lancet_kernels.graph.rules.slices import (
    BACKWARD,
    FORWARD,
    Partition,
    home_square,
    replicate,
    split,
    square,
)
from lancet_kernels.graph.rules.tile_layouts import (
    is_executable,
    layout_of,
    movements,
    redistribution,
    summing_groups,
)
from tests.grids import few_of

M, N, K, ONE, P2 = split("m"), split("n"), split("k"), replicate(), home_square(1, "n")
PARTITIONS = [(M, N, K), (P2, M), (ONE, K, N), (K, P2), (ONE, ONE, ONE), (M, M, ONE), (N, N, N)]
TENSORS = [(FORWARD, ("m", "n"), 0), (FORWARD, ("m", "k"), -1), (BACKWARD, ("m", "n"), -1)]
SHAPE = (16, 24)


@pytest.mark.parametrize(
    ("before", "after"),
    # Each against two or three others, as what was and as what comes.
    few_of(list(product(PARTITIONS, PARTITIONS))[::3], *range(0, 17, 2)),
)
def test_every_element_comes_once_from_a_rank_that_has_it(before: tuple, after: tuple) -> None:
    for one, other in product(TENSORS, TENSORS):
        held, needed = (
            layout_of(Partition(p), phase, dimensions, t)
            for p, (phase, dimensions, t) in ((before, one), (after, other))
        )
        plan = redistribution(held, needed)

        def inside(spans, units=plan.units):
            mask = np.zeros(SHAPE, bool)
            sides = zip(spans, SHAPE, units, strict=True)
            mask[tuple(slice(begin * size // n, end * size // n) for (begin, end), size, n in sides)] = True
            return mask

        for rank, box in enumerate(plan.needed):
            times = np.zeros(SHAPE, int)
            for piece in plan.pieces:
                if piece.target == rank:
                    where = inside((piece.rows, piece.columns))
                    assert inside(plan.held[piece.source])[where].all(), "sent by a rank that has it not"
                    # What it has itself does not travel.
                    assert piece.source == rank or not inside(plan.held[rank])[where].any()
                    times += where
            assert (times == inside(box)).all()


def test_sums_of_megatrons_split() -> None:
    """Columns: dI is summed; rows: O is; rows of the batch: dW and the bias' gradient are."""
    columns, rows, data = (summing_groups(Partition((p, p))) for p in (K, N, M))
    everybody = ((0, 1, 2, 3),)
    assert columns == ((), everybody, (), ())
    assert rows == (everybody, (), (), ())
    assert data == ((), (), everybody, everybody)


def test_sums_of_a_square_and_a_split() -> None:
    """The square sums nothing; of the bias' gradient it has a row of slices in each row of ranks."""
    forward, backward, gradient, bias = summing_groups(Partition((N, P2)))
    assert forward == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert backward == gradient == ()
    assert bias == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_what_moves_between_steps() -> None:
    """Both operands of each phase, of 8 ranks in two squares; each rank gets one tile."""
    moves = movements(Partition((P2, K)))
    assert [len(steps) for steps in moves] == [1] * 6
    for (sources,) in moves:
        assert sorted(sources) == list(range(8))
        assert any(source != rank for rank, source in enumerate(sources))


def test_a_square_whose_phases_follow_each_other_cannot() -> None:
    """The slides' square: what it begins with is not what a rank keeps."""
    assert not is_executable(Partition((square(1),)))
    assert not is_executable(Partition((K, square(1))))
