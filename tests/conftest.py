"""Fixtures of all tests."""

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# Before anything imports Triton: without a GPU kernels run in its interpreter, here and in child processes.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Before CUDA starts: a queue for each of the streams on which PEs wait for each other.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from tests.ranks import RankPool

# A shell that starts the tests in the background lets them ignore Ctrl-C, and with them all they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# They watch the clock, kill processes, or need both cores for ranks that wait for each other.
ALONE = {
    "test_benchmarks.py",
    "test_launch.py",
    "test_link.py",
    "test_netns.py",
    "test_overlap_bad_input.py",
    "test_overlap_kernel.py",
    "test_overlap_protocol.py",
    "test_ranks.py",
    "test_shared.py",
    "test_strategies.py",
    "test_train.py",
    "test_wire.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard", default="0/1", help="i/n: run every n-th test from the i-th on, 0 is the first"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With -m gpu look only at files with such tests: a GPU machine may lack what others import.
    With -m alone, too: to import all the others takes longer than many a test."""
    marks = config.getoption("-m")
    if collection_path.suffix != ".py" or not marks.startswith(("gpu", "alone")):
        return None
    text = collection_path.read_text(encoding="utf-8")
    if marks.startswith("alone"):
        return None if collection_path.name in ALONE or "mark.alone" in text else True
    # By their mark, or by the fixture of tests/lancet_kernels/kernels/conftest.py.
    chosen = "mark.gpu" in text or "device: torch.device" in text
    lacking = "from hypothesis" in text and find_spec("hypothesis") is None
    return None if chosen and not lacking else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in ALONE:
            item.add_marker(pytest.mark.alone)
    index, count = map(int, config.getoption("--shard").split("/"))
    items[:] = items[index::count]


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Worker processes that run functions of a test file as the ranks of a job."""
    pool = RankPool()
    yield pool
    pool.close()
