"""The pool of ranks: what it returns, and what it says when a worker fails, dies or hangs."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, RankPool


@pytest.fixture
def own_pool():
    """A pool that may be broken without slowing other tests down."""
    pool = RankPool()
    yield pool
    pool.close()


def total(value: int) -> tuple[int, int, int]:
    number = torch.tensor(value + dist.get_rank())
    dist.all_reduce(number)
    return dist.get_rank(), dist.get_world_size(), number.item()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("seven is too many")
    dist.barrier()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_each_rank_returns_its_result(pool):
    assert pool.run(total, 3, ranks=2) == [(0, 2, 7), (1, 2, 7)]
    assert pool.run(total, 0, ranks=4) == [(rank, 4, 6) for rank in range(4)]
    assert pool.run(total, 5, ranks=1) == [(0, 1, 5)]


def test_first_error_is_raised_and_the_workers_go_on(pool):
    pool.run(total, 0)
    before = pool.pids()
    with pytest.raises(RankError, match=r"rank 1: (?s:.*)ValueError: seven is too many"):
        pool.run(fail_on_rank_1)
    assert pool.run(total, 3) == [(0, 2, 7), (1, 2, 7)]
    assert pool.pids() == before


def test_dead_and_hanging_workers_are_named_and_replaced(own_pool):
    with pytest.raises(RankError, match=r"die_on_rank_1: rank 1 died \(exit code -9\)"):
        own_pool.run(die_on_rank_1)
    with pytest.raises(RankError, match=r"hang_on_rank_1: no answer from rank\(s\) \[0, 1\] within 1 s"):
        own_pool.run(hang_on_rank_1, timeout_s=1.0)
    assert own_pool.pids() == []
