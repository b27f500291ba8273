"""Fixtures of all tests."""

import os
from collections.abc import Iterator

import pytest
import torch

# Before anything imports Triton: without a GPU kernels run in its interpreter, here and in child processes.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Worker processes that run functions of a test file as the ranks of a job."""
    pool = RankPool()
    yield pool
    pool.close()
