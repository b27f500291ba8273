"""How times of rounds are compared."""

import statistics

import pytest

from lancet_kernels.optimization.trial import typical


def test_a_drifting_machine_does_not_change_who_is_faster() -> None:
    slow = [10.0, 11.0, 12.0, 13.0, 14.0]
    fast = [100.0, *(0.97 * ms for ms in slow[1:])]  # something else ran in the first round
    assert statistics.median(fast) > statistics.median(slow)
    times = typical({"slow": slow, "fast": fast})
    assert times["fast"] / times["slow"] == pytest.approx(0.97)


def test_a_steady_machine_gives_the_medians() -> None:
    assert typical({"one": [3.0, 3.0], "other": [5.0, 5.0]}) == pytest.approx({"one": 3.0, "other": 5.0})
    assert typical({"alone": [1.0, 2.0, 9.0]}) == pytest.approx({"alone": 2.0})
