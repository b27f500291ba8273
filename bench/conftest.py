"""Benchmarks: `pytest bench --benchmark-only`. On a GPU by events with a cold L2; on a CPU small, as a proof.

`pytest bench --benchmark-disable` runs each once, small, and measures nothing.

Contenders are in one group (kernel and workload). Without a GPU our kernels run in Triton's interpreter: such
a time only proves that they run, and is labelled so. On a GPU, `make gpu` measures the fused launches.
"""

import os
import platform
from collections.abc import Callable

import pytest
import torch

# Before anything imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
from lancet_kernels.measure.fused_pass import WORKLOADS, Workload
from lancet_kernels.timing import Clock

ON_GPU = torch.cuda.is_available()
INTERPRETER = "interpreter: proof, not speed"
SMALL = "CPU, small: says nothing about a GPU"
DEVICE_NAME = torch.cuda.get_device_name() if ON_GPU else f"CPU {platform.machine()}"
ROUNDS, WARMUP = (20, 3) if ON_GPU else (1, 0)
CLOCK = Clock(torch.device("cuda" if ON_GPU else "cpu"))


def read_clock() -> float:
    """Seconds of `CLOCK`, for pytest-benchmark, which names its timer in its report."""
    return CLOCK.read()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let pytest-benchmark read CUDA events."""
    if ON_GPU:
        for item in items:
            item.add_marker(pytest.mark.benchmark(timer=read_clock))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return CLOCK.device


@pytest.fixture(scope="session")
def dtype() -> torch.dtype:
    """bf16 on a GPU. float32 in the interpreter, where bf16 products are emulated."""
    return torch.bfloat16 if ON_GPU else torch.float32


@pytest.fixture(params=list(WORKLOADS))
def workload(request: pytest.FixtureRequest) -> Workload:
    """The real one on a GPU; on a CPU a small one of its kind."""
    real = WORKLOADS[request.param]
    return real if ON_GPU else real.small()


@pytest.fixture
def measure(benchmark, dtype: torch.dtype) -> Callable[..., None]:
    """measure(run, group=.., name=.., ours=.., workload=..): time it, with these facts in the report. ours:
    whether our Triton kernels run in it."""

    def time_it(
        run: Callable[[], object],
        *,
        group: str,
        name: str,
        ours: bool,
        workload: Workload | None = None,
        rounds: int = ROUNDS,
        warmup: int = WARMUP,
    ) -> None:
        benchmark.group = group if workload is None else f"{group} {workload.name}"
        benchmark.pedantic(run, setup=CLOCK.prepare, rounds=rounds, warmup_rounds=warmup, iterations=1)
        info = {"kernel": group, "contender": name, "ours": ours, "device": DEVICE_NAME}
        if workload is not None:
            info |= {"workload": str(workload), "dtype": str(dtype).removeprefix("torch.")}
            if not ON_GPU:
                info["label"] = INTERPRETER if ours else SMALL
        benchmark.extra_info.update(info)

    return time_it
