"""Fixtures of all tests."""

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# Before anything imports torch or numpy: tensors of tests are small, and workers of xdist share the cores.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

# Before anything imports Triton: without a GPU kernels run in its interpreter, here and in child processes.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Before anything imports the library, here and in child processes: ranks that disagree are named.
os.environ["LANCET_CHECK"] = "1"

# Before CUDA starts: a queue for each of the streams on which PEs wait for each other.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from tests.ranks import RankPool

if find_spec("hypothesis") is not None:
    from tests.examples import load_quick_profile

    load_quick_profile()

# A shell that starts the tests in the background lets them ignore Ctrl-C, and with them all they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Their processes are killed, or use both cores and wait for each other with a limit: one after the other.
ALONE = {
    "test_launch.py",
    "test_overlap_bad_input.py",
    "test_overlap_kernel.py",
    "test_overlap_protocol.py",
    "test_ranks.py",
    "test_shared.py",
    "test_train.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--minutes",
        type=float,
        help="start no test after so many minutes; long ones come first, one case of each before a second",
    )
    parser.addoption("--backwards", action="store_true", help="the last test first")


def pytest_configure(config: pytest.Config) -> None:
    # The workers of xdist get this process's options, and so the same end.
    if config.option.minutes is not None and not hasattr(config.option, "until"):
        config.option.until = time.time() + 60 * config.option.minutes


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With -m gpu look only at files with such tests: a GPU machine may lack what others import."""
    if collection_path.suffix != ".py" or not config.getoption("-m").startswith("gpu"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    # By their mark, or by the fixture of tests/lancet_kernels/kernels/conftest.py.
    chosen = "mark.gpu" in text or "device: torch.device" in text
    lacking = "from hypothesis" in text and find_spec("hypothesis") is None
    return None if chosen and not lacking else True


def group_of(item: pytest.Item) -> str | None:
    """The tests of a group run in one process, one after the other."""
    if item.path.name in ALONE or item.get_closest_marker("alone"):
        return "alone"
    if hasattr(item.module, "read_only_step"):
        return "captured"  # captured steps are kept by the process
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    shared = any(fixture.scope == "module" for definitions in fixtures for fixture in definitions)
    return item.path.stem if shared else None


@pytest.hookimpl(wrapper=True)  # before the workers of xdist read the groups, which is its first hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    xdist = config.pluginmanager.hasplugin("xdist")  # a GPU machine may lack it
    for item in items:
        if xdist and (group := group_of(item)):
            item.add_marker(pytest.mark.xdist_group(group))
    if config.option.minutes is not None:
        seen, order = Counter(), {}
        for item in items:
            function = item.nodeid.partition("[")[0]
            # `make test` has run the short ones.
            order[item] = (item.get_closest_marker("long") is None, seen[function])
            seen[function] += 1
        items.sort(key=order.__getitem__)
    if config.option.backwards:
        items.reverse()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > getattr(item.config.option, "until", math.inf):
        pytest.skip("not reached within --minutes")


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Worker processes that run functions of a test file as the ranks of a job."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool_of_16() -> Iterator[RankPool]:
    """Sixteen of them, for the tests of one file."""
    pool = RankPool(16)
    yield pool
    pool.close()
