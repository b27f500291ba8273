"""Predictions are planned without local search: it has tests of its own (`test_best_order.py`), and takes a
third of the time."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def without_local_search() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lancet_kernels.schedules.order.best_order.SIMULATED", 0)
        yield
