"""Groups of ranks that are not there."""

import tracemalloc

import pytest

from lancet_kernels.ops.comm.groups import groups_of_all_ranks
from lancet_kernels.predict.own_step import fake_ranks


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([0, 1], [[0, 1], [2, 3]]),
        ([0, 2], [[0, 2], [1, 3]]),
        ([0, 1, 2, 3], [[0, 1, 2, 3]]),
    ],
)
def test_of_fake_ranks_all_groups_have_one_shape(ranks, expected):
    with fake_ranks(4):
        assert groups_of_all_ranks(ranks) == expected


def test_a_group_of_very_many_fake_ranks_is_kept_once():
    """And not for each of its ranks, which a plan for a million GPUs would never be done with."""
    ranks = list(range(2000))
    with fake_ranks(len(ranks)):
        tracemalloc.start()
        try:
            assert groups_of_all_ranks(ranks) == [ranks]
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
