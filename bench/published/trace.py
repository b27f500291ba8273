"""DeepSeek's public trace of one forward and one backward in pairs, beside the clock of all plans:
`python -m bench.published.trace PATH`.

PATH is the reader's copy of `train.json` (deepseek-ai/profile-data; it has no licence and is not shipped).
The trace gives the time of each stage and the order in which they were issued; the clock says when each
stage starts. What the measured step takes longer is what the clock does not know.

Two constants of the cluster files come from it: `message_beside`, the time of the kernels that carry tokens
beside computation over what DeepEP's documentation gives for them alone, and `host_us`, the host's time for a
launch over what the profiler adds to it (measured here, on small CPU operators).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lancet_kernels.errors import UserError
from lancet_kernels.schedules.time.clock import INFINITY, Clock
from lancet_kernels.schedules.time.simulate import Times

_STAGE = re.compile(r"(\w+)\((F|B|W)\)")
_CARRIES = re.compile(r"internode::(dispatch|combine)<")
_MESSAGES = ("dispatch", "combine")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Stage:
    """A stage as it was issued: "attn", "mlp", "dispatch" or "combine", of the forward F, of the backward B
    or of its weight gradients W. ms: the time in which at least one of its kernels runs; carry_ms: of those
    that carry tokens. host_ms: the host's time for its launches."""

    name: str
    phase: str
    ms: float
    carry_ms: float
    host_ms: float
    launches: int

    @property
    def is_message(self) -> bool:
        return self.name in _MESSAGES


@dataclass(frozen=True)
class Trace:
    """Stages in the order of issue, and the milliseconds from the first kernel to the end of the last."""

    stages: tuple[Stage, ...]
    ms: float


def read_trace(path: str | Path) -> Trace:
    """The stages of a trace of PyTorch's profiler whose annotations are named like `attn(F)`.

    A kernel belongs to the stage during which the host launched it.
    Raises: UserError for a file without such annotations and kernels.
    """
    try:
        events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            "trace", got=f"{path} ({type(error).__name__})", expected="a trace of PyTorch's profiler",
            do="give the path of train.json",
        ) from error  # fmt: skip
    complete = [e for e in events if e.get("ph") == "X"]
    named = sorted((e for e in complete if _STAGE.fullmatch(e["name"])), key=lambda e: e["ts"])
    kernels = [e for e in complete if e.get("cat") == "kernel"]
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in complete
        if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", {})
    }
    if not named or not kernels:
        raise UserError(
            "trace", got=f"{path} without stages or kernels", expected="annotations like attn(F)",
            do="give the path of train.json",
        )  # fmt: skip
    busy: dict[int, list[tuple[float, float]]] = defaultdict(list)
    carrying: dict[int, float] = defaultdict(float)
    for kernel in kernels:
        at = launched.get(kernel["args"].get("correlation"), float("inf"))
        stage = next((n for n, e in enumerate(named) if e["ts"] <= at <= e["ts"] + e["dur"]), None)
        if stage is not None:
            busy[stage].append((kernel["ts"], kernel["ts"] + kernel["dur"]))
            if _CARRIES.search(kernel["name"]):
                carrying[stage] += kernel["dur"] * 1e-3
    stages = []
    for n, event in enumerate(named):
        match = _STAGE.fullmatch(event["name"])
        assert match is not None
        stages.append(
            Stage(match[1], match[2], _union(busy[n]) * 1e-3, carrying[n], event["dur"] * 1e-3, len(busy[n]))
        )
    first = min(e["ts"] for e in kernels)
    last = max(e["ts"] + e["dur"] for e in kernels)
    return Trace(tuple(stages), (last - first) * 1e-3)


def _union(intervals: list[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def replayed(stages: Sequence[Stage], *, overlap: bool = True) -> Times:
    """The clock's times of the stages, computation and messages each in their order. A message waits for the
    stage before it in its chain only, as DeepEP's do (an event), not for what else was issued before.

    Stages of the forward wait for one another, those of the backward, too; weight gradients for the stage of
    the backward with their name. overlap: False: computation waits for messages.
    """
    clock: Clock[int] = Clock()
    last: dict[str, int] = {}
    for n, stage in enumerate(stages):
        before = last.get(f"{stage.name} B" if stage.phase == "W" else stage.phase)
        after = () if before is None else (before,)
        if stage.is_message:
            clock.send(n, stage.ms, after, issued_at=0.0 if overlap else None)
            if not overlap:
                clock.finish(n)
        else:
            clock.compute(n, stage.ms, after)
        last[f"{stage.name} {stage.phase}"] = n
        if stage.phase != "W":
            last[stage.phase] = n
    clock.catch_up(INFINITY)
    return Times(clock.start, clock.end, range(len(stages)), clock.sent)


def summary(trace: Trace) -> dict[str, float]:
    """Measured and replayed milliseconds, and the share of the messages that computation hides."""
    replay = replayed(trace.stages)
    messages = sum(stage.ms for stage in trace.stages if stage.is_message)
    return {
        "measured_ms": trace.ms,
        "replayed_ms": replay.iteration_ms,
        "error": replay.iteration_ms / trace.ms - 1,
        "without_overlap_ms": replayed(trace.stages, overlap=False).iteration_ms,
        "compute_ms": sum(stage.ms for stage in trace.stages if not stage.is_message),
        "messages_ms": messages,
        "hidden": 1 - replay.exposed_ms / messages,
        "message_beside": message_beside(trace),
        "launch_us": launch_us(trace),
    }


def message_beside(trace: Trace) -> float:
    """How many times as long the kernels that carry tokens take beside computation as alone.

    Alone: 4,096 tokens of 7,168 numbers go to 4 nodes each at the 51 GB/s of DeepEP's docs/legacy.md, two
    times as 8-bit numbers (dispatches) and two times in bfloat16 (combines) for each layer.
    """
    layers = sum(1 for stage in trace.stages if (stage.name, stage.phase) == ("dispatch", "F"))
    alone = layers * 4096 * 7168 * 4 * (1 + 1 + 2 + 2) / 51e9 * 1e3
    return sum(stage.carry_ms for stage in trace.stages) / alone


def launch_us(trace: Trace) -> float:
    """The host's microseconds for a launch, with the profiler; without dispatch(F), in which it waits."""
    stages = [stage for stage in trace.stages if (stage.name, stage.phase) != ("dispatch", "F")]
    return 1e3 * sum(stage.host_ms for stage in stages) / max(1, sum(stage.launches for stage in stages))


def profiler_factor(pairs: int = 5) -> float:
    """How many times as long a forward and backward of small operators takes with the profiler: the median of
    neighbouring runs with and without it."""
    layers = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))] * 16
    model, x = nn.Sequential(*layers), torch.randn(4, 16)

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(5):
            model(x).sum().backward()
        return time.perf_counter() - start

    factors = []
    for _ in range(pairs):
        alone = seconds()
        with profile(activities=[ProfilerActivity.CPU]):
            seconds()
            factors.append(seconds() / alone)
    return statistics.median(factors)


def main() -> None:
    """Read the trace and print the summary and the mean time of each kind of stage."""
    parser = argparse.ArgumentParser(prog="python -m bench.published.trace", description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--profiler", action="store_true", help="measure what a profiler adds to launches")
    options = parser.parse_args()
    trace = read_trace(options.path)
    figures = summary(trace)
    if options.profiler:
        figures["profiler_factor"] = profiler_factor()
    for name, value in figures.items():
        print(f"{name:>20} {value:10.3f}")
    by: dict[str, list[float]] = defaultdict(list)
    for stage in trace.stages:
        by[f"{stage.name}({stage.phase})"].append(stage.ms)
    for name, values in by.items():
        print(f"{name:>20} {sum(values) / len(values):10.3f} ms, {len(values)} times")


if __name__ == "__main__":
    main()
