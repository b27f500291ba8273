"""Fixtures of all tests."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Worker processes that run functions of a test file as the ranks of a job."""
    pool = RankPool()
    yield pool
    pool.close()
