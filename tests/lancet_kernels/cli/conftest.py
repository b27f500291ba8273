"""Fixtures of the tests of `lancet plan` and `lancet explain`."""

from collections.abc import Iterator
from functools import lru_cache
from unittest import mock

import pytest

from lancet_kernels.predict import simulate


@pytest.fixture(autouse=True, scope="module")
def planned_once() -> Iterator[None]:
    """Most tests of a file look at the same plans."""
    with mock.patch.object(simulate, "simulate_setting", lru_cache(simulate.simulate_setting)):
        yield
