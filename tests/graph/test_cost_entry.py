"""Times between measured launches: the example of the docstring, the points themselves, and the ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lancet_kernels.graph.cost_entry import CostEntry, CostPoint, LayerKind
from tests.graph.cost_points import cost_entry, fast, made_up_points

KIND = LayerKind(2048, 2048, "gelu", "bfloat16", 8)


def entry_of(*points: tuple[int, float, float]) -> CostEntry:
    """Of backward launches (rows, rider FLOPs, ms)."""
    return replace(cost_entry(KIND), points=tuple(CostPoint("backward", *point) for point in points))


EXAMPLE = entry_of((1000, 0.0, 1.0), (1000, 2e9, 1.2), (3000, 0.0, 2.0), (3000, 2e9, 2.0))


@pytest.mark.parametrize(
    ("rows", "rider_flops", "expected"),
    [(2000, 1e9, 1.55), (500, 0.0, 1.0), (4000, 0.0, 2.5), (1000, 2e9, 1.2), (3000, 0.0, 2.0)],
)
def test_the_example_of_the_docstring(rows: float, rider_flops: float, expected: float) -> None:
    assert EXAMPLE.milliseconds("backward", rows, rider_flops) == pytest.approx(expected)


def test_every_point_is_met_and_what_is_linear_is_met_everywhere() -> None:
    entry = cost_entry(KIND)
    for point in entry.points:
        assert entry.milliseconds(point.direction, point.rows, point.rider_flops) == pytest.approx(point.ms)
    for rows in (16384, 20000, 40000, 65536, 100000):
        assert entry.milliseconds("forward", rows) == pytest.approx(fast("forward", rows, 0.0))
        for flops in (0.0, 3e10, 2e11, 4e11):
            assert entry.milliseconds("backward", rows, flops) == pytest.approx(fast("backward", rows, flops))


def test_times_do_not_fall_beyond_the_most_rows() -> None:
    assert entry_of((1000, 0.0, 2.0), (2000, 0.0, 1.9)).milliseconds("backward", 9000) == 1.9


def test_the_most_rider_flops_are_those_of_all_numbers_of_rows() -> None:
    assert EXAMPLE.most_rider_flops("backward") == 2e9
    fewer = entry_of((1000, 0.0, 1.0), (1000, 2e9, 1.2), (3000, 0.0, 2.0), (3000, 1e9, 2.0))
    assert fewer.most_rider_flops("backward") == 1e9
    assert entry_of((1000, 0.0, 1.0), (3000, 0.0, 2.0)).most_rider_flops("backward") == 0.0


def test_one_number_of_rows_is_too_few() -> None:
    cost_entry(KIND).check_enough()
    points = [p for p in made_up_points() if p.direction == "forward" or p.rows == 16384]
    with pytest.raises(ValueError, match="backward launches with 1 numbers of rows, at least 2"):
        replace(cost_entry(KIND), points=tuple(points)).check_enough()
    with pytest.raises(ValueError, match="forward launches with 0 numbers of rows"):
        replace(cost_entry(KIND), points=()).check_enough()


@pytest.mark.parametrize(
    "point",
    [("up", 1, 0.0, 1.0), ("forward", -1, 0.0, 1.0), ("forward", 1, float("inf"), 1.0),
     ("forward", 1, 0.0, 0.0), ("forward", 1, 0.0, None), ("forward", True, 0.0, 1.0)],
)  # fmt: skip
def test_points_that_no_clock_gives_are_refused(point: tuple) -> None:
    with pytest.raises(ValueError, match=r"is|direction"):
        CostPoint(*point)
