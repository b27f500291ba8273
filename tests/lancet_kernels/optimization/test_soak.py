"""A process that trains for long, and one that plans again and again, stays as large as it was: memory, open
files, threads, shared memory."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.optimized import optimized
from tests.setups import Model, batch

MOST_MB = 16.0
"""By so much memory may grow behind the warm-up: what the allocator keeps differs by some MB. A leak of a
kilobyte in each of 2,000 steps is 2 MB, of a tensor that a step keeps, here a MB, 2 GB."""
Use = dict[str, float]


def use() -> Use:
    """What this process uses now."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed goes back to the system
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "in /dev/shm": sum(f"-{os.getpid()}-" in name for name in os.listdir("/dev/shm")),
    }


def grown(repeated: Callable[[int], object], warm_up: int, times: int) -> tuple[Use, Use]:
    """What is used after so many times, and after so many more."""
    for number in range(warm_up):
        repeated(number)
    before = use()
    for number in range(times):
        repeated(warm_up + number)
    return before, use()


def of_steps(times: int) -> tuple[Use, Use]:
    """Steps of a plan, which an optimizer follows; batches of two sizes."""
    model = Model()
    ready = optimized(model, batch(), "lancet-dw", compare_every=10)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        ready(*batch(number, 4 - number % 2)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return grown(step, 20, times)


def of_plans(times: int) -> tuple[Use, Use]:
    """`optimize` and a step with it, each time of a new model."""

    def plan(number: int) -> None:
        optimized(Model(), batch(), "lancet-dw")(*batch(number)).backward()
        torch.compiler.reset()

    return grown(plan, 20, times)  # until then the allocator grows


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize(("what", "times"), [(of_steps, 2000), (of_plans, 20)])
def test_level(pool, what: Callable, times: int) -> None:
    for before, after in pool.run(what, times, timeout_s=3600, collective_timeout_s=120):
        print(what.__name__, times, before, after)
        assert after["MB"] - before["MB"] < MOST_MB
        assert {name: after[name] - before[name] for name in before if name != "MB"} == {
            "files": 0, "threads": 0, "in /dev/shm": 0,
        }  # fmt: skip
