"""Benchmarks: `pytest bench --benchmark-only`. On a GPU by events with a cold L2; on a CPU small, as a proof.

`pytest bench --benchmark-disable` runs each once, small, and measures nothing.

What a benchmark is compared with is in its group (kernel and workload); `extra_info` has FLOPs, bytes, the
least time that these can take (roofline) and the share of it that was reached. Without a GPU our kernels run
in Triton's interpreter: such a time is a proof that they run and nothing else, and says so.
"""

import os
import platform
import statistics
from collections.abc import Callable

import pytest
import torch

# Before anything imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
from bench.roofline import hardware_of, roofline_ms
from lancet_kernels.measuring.timing import Clock
from lancet_kernels.tuning.workloads import WORKLOADS, Workload

ON_GPU = torch.cuda.is_available()
INTERPRETER = "interpreter: proof, not speed"
SMALL = "CPU, small: says nothing about a GPU"
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
    """The real one on a GPU; on a CPU a small one of its sort."""
    found = WORKLOADS[request.param]
    return found if ON_GPU else found.small()


@pytest.fixture
def measure(benchmark, dtype: torch.dtype) -> Callable[..., None]:
    """measure(run, group=.., name=.., ours=.., workload=.., flops=.., moved_bytes=..): time and note it.

    ours: do our Triton kernels run in it? role: "fused", "gemm" or "communication", from which the report
    makes eta = max(gemm, communication) / fused of a group.
    """

    def time_it(
        run: Callable[[], object],
        *,
        group: str,
        name: str,
        ours: bool,
        workload: Workload | None = None,
        flops: float = 0.0,
        moved_bytes: float = 0.0,
        work_dtype: torch.dtype = dtype,
        role: str | None = None,
        rounds: int = ROUNDS,
        warmup: int = WARMUP,
    ) -> None:
        benchmark.group = group if workload is None else f"{group} {workload.name}"
        benchmark.pedantic(run, setup=CLOCK.prepare, rounds=rounds, warmup_rounds=warmup, iterations=1)
        info = {"kernel": group, "contender": name, "ours": ours, "role": role, "device": device_name()}
        if workload is not None:
            info |= {"workload": str(workload), "dtype": str(work_dtype).removeprefix("torch.")}
        if flops or moved_bytes:
            info |= {"flops": flops, "bytes": moved_bytes}
        if not ON_GPU and workload is not None:
            info["label"] = INTERPRETER if ours else SMALL
        elif ON_GPU and benchmark.enabled and (flops or moved_bytes):
            median_ms = statistics.median(benchmark.stats.stats.data) * 1e3
            info |= roofline(flops, moved_bytes, work_dtype, median_ms)
        benchmark.extra_info.update(info)

    return time_it


def device_name() -> str:
    return torch.cuda.get_device_name() if ON_GPU else f"CPU {platform.machine()}"


def roofline(flops: float, moved_bytes: float, dtype: torch.dtype, median_ms: float) -> dict[str, object]:
    """What `extra_info` says about the bound; peaks are the vendor's (`roofline.HARDWARE`)."""
    major, minor = torch.cuda.get_device_capability()
    hardware = hardware_of(10 * major + minor, torch.cuda.get_device_name())
    least_ms = roofline_ms(flops, moved_bytes, dtype, hardware)
    return {
        "peaks": hardware.name,
        "peak_tflops": hardware.tflops(dtype),
        "peak_gb_per_s": hardware.memory_gb_per_s,
        "roofline_ms": least_ms,
        "roofline_share": least_ms / median_ms,
        "tflops": flops / median_ms * 1e-9,
        "gb_per_s": moved_bytes / median_ms * 1e-6,
    }
